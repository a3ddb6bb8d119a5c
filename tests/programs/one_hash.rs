//! The bits of the parameters and of the losses are the same in every layout, for any number of threads, with
//! any vector instructions and any MPI. `make soak` trains in every layout of [`layouts`] (with
//! `$PHALANX_SOAK`), `make test` in a sample of 40.

use std::collections::HashMap;
use std::time::Duration;

use crate::support::{self, mpiexec};

/// A network with its data and optimizer, and the digest of its parameters after training.
struct Case {
    arguments: &'static str,
    digest: &'static str,
    /// The most stages, and the most ranks that can share layers.
    most_stages: usize,
    most_tensor_ranks: usize,
    /// True if ranks can have some of the positions of a sample each.
    has_sequences: bool,
}

/// Batches are uneven, and the last of an epoch is short.
const CASES: [Case; 9] = [
    Case {
        arguments: "--model mlp --hidden 50,40,30,20,20,20,20 --data synthetic --synthetic-samples 110 \
                    --synthetic-shape 37 --synthetic-targets classes:5 --batch-size 53 --steps 7 \
                    --momentum 0.9 --clip-norm 0.5 --learning-rate 0.1",
        digest: "8b1077f3776db95dcfe9d94f4a1f4ad8",
        most_stages: 8,
        most_tensor_ranks: 8,
        has_sequences: false,
    },
    Case {
        arguments: "--model deep-mlp --width 70 --layers 8 --data synthetic --synthetic-samples 90 \
                    --batch-size 41 --steps 7 --optimizer adamw --clip-norm 0.1",
        digest: "94e5c3d3d873cb096a97a412d7f82b37",
        most_stages: 8,
        most_tensor_ranks: 8,
        has_sequences: false,
    },
    Case {
        arguments: "--model lenet --data synthetic --synthetic-samples 75 --batch-size 33 --steps 5 \
                    --optimizer adamw --clip-norm 1",
        digest: "e93098e40574c2f88e30b77ba3de5588",
        most_stages: 4,
        most_tensor_ranks: 8,
        has_sequences: false,
    },
    Case {
        arguments: "--model cifar --data synthetic --synthetic-samples 40 --batch-size 19 --steps 4 \
                    --momentum 0.9",
        digest: "1fcecad0d478125266adc342f55861af",
        most_stages: 5,
        most_tensor_ranks: 8,
        has_sequences: false,
    },
    Case {
        arguments: concat!(
            "--network ",
            env!("CARGO_MANIFEST_DIR"),
            "/docs/networks/residual.kdl --data synthetic --synthetic-samples 70 --synthetic-shape 1x28x28 \
             --batch-size 27 --steps 5 --optimizer adamw --weight-decay 0.1 --decay matrices --clip-norm 1"
        ),
        digest: "8fe47d5bca359a70495c050718ac52c3",
        most_stages: 7,
        most_tensor_ranks: 8,
        has_sequences: false,
    },
    Case {
        arguments: concat!(
            "--network ",
            env!("CARGO_MANIFEST_DIR"),
            "/docs/networks/resnet-cifar.kdl --data synthetic --synthetic-samples 60 \
             --synthetic-shape 3x12x12 --batch-size 23 --steps 4 --momentum 0.9"
        ),
        digest: "e8db2ba2156af752740e6a0d4011c586",
        most_stages: 8,
        most_tensor_ranks: 8,
        has_sequences: false,
    },
    Case {
        arguments: concat!(
            "--network ",
            env!("CARGO_MANIFEST_DIR"),
            "/docs/networks/transformer.kdl --data shakespeare --test-fraction 0.002 --context 16 \
             --batch-size 11 --steps 4 --optimizer adamw --clip-norm 1"
        ),
        digest: "67e0606fe531ca7e6e50910ee258c98d",
        most_stages: 8,
        most_tensor_ranks: 8,
        has_sequences: true,
    },
    Case {
        arguments: "--model gpt --layers 3 --heads 4 --width 24 --context 21 --dropout 0.2 \
                    --test-fraction 0.002 --batch-size 13 --steps 5 --optimizer adamw --clip-norm 1",
        digest: "4c752ccb381f0a58ebc1b8f691d78215",
        most_stages: 8,
        most_tensor_ranks: 8,
        has_sequences: true,
    },
    // ranks have some of the classes each
    Case {
        arguments: "--model gpt --layers 2 --heads 2 --width 20 --context 9 --data synthetic \
                    --synthetic-samples 50 --synthetic-targets classes:43 --batch-size 21 --steps 5 \
                    --optimizer adamw --clip-norm 1",
        digest: "970880f8a191473b7ffad993d8579de6",
        most_stages: 8,
        most_tensor_ranks: 8,
        has_sequences: true,
    },
];

/// The number of layouts that `make test` tries, over all cases.
const SAMPLE: usize = 40;

/// A program on a number of ranks, with its arguments.
struct Layout {
    program: &'static str,
    ranks: usize,
    arguments: String,
}

/// Returns vector instructions that are not the widest of most processors.
fn narrower() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        return "avx2";
    }
    "portable"
}

/// Returns the layouts in which `case` can be trained. Threads and vectors change from one to the
/// next.
fn layouts(case: &Case) -> Vec<Layout> {
    let mut all: Vec<Layout> = Vec::new();
    let mut add = |program, ranks, arguments: String| {
        let (threads, vectors) = (1 + all.len() % 3, ["widest", narrower()][all.len() / 3 % 2]);
        let arguments = format!("{arguments} --threads {threads} --vectors {vectors}");
        all.push(Layout { program, ranks, arguments });
    };
    for micro_batches in [1, 2, 4, 8, 11] {
        let cut = format!("--micro-batches {micro_batches}");
        for ranks in [1, 2, 3, 4, 5, 6, 8] {
            for zero in ["0", "1", "2", "3", "3 --overlap off"] {
                add("sync_sgd", ranks, format!("{cut} --zero {zero}"));
            }
            for zero in ["2", "3"] {
                add("sync_sgd", ranks, format!("{cut} --zero {zero} --accumulate parts"));
            }
            for schedule in ["gpipe", "1f1b", "zero-bubble", "interleaved", "deferred"] {
                let num_stages = ranks * if schedule == "interleaved" { 2 } else { 1 };
                if num_stages <= case.most_stages {
                    add("pipeline", ranks, format!("{cut} --schedule {schedule}"));
                }
            }
            for split in ["pairs", "gather"] {
                if ranks <= case.most_tensor_ranks {
                    add("tensor_mlp", ranks, format!("{cut} --split {split}"));
                }
                if ranks > 1 && case.has_sequences && ranks <= case.most_tensor_ranks {
                    add("tensor_mlp", ranks, format!("{cut} --split {split} --sequence-parallel"));
                }
            }
        }
        let grids = [(2, 2, 1), (4, 2, 1), (3, 2, 1), (2, 1, 2), (1, 2, 3), (2, 2, 2), (1, 4, 2), (3, 1, 2)];
        // several sums of a rank are exchanged between stages
        if case.most_tensor_ranks > 1 {
            add("hybrid", 6, format!("{cut} --stage 2 --tensor 3 --split gather"));
        }
        for (index, (data, stage, tensor)) in grids.into_iter().enumerate() {
            if tensor <= case.most_tensor_ranks {
                let more = ["--zero 0", "--zero 2", "--zero 3", "--recompute"][index % 4];
                let grid = format!("--replicas {data} --stage {stage} --tensor {tensor}");
                add("hybrid", data * stage * tensor, format!("{cut} {grid} {more}"));
                if tensor > 1 && case.has_sequences {
                    let more = format!("{more} --sequence-parallel");
                    add("hybrid", data * stage * tensor, format!("{cut} {grid} {more}"));
                }
            }
        }
    }
    all
}

#[test]
fn every_layout_ends_with_the_same_bits() {
    let all: Vec<(&Case, Layout)> =
        CASES.iter().flat_map(|case| layouts(case).into_iter().map(move |layout| (case, layout))).collect();
    let every = if support::soak().is_some() { 1 } else { (all.len() / SAMPLE).max(1) };
    let (mut num_tried, mut losses) = (0, HashMap::new());
    for (case, Layout { program, ranks, arguments }) in all.iter().step_by(every) {
        let words = format!("{} {arguments} --quiet --eval-every 0", case.arguments);
        let job = mpiexec(*ranks, support::program(program)).args(words.split_whitespace());
        let done = job.limit(Duration::from_secs(120)).run().expect(0);
        assert_eq!(done.digest(), case.digest, "{program} on {ranks} ranks: {words}");
        let found = ["loss", "test_loss"].map(|loss| done.result()[loss].as_f64());
        let first = *losses.entry(case.digest).or_insert(found);
        assert!(
            found == first && found[0].is_some(),
            "{found:?}, not {first:?}: {program}, {ranks} ranks: {words}"
        );
        num_tried += 1;
    }
    println!("{num_tried} of {} layouts have the same bits", all.len());
    assert!(all.len() >= 300 && num_tried >= SAMPLE.min(all.len()));
}

/// Networks of sequences, with numbers of positions that the ranks do not divide, down to fewer than ranks.
#[test]
fn ranks_that_share_positions_end_with_the_same_bits() {
    let run = |program, ranks, words: &str| {
        let job = mpiexec(ranks, support::program(program)).args(words.split_whitespace());
        job.args(["--eval-every", "0", "--threads", "1"]).limit(Duration::from_secs(120)).run().expect(0)
    };
    for case in CASES.iter().filter(|case| case.has_sequences) {
        for (program, ranks, layout) in [
            ("tensor_mlp", 3, "--micro-batches 4"),
            ("tensor_mlp", 8, "--split gather --recompute"),
            ("hybrid", 4, "--replicas 2 --tensor 2 --micro-batches 2 --zero 3"),
            ("hybrid", 4, "--stage 2 --tensor 2 --micro-batches 3 --schedule zero-bubble"),
            ("hybrid", 6, "--stage 2 --tensor 3 --micro-batches 4 --schedule deferred"),
        ] {
            let words = format!("{} {layout} --sequence-parallel", case.arguments);
            let done = run(program, ranks, &words);
            done.says_once("share the positions of sequences in");
            assert_eq!(done.result()["sequence_parallel"], true, "{words}");
            assert_eq!(done.digest(), case.digest, "{program} on {ranks} ranks: {words}");
        }
    }
    let short = "--model gpt --layers 2 --heads 2 --width 12 --context 2 --test-fraction 0.002 \
                 --batch-size 13 --steps 4 --optimizer adamw --dropout 0.1";
    let expected = run("sync_sgd", 1, short).digest();
    assert_eq!(run("tensor_mlp", 3, &format!("{short} --sequence-parallel")).digest(), expected);
    // nothing to share
    for (words, why) in [
        ("--model lenet --steps 3", "no layer of lenet treats the positions of a sequence alike"),
        ("--model gpt --layers 1 --width 12 --steps 1 --replicas 2", "there is one rank on the tensor axis"),
    ] {
        let done = run("hybrid", 2, &format!("{words} --sequence-parallel"));
        done.says_once(&format!("--sequence-parallel has no effect: {why}"));
        assert_eq!(done.result()["sequence_parallel"], false);
    }
}

#[test]
fn a_run_goes_on_with_and_without_shared_positions() {
    let train = |ranks, more: &str| {
        let words = format!(
            "--model gpt --layers 2 --heads 2 --width 20 --context 9 --batch-size 12 --optimizer adamw \
             --learning-rate-schedule constant --eval-every 0 --threads 1 {more}"
        );
        let job = mpiexec(ranks, support::program("hybrid")).args(words.split_whitespace());
        job.run().expect(0).digest()
    };
    let expected = train(1, "--steps 9");
    for [first, second] in
        [["--tensor 3 --sequence-parallel", "--tensor 3"], ["--tensor 3", "--tensor 3 --sequence-parallel"]]
    {
        let directory = tempfile::tempdir().unwrap();
        let kept = format!("--checkpoint-dir {}", directory.path().display());
        train(3, &format!("--steps 4 {first} {kept}"));
        assert_eq!(train(3, &format!("--steps 9 {second} {kept}")), expected, "{first}, then {second}");
    }
}

#[test]
fn a_run_keeps_the_leaves_of_its_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let train = |program: &str, ranks, more: &str| {
        let words = format!(
            "--model mlp --hidden 30,20 --batch-size 50 --eval-every 0 --threads 1 \
             --learning-rate-schedule constant {more}"
        );
        mpiexec(ranks, support::program(program)).args(words.split_whitespace()).run()
    };
    let digest = |leaves: &str| train("sync_sgd", 2, &format!("--steps 8 {leaves}")).expect(0).digest();
    let of_four = digest("--leaves 4");
    assert_ne!(of_four, digest(""), "other leaves are other sums");

    let kept = format!("--checkpoint-dir {}", directory.path().display());
    train("sync_sgd", 1, &format!("--steps 5 --leaves 4 {kept}")).expect(0);
    let refused = train("sync_sgd", 2, &format!("--steps 8 --leaves 8 {kept}")).expect(2);
    refused.says_once("the sums of the run that is resumed have 4 leaves, which may not change");
    // more ranks than leaves: the last have no rows, and the bits are the same
    let resumed = train("sync_sgd", 5, &format!("--steps 8 {kept}")).expect(0);
    resumed.says_once("1 of 5 replicas have no rows, because a batch has 4 leaves");
    resumed.says_once("1 of 5 replicas have no ");
    resumed.says_once("the bits of the result are the same in every layout with --leaves 4");
    assert_eq!(resumed.digest(), of_four);

    let refused = train("sync_sgd", 1, "--steps 1 --leaves 257").expect(2);
    refused.says_once("--leaves 257: a sum has 1 to 256 leaves");
}
