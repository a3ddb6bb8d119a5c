//! The pages of `apps/textbook/` beside the programs: every step has the same loss.

#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use support::mpiexec;

/// The settings of the pages, as options of the programs.
const OPTIONS: &str = "--model mlp --hidden 128,64,32 --batch-size 128 --seed 1 --steps 50 --momentum 0 \
                       --learning-rate 0.2 --learning-rate-schedule constant --standardise none \
                       --threads 1 --quiet";

/// Returns the loss of each step that an example prints.
fn page(name: &str, ranks: usize) -> Vec<f64> {
    let programs = Path::new(support::program("sync_sgd")).parent().expect("a program is in a folder");
    let path = programs.join("examples").join(name);
    assert!(path.exists(), "{} is not built: cargo build --release --examples", path.display());
    let done = mpiexec(ranks, path).run().expect(0);
    let losses = done.stdout.lines().enumerate().map(|(at, line)| {
        let loss = line.strip_prefix(&format!("step {} loss ", at + 1));
        loss.and_then(|loss| loss.parse().ok()).unwrap_or_else(|| panic!("{line:?}\n{}", done.describe()))
    });
    losses.collect()
}

/// Returns the loss of each step that a program writes to its `--metrics`.
fn program(name: &str, ranks: usize, options: &str) -> Vec<f64> {
    let (_directory, path) = support::directory();
    let metrics = format!("{path}/metrics.jsonl");
    let arguments = format!("{OPTIONS} {options} --metrics {metrics}");
    mpiexec(ranks, support::program(name)).args(arguments.split_whitespace()).run().expect(0);
    let loss = |row: &str| serde_json::from_str::<Value>(row).ok()?["loss"].as_f64();
    let rows = fs::read_to_string(&metrics).expect("the metrics can be read");
    rows.lines().map(|row| loss(row).expect("a row has a loss")).collect()
}

fn check_losses(page: &[f64], program: &[f64]) {
    assert_eq!((page.len(), program.len()), (50, 50));
    for (step, (own, expected)) in page.iter().zip(program).enumerate() {
        assert!((own - expected).abs() <= 1e-5 * expected, "step {}: {own}, not {expected}", step + 1);
    }
    assert!(program[49] < 0.9 * program[0], "{program:?} learns too little");
}

#[test]
fn average_gradients_has_the_losses_of_sync_sgd() {
    for ranks in [1, 2, 3] {
        check_losses(&page("average_gradients", ranks), &program("sync_sgd", ranks, ""));
    }
}

#[test]
fn megatron_pair_has_the_losses_of_tensor_mlp() {
    for ranks in [1, 2, 3] {
        check_losses(&page("megatron_pair", ranks), &program("tensor_mlp", ranks, "--split pairs"));
    }
}

#[test]
fn gpipe_has_the_losses_of_pipeline() {
    for ranks in [1, 2, 3] {
        let options = "--schedule gpipe --micro-batches 4";
        check_losses(&page("gpipe", ranks), &program("pipeline", ranks, options));
    }
}
