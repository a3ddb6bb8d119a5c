//! A training step beside the machine's own rate: `make bench`, or `cargo bench --bench training`.
//!
//! Each case is a program under `mpiexec`. Between the cases, the rate of a large matrix product is
//! measured on as many cores as the case has ranks, because on a shared machine only ratios taken
//! in the same minutes are comparable.

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::time::Instant;

use phalanx::device::{Activation, Cpu, LinearOperations, LinearShape, WeightLayout};
use support::mpiexec;

/// The argument that makes the program measure products and print their rate.
const PRODUCTS: &str = "--products";

struct Case {
    name: &'static str,
    program: Program,
    ranks: usize,
    arguments: &'static str,
    /// Floating-point operations of one step over all ranks, products only.
    operations: f64,
}

/// A program, with the options of its strategy.
#[derive(Clone, Copy)]
enum Program {
    SyncSgd,
    Zero(&'static str),
    TensorMlp(&'static str),
    Pipeline(&'static str),
}

impl Program {
    /// Returns the name, path and options.
    fn parts(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Program::SyncSgd => ("sync_sgd", env!("CARGO_BIN_EXE_sync_sgd"), ""),
            Program::Zero(options) => ("sync_sgd", env!("CARGO_BIN_EXE_sync_sgd"), options),
            Program::TensorMlp(options) => ("tensor_mlp", env!("CARGO_BIN_EXE_tensor_mlp"), options),
            Program::Pipeline(options) => ("pipeline", env!("CARGO_BIN_EXE_pipeline"), options),
        }
    }
}

/// `deep-mlp`: two operations for each weight and row, forward, for the weight's gradient, and for
/// the inputs' gradient in all layers but the first.
const DEEP_OPERATIONS: f64 = 2.0 * 128.0 * 1024.0 * 1024.0 * (4.0 + 4.0 + 3.0);

/// LeNet, dense: 961 thousand forward, as many for gradients of weights, and all but the first
/// layer's 288 thousand for gradients of inputs.
const LENET_OPERATIONS: f64 = 128.0 * (961e3 + 961e3 + 673e3);

const LENET: &str = "--model lenet --data digits --batch-size 128 --epochs 30 --eval-every 0";
const DEEP: &str = "--model deep-mlp --width 1024 --layers 4 --data synthetic \
    --synthetic-samples 2560 --batch-size 128 \
    --optimizer adamw --steps 200 --eval-every 0";

const LENET_NAME: &str = "lenet";
const DEEP_NAME: &str = "deep-mlp 1024 x 4";

const fn lenet(ranks: usize) -> Case {
    Case {
        name: LENET_NAME,
        program: Program::SyncSgd,
        ranks,
        arguments: LENET,
        operations: LENET_OPERATIONS,
    }
}

const fn deep(ranks: usize, program: Program) -> Case {
    Case { name: DEEP_NAME, program, ranks, arguments: DEEP, operations: DEEP_OPERATIONS }
}

const CASES: &[Case] = &[
    lenet(1),
    lenet(2),
    deep(1, Program::SyncSgd),
    deep(2, Program::SyncSgd),
    deep(2, Program::Zero("--zero 0")),
    deep(2, Program::Zero("--zero 1")),
    deep(2, Program::Zero("--zero 2")),
    deep(2, Program::Zero("--zero 3")),
    deep(2, Program::TensorMlp("--split pairs")),
    deep(2, Program::TensorMlp("--split gather")),
    deep(2, Program::Pipeline("--micro-batches 8 --schedule gpipe")),
    deep(2, Program::Pipeline("--micro-batches 8 --schedule 1f1b")),
    deep(2, Program::Pipeline("--micro-batches 8 --schedule zero-bubble")),
    deep(2, Program::Pipeline("--micro-batches 8 --schedule deferred")),
];

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == PRODUCTS) {
        println!("{}", product_rate());
        return ExitCode::SUCCESS;
    }
    println!("batch 128, deep-mlp with AdamW; one thread a rank");
    println!(
        "{:<18} {:<57} {:>5} {:>9} {:>10} {:>9} {:>9}",
        "model", "program", "ranks", "ms/step", "samples/s", "GFLOP/s", "of which"
    );
    for case in CASES {
        let before = products(case.ranks);
        let (program, path, options) = case.program.parts();
        let job = mpiexec(case.ranks, path).args(["--threads", "1", "--quiet"]);
        // the other programs have one replica
        let job = if program == "sync_sgd" { job.args(["--check-replicas", "0"]) } else { job };
        let job = job.args(options.split_whitespace()).args(case.arguments.split_whitespace());
        let result = job.run().expect(0).result();
        let rate = f64::max(before, products(case.ranks));
        let milliseconds = result["median_step_ms"].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:<18} {:<57} {:>5} {milliseconds:>9.3} {:>10.0} {rate:>9.0} {:>8.0}%",
            case.name,
            format!("{program} {options}"),
            case.ranks,
            128.0 / milliseconds * 1e3,
            100.0 * case.operations / milliseconds / 1e6 / rate
        );
    }
    println!(
        "GFLOP/s: products of 1024 x 1024 x 1024 in f32, on as many cores at once as there are ranks; \
         of which: the share of"
    );
    println!(
        "that rate that a step reaches, counting the operations of its dense products and convolutions only"
    );
    ExitCode::SUCCESS
}

/// Returns the rate of products on `ranks` cores at once, in GFLOP/s.
fn products(ranks: usize) -> f64 {
    let program = std::env::current_exe().expect("this program has a path");
    let done = mpiexec(ranks, program).args([PRODUCTS]).run().expect(0);
    done.stdout.lines().filter_map(|line| line.trim().parse::<f64>().ok()).sum()
}

fn product_rate() -> f64 {
    const SIZE: usize = 1024;
    let device = Cpu::new(1).expect("one thread can always be had");
    let shape = LinearShape::whole(SIZE, SIZE, SIZE, WeightLayout::InputsByOutputs, 8);
    let (left, right) = (vec![0.5; SIZE * SIZE], vec![0.25; SIZE * SIZE]);
    let mut product = vec![0.0; SIZE * SIZE];
    let mut best = f64::INFINITY;
    for _ in 0..40 {
        let start = Instant::now();
        device.linear_forward(&shape, &left, &right, None, Activation::Identity, &mut [], &mut product);
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * (SIZE as f64).powi(3) / best / 1e9
}
