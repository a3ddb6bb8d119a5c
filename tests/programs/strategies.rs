//! `tensor_mlp` and `pipeline` as a user runs them, and the traces of every program.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::support::{self, Job, mpiexec};
use serde_json::Value;

fn job(program: &str, ranks: usize, arguments: &str) -> Job {
    mpiexec(ranks, support::program(program)).args(arguments.split_whitespace())
}

fn train(program: &str, ranks: usize, arguments: &str) -> Value {
    job(program, ranks, &format!("--threads 1 --quiet {arguments}")).run().expect(0).result()
}

#[test]
fn tensor_mlp_learns_the_digits_whoever_has_which_part() {
    let serial = train("sync_sgd", 1, "--model mlp --epochs 6");
    for ranks in [1, 2, 3, 5] {
        for split in ["pairs", "gather"] {
            let result = train("tensor_mlp", ranks, &format!("--split {split} --epochs 6"));
            assert!(result["accuracy"].as_f64().unwrap() >= 0.92, "{result}");
            assert_eq!(result["parameters_digest"], serial["parameters_digest"], "{ranks} ranks, {split}");
            assert_eq!(result["parameters"], serial["parameters"]);
        }
    }
}

#[test]
fn a_pipeline_ends_with_the_bits_of_one_rank() {
    for model in ["--model lenet --epochs 2", "--model mlp --hidden 40,30,20 --epochs 2 --optimizer adamw"] {
        let arguments = format!("{model} --micro-batches 4 --clip-norm 1");
        let serial = train("sync_sgd", 1, &arguments);
        for (ranks, more) in [
            (2, "--schedule gpipe"),
            (3, "--schedule zero-bubble --recompute"),
            (3, "--schedule gpipe --recompute"),
            (4, "--schedule 1f1b"),
            (2, "--schedule interleaved"),
            (4, "--schedule sequential"),
            (2, "--stages 1,3"),
        ] {
            let result = train("pipeline", ranks, &format!("{arguments} {more}"));
            assert_eq!(result["parameters_digest"], serial["parameters_digest"], "{model} {more}");
            assert_eq!(result["accuracy"], serial["accuracy"]);
        }
    }
    assert!(train("pipeline", 2, "")["accuracy"].as_f64().unwrap() >= 0.97);
}

#[test]
fn the_stages_that_are_logged_can_be_given() {
    let arguments =
        "--threads 1 --model gpt --layers 3 --heads 1 --width 8 --context 8 --steps 1 --eval-every 0";
    let stages = |more: &str| {
        let done = job("pipeline", 2, &format!("{arguments} {more}")).run().expect(0);
        let logged = done.stderr.lines().find_map(|line| line.split_once("layers of the stages: "));
        logged.expect("the stages are logged").1.replace(' ', "")
    };
    let balanced = stages("");
    assert_eq!(stages(&format!("--stages {balanced}")), balanced);
}

#[test]
fn a_pipeline_has_the_bits_of_one_rank_for_any_micro_batches_and_threads() {
    for model in [
        "--model deep-mlp --width 70 --layers 4 --data synthetic --synthetic-samples 300 \
         --batch-size 53 --optimizer adamw --clip-norm 0.1 --steps 20",
        "--model mlp --hidden 50,30,20 --batch-size 50 --momentum 0.9 --steps 40",
        "--model lenet --batch-size 50 --optimizer adamw --clip-norm 1 --steps 40",
        "--model cifar --data synthetic --synthetic-samples 90 --batch-size 20 --steps 10",
    ] {
        let digest = |program, ranks, more: &str| {
            let arguments = format!("--quiet {model} {more}");
            job(program, ranks, &arguments).run().expect(0).result()["parameters_digest"].clone()
        };
        let serial = digest("sync_sgd", 1, "--threads 1");
        for (ranks, more) in [
            (1, "--threads 2 --micro-batches 5"),
            (1, "--threads 3 --micro-batches 1"),
            (2, "--threads 1 --micro-batches 8 --schedule zero-bubble"),
            (3, "--threads 2 --micro-batches 6 --schedule 1f1b"),
            (4, "--threads 1 --micro-batches 4 --schedule gpipe --recompute"),
        ] {
            assert_eq!(digest("pipeline", ranks, more), serial, "{model} on {ranks} ranks, {more}");
        }
    }
}

#[test]
fn a_schedule_goes_out_to_a_file_and_comes_back_from_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let show = |more: &str| {
        job("pipeline", 1, &format!("--show-ranks 2 --micro-batches 3 --show-schedule {more}"))
            .run()
            .expect(0)
    };
    let table = show("--schedule 1f1b").stdout;
    assert!(table.contains("rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2"), "{table}");
    let (csv, svg) = (file("plan.csv"), file("plan.svg"));
    show(&csv);
    show(&svg);
    let picture = fs::read_to_string(&svg).unwrap();
    assert!(
        picture.starts_with("<svg") && picture.matches("<rect").count() > 12 && picture.contains("rank 1")
    );
    let text = fs::read_to_string(&csv).unwrap();
    assert!(text.starts_with("0F0,0SEND_F0,"), "{text}");
    let named = train("pipeline", 2, "--epochs 1 --batch-size 96 --micro-batches 3");
    let read = train("pipeline", 2, &format!("--epochs 1 --batch-size 96 --schedule {csv}"));
    assert_eq!(named["parameters_digest"], read["parameters_digest"]);

    // passes alone: messages are added
    let passes: Vec<String> = text
        .lines()
        .map(|row| row.split(',').filter(|cell| !cell.contains('_')).collect::<Vec<_>>().join(","))
        .collect();
    let short = file("passes.csv");
    fs::write(&short, passes.join("\n")).unwrap();
    let read = train("pipeline", 2, &format!("--epochs 1 --batch-size 96 --schedule {short}"));
    assert_eq!(named["parameters_digest"], read["parameters_digest"]);

    let refused = |ranks, arguments: &str, text: &str| {
        job("pipeline", ranks, arguments).without_grace().run().expect(2).says_once(text);
    };
    let broken = file("broken.csv");
    fs::write(&broken, text.replacen("1RECV_F1,", "", 1)).unwrap();
    refused(2, &format!("--schedule {broken}"), "0SEND_F1 on rank 0 has no 1RECV_F1");
    fs::write(&broken, "0F0,0Q0\n1F0,1B0\n").unwrap();
    refused(2, &format!("--schedule {broken}"), "line 1, column 2: \"0Q0\" is not an action");
    refused(3, &format!("--schedule {csv}"), "plan.csv is for 2 ranks, but 3 share the layers");
    refused(
        2,
        &format!("--schedule {csv} --micro-batches 4"),
        "it is for 3 micro-batches, but --micro-batches is 4",
    );
    refused(2, "--schedule nowhere.csv", "reading the schedule nowhere.csv: No such file");
    refused(
        2,
        "--schedule fast",
        "expected sequential, gpipe, 1f1b, interleaved, zero-bubble, deferred, or a file that ends in .csv",
    );
    refused(1, "--show-schedule plan.png", "\"plan.png\" ends neither in .svg nor in .csv");
    refused(1, "--show-schedule /nowhere/plan.svg", "writing /nowhere/plan.svg: No such file");
}

#[test]
fn what_does_not_fit_is_refused_once_with_the_numbers() {
    for ranks in [2, 3] {
        let refused = |program, arguments: &str, text: &str| {
            job(program, ranks, arguments).without_grace().run().expect(2).says_once(text);
        };
        refused("tensor_mlp", "--split columns", "invalid value 'columns'");
        refused("pipeline", "--stages 3,2,1,1", "3,2,1,1 is 4 stages with 7 layers");
        refused("pipeline", "--stages-per-rank 0 --schedule interleaved", "0 stages a rank");
        refused("pipeline", "--micro-batches 0", "--micro-batches: it is 0, but must be above 0");
        for program in ["pipeline", "sync_sgd", "tensor_mlp"] {
            let why = "129 micro-batches are more than the 128 samples of a batch; 128 or fewer would do";
            refused(program, "--micro-batches 129", why);
        }
        let stages = format!("it takes a layer for each of {ranks} stages, and mlp has 1");
        refused("pipeline", "--model mlp --hidden none", &stages);
        refused("pipeline", "--schedule interleaved --stages-per-rank 1000000000", "262144 is the limit");
    }
    // two to four micro-batches for each rank, if that divides the batch, or else two, or a sample each
    for (batch, ranks, expected) in
        [(128, 4, 8), (18, 4, 9), (127, 4, 8), (127, 3, 6), (6, 4, 6), (5, 4, 5), (1, 8, 1)]
    {
        let show = format!("--show-schedule --show-ranks {ranks} --batch-size {batch}");
        let shown = job("pipeline", 1, &show).run().expect(0);
        let num = format!(" {expected} micro-batch");
        assert!(shown.stdout.contains(&num), "{batch}, {ranks}: {}", shown.describe());
    }
    job("pipeline", 1, "--show-schedule --show-ranks 0").run().expect(2).says_once("0 ranks");
    let huge = "--show-schedule --show-ranks 18446744073709551615";
    job("pipeline", 1, huge).run().expect(2).says_once("262144 is the limit");
}

#[test]
fn hybrid_trains_in_every_layout_and_stage_of_zero() {
    let model = "--model mlp --hidden 40,30,20,10 --epochs 1 --optimizer adamw --micro-batches 4";
    let serial = train("sync_sgd", 1, model);
    for (ranks, axes) in [
        (3, "--data 3"),
        (4, "--data 2 --stage 2 --schedule zero-bubble"),
        (5, "--stage 5"),
        (6, "--tensor 3 --split gather --recompute"),
        (8, "--data 2 --stage 2 --tensor 2"),
    ] {
        for sync in [
            "--bucket-mb 0.01 --zero 0",
            "--bucket-mb 0.01 --zero 1",
            "--bucket-mb 0.01 --zero 2",
            "--bucket-mb 0.01 --zero 3",
            "--zero 3 --accumulate parts",
        ] {
            let result = train("hybrid", ranks, &format!("{model} {axes} {sync}"));
            assert_eq!(result["parameters_digest"], serial["parameters_digest"], "{axes} {sync}");
        }
    }
}

#[test]
fn grids_that_do_not_fit_are_refused_with_all_numbers() {
    let refused = |ranks, arguments: &str, why: &str| {
        job("hybrid", ranks, arguments).without_grace().run().expect(2).says_once(why);
    };
    refused(
        8,
        "--data 2 --stage 3 --tensor 2",
        "--data 2 × --stage 3 × --tensor 2 make 12 ranks, but the job has 8",
    );
    refused(5, "--stage 2", "the job has 5 ranks, which is not a multiple of --stage 2 = 2");
    refused(2, "--replicas 0", "--replicas: it is 0, but must be at least 1");
    refused(3, "--stage 3 --model mlp --hidden none", "it takes a layer for each of 3 stages");
    refused(2, "--zero 4", "invalid value '4' for '--zero <STAGE>'");
    let alone = job("hybrid", 2, "--stage 2 --model mlp --steps 2 --zero 2").run().expect(0);
    alone.says_once("--zero 2 has no effect with one replica");
    alone.says_once("data 1 × stage 2 × tensor 1");
}

#[test]
fn a_nan_ends_every_strategy_in_good_order() {
    let blown_up = "--model mlp --learning-rate 1e30 --threads 1";
    for (program, ranks) in [("pipeline", 3), ("tensor_mlp", 2)] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.json");
        let arguments = format!("{blown_up} --trace {}", path.display());
        job(program, ranks, &arguments)
            .run()
            .expect(1)
            .says_once("the loss is NaN; try a smaller --learning-rate");
        // the steps before the error can be inspected
        let spans = check_trace(&path, ranks as u64, None);
        assert!(spans[&1].iter().any(|span| span["name"] == "step"));
    }
}

/// Checks a trace against the format: known phases, times that are numbers and not negative, spans
/// of a rank that nest, each asynchronous event begun and ended once, an arrow with both ends for
/// each message outside of collective operations. Returns the spans of each rank.
fn check_trace(path: &Path, ranks: u64, num_messages: Option<usize>) -> HashMap<u64, Vec<Value>> {
    let text = fs::read_to_string(path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let mut spans: HashMap<u64, Vec<Value>> = HashMap::new();
    let (mut begun, mut arrows) = (HashMap::new(), HashMap::new());
    for event in trace["traceEvents"].as_array().unwrap() {
        let phase = event["ph"].as_str().unwrap();
        let rank = event["pid"].as_u64().unwrap();
        assert!(rank < ranks && event["name"].is_string(), "{event}");
        if phase == "M" {
            continue;
        }
        let at = event["ts"].as_f64().unwrap();
        assert!(at >= 0.0, "{event}");
        match phase {
            "X" => {
                assert!(event["dur"].as_f64().unwrap() >= 0.0, "{event}");
                spans.entry(rank).or_default().push(event.clone());
            }
            "b" => assert!(begun.insert(event["id"].to_string(), at).is_none(), "{event}"),
            "e" => assert!(begun.remove(&event["id"].to_string()).unwrap() <= at, "{event}"),
            "s" | "f" => *arrows.entry(event["id"].to_string()).or_insert(0) += 1,
            _ => panic!("{event}"),
        }
    }
    assert!(begun.is_empty() && arrows.values().all(|ends| *ends == 2));
    if let Some(num_messages) = num_messages {
        assert_eq!(arrows.len(), num_messages, "an arrow for each message");
    }
    assert_eq!(spans.len() as u64, ranks, "a row for each rank");
    for spans in spans.values_mut() {
        let times = |span: &Value| (span["ts"].as_f64().unwrap(), span["dur"].as_f64().unwrap());
        spans.sort_by(|a, b| times(a).0.total_cmp(&times(b).0).then(times(b).1.total_cmp(&times(a).1)));
        let mut open: Vec<f64> = Vec::new();
        for span in &*spans {
            let (start, duration) = times(span);
            // a nanosecond of rounding
            open.retain(|end| *end > start + 1e-3);
            assert!(open.last().is_none_or(|end| start + duration <= end + 1e-3), "{span} does not nest");
            open.push(start + duration);
        }
    }
    spans
}

#[test]
fn traces_are_sound_and_hold_what_was_done() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    for (program, ranks, arguments, num_messages, names) in [
        (
            "sync_sgd",
            3,
            "--steps 5",
            // the part of a tensor that rank 1 provides at the end, and the four of rank 2
            5,
            &[
                "step",
                "read samples",
                "forward 0",
                "backward 0",
                "layer 1",
                "optimizer",
                "evaluation",
                "all_reduce",
            ][..],
        ),
        ("tensor_mlp", 2, "--steps 5 --split gather", 6, &["forward 0", "all_gather", "reduce_scatter"]),
        (
            "pipeline",
            3,
            "--steps 5 --schedule zero-bubble --micro-batches 4",
            // two boundaries, forward and backward, five steps; forward for the test samples; the
            // tensors of ranks 1 and 2 at the end
            2 * 4 * (2 * 5 + 8) + 6,
            &["forward 3", "input gradient 3", "weight gradient 3", "receive", "optimizer"],
        ),
        ("pi", 4, "", 0, &["reduce"]),
    ] {
        let trace = path.display();
        let done = job(program, ranks, &format!("{arguments} --trace {trace}")).run().expect(0);
        let spans = check_trace(&path, ranks as u64, Some(num_messages));
        for name in names {
            let has = |spans: &Vec<Value>| spans.iter().any(|span| span["name"] == *name);
            assert!(spans.values().any(has), "{program} has no {name}");
        }
        let steps = |spans: &Vec<Value>| spans.iter().filter(|span| span["name"] == "step").count();
        assert!(spans.values().all(|spans| steps(spans) == if program == "pi" { 0 } else { 5 }));
        let sends_bytes = |span: &Value| span["cat"] != "communication" || span["args"]["bytes"].is_u64();
        assert!(spans.values().flatten().all(sends_bytes));
        assert_eq!(
            done.stderr.contains("time in steps, all ranks: compute"),
            program != "pi",
            "{}",
            done.describe()
        );
        assert_eq!(done.stderr.contains("% measured"), program == "pipeline");
    }
    job("pi", 2, "--trace /nowhere/trace.json")
        .run()
        .expect(2)
        .says_once("creating --trace /nowhere/trace.json: No such file");
}
