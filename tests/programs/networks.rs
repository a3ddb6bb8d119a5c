//! Networks in text files.

use std::fs;

use crate::support::{self, Job, directory, mpiexec};

/// A network with residual branches, convolutions and linear layers, one of them a shortcut's.
const RESIDUAL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/networks/residual.kdl");

fn train(program: &str, ranks: usize, words: &str) -> Job {
    let job = mpiexec(ranks, support::program(program)).args(["--threads", "1", "--eval-every", "0"]);
    job.args(words.split_whitespace())
}

#[test]
fn a_run_resumes_with_the_network_of_its_checkpoint_in_any_layout() {
    let (directory, path) = directory();
    let words = |steps| {
        format!(
            "--network {RESIDUAL} --steps {steps} --batch-size 50 --seed 3 --learning-rate-schedule constant"
        )
    };
    let whole = train("sync_sgd", 1, &words(6)).run().expect(0).digest();
    let kept = format!("--checkpoint-dir {path}/run");
    let first = train("tensor_mlp", 2, &format!("{} {kept}", words(3))).run().expect(0);
    assert_ne!(first.digest(), whole);
    // a comment changes nothing, another module is another run
    let text = fs::read_to_string(RESIDUAL).unwrap();
    let other = directory.path().join("other.kdl");
    fs::write(&other, format!("// a copy\n{text}")).unwrap();
    let resume = |ranks| {
        let words = words(6).replace(RESIDUAL, other.to_str().unwrap());
        train("pipeline", ranks, &format!("{words} {kept}")).run()
    };
    let again = resume(3).expect(0);
    again.says_once("resuming after step 3");
    assert_eq!(again.digest(), whole);
    fs::write(&other, text.replace("linear 64", "linear 60")).unwrap();
    resume(2).expect(2).says_once("--network was ");
}

/// A layer over all positions after a layer by positions is no pair of linear layers. The targets of
/// synthetic tokens are their vocabulary, also for a loss that reads none.
#[test]
fn a_flattened_sequence_trains_alike_on_ranks_that_share_layers() {
    let (directory, _) = directory();
    let file = directory.path().join("flattened.kdl");
    let text = "network loss=\"mean-of-squares\"\nembedding 8\nlinear 16\ngelu\nflatten\nlinear 4\n";
    fs::write(&file, text).unwrap();
    let words = format!(
        "--network {} --data synthetic --synthetic-shape tokens:8 --synthetic-targets classes:20 --steps 3",
        file.display()
    );
    let serial = train("sync_sgd", 1, &words).run().expect(0).digest();
    for (ranks, split) in [(2, "pairs"), (3, "pairs"), (2, "gather")] {
        let shared = train("tensor_mlp", ranks, &format!("{words} --split {split}")).run().expect(0);
        assert_eq!(shared.digest(), serial, "{ranks} ranks, {split}");
    }
}

/// An embedding and a tied output are divided alike and share one gradient, wherever their layers are.
#[test]
fn tied_tensors_have_the_same_bits_in_every_layout() {
    let (directory, _) = directory();
    let file = directory.path().join("tied.kdl");
    fs::write(&file, "embedding 24\nlinear 24\ngelu\ntied-output\n").unwrap();
    let data =
        "--data synthetic --synthetic-samples 40 --batch-size 13 --steps 3 --optimizer adamw --clip-norm 1";
    let behind_linear = format!(
        "--network {} {data} --synthetic-shape tokens:7 --synthetic-targets classes:24",
        file.display()
    );
    // half of the first stage's parameters is below, half of the second's above the bound of --zero auto
    let uneven = format!(
        "--model gpt --layers 5 --width 64 --heads 4 --context 9 {data} --synthetic-targets classes:65"
    );
    let tied_alone = format!(
        "--model gpt --layers 1 --width 16 --heads 2 --context 8 {data} --synthetic-targets classes:30"
    );
    for (network, layouts) in [
        (
            behind_linear,
            &[
                ("tensor_mlp", 2, ""),
                ("tensor_mlp", 3, "--split gather"),
                ("tensor_mlp", 2, "--sequence-parallel"),
                ("hybrid", 4, "--stage 2 --tensor 2 --zero 0"),
            ][..],
        ),
        (uneven, &[("hybrid", 4, "--replicas 2 --stage 2 --stages 7,7")]),
        (
            tied_alone,
            &[("hybrid", 4, "--replicas 2 --stage 2 --stages 5,1 --zero 2 --accumulate parts --audit 1")],
        ),
    ] {
        let whole = train("sync_sgd", 1, &network).run().expect(0).digest();
        for &(program, ranks, layout) in layouts {
            let found = train(program, ranks, &format!("{network} {layout}")).run().expect(0).digest();
            assert_eq!(found, whole, "{program} on {ranks} ranks: {layout}");
        }
    }
}

#[test]
fn what_is_shown_is_read_again() {
    let (directory, _) = directory();
    for (model, data) in [
        ("--model lenet", "--data digits"),
        ("--model mlp --hidden 9,8 --activation tanh --no-bias", "--data digits"),
        ("--model deep-mlp --layers 3", "--data synthetic --synthetic-shape 12 --synthetic-samples 64"),
    ] {
        let shown = train("sync_sgd", 2, &format!("{model} {data} --show-network")).run().expect(0);
        let text = &shown.stdout;
        let (_, table) = text.split_once("\n\n").expect("a table follows the text");
        assert!(table.lines().count() > 3 && table.contains("bytes kept"), "{table}");
        let file = directory.path().join("shown.kdl");
        fs::write(&file, text).unwrap();
        let digest = |network: &str| {
            train("sync_sgd", 2, &format!("{network} {data} --steps 3")).run().expect(0).digest()
        };
        assert_eq!(digest(&format!("--network {}", file.display())), digest(model), "{text}");
    }
}

#[test]
fn bad_networks_are_refused_once() {
    let (directory, path) = directory();
    let file = directory.path().join("bad.kdl");
    let network = format!("--network {path}/bad.kdl");
    for (text, said) in [
        ("linear 10\nlineer 10\n", "bad.kdl: line 2: lineer: there is no module \"lineer\""),
        ("convolution 3 kernel=30", "a kernel of 30 × 30 does not fit images of 28 × 28"),
        ("linear 10", "module 0 `linear 10`): a linear layer needs features, not images"),
        (
            "flatten\nlinear 9",
            "bad gives 9 features, and the targets are 10 classes: cross-entropy needs classes or tokens",
        ),
        ("flatten", "building bad: no module has parameters, so there is nothing to train"),
        (
            "convolution 1024 kernel=134217728 padding=67108864\nflatten\nlinear 10",
            "it would have 18446744073709551615 parameters, and",
        ),
        ("flatten\nresidual { linear 9 }", "the body ends with 9 features, the shortcut with 784 features"),
    ] {
        fs::write(&file, text).unwrap();
        let done = train("hybrid", 2, &format!("{network} --replicas 2")).without_grace().run().expect(2);
        done.says_once(said);
    }
    // the targets of a file are channels first, and outputs channels last
    fs::write(&file, "convolution 2 kernel=3 padding=1").unwrap();
    let image = "--data synthetic --synthetic-shape 1x4x4 --synthetic-targets values:32";
    let done = train("sync_sgd", 2, &format!("{network} {image}")).without_grace().run().expect(2);
    done.says_once("a real value for each output, in one order: end with flatten");
    let missing = format!("--network {path}/none.kdl");
    train("sync_sgd", 2, &missing).run().expect(2).says_once("none.kdl");
    let both = format!("{network} --model mlp");
    train("sync_sgd", 2, &both).run().expect(2).says_once("cannot be used with");
    let unused = format!("{network} --hidden 3");
    train("sync_sgd", 2, &unused).run().expect(2).says_once("it is for --model mlp");
}

#[test]
fn a_network_of_more_text_than_a_checkpoint_holds_is_trained_with_a_warning() {
    let (_directory, path) = directory();
    let export = |layers: usize| {
        let gpt =
            "--model gpt --heads 1 --width 4 --context 4 --batch-size 2 --steps 1 --test-fraction 0.0001";
        let words = format!("{gpt} --layers {layers} --export {path}/{layers}.h5");
        let trained = train("sync_sgd", 2, &words).run().expect(0);
        let arguments = [format!("{path}/{layers}.h5"), "--length".into(), "1".into()];
        (trained, mpiexec(1, env!("CARGO_BIN_EXE_generate")).args(arguments).run())
    };
    let (_, generated) = export(80);
    generated.expect(0);
    let (trained, generated) = export(620);
    trained.says_once("predict and generate cannot use the files of this run");
    generated.expect(2).says_once("the text of the network was longer than 262144 bytes");
}
