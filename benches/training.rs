//! How fast a step is, beside what the machine can do: `make bench`, or `cargo bench --bench training`.
//!
//! Each case is run by `sync_sgd` under `mpiexec`; between the cases the rate of a large matrix product is measured on as
//! many cores as the case has ranks, because on a shared machine only ratios taken in the same minutes mean anything.

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::time::Instant;

use phalanx::device::{Activation, Cpu, Device, LinearShape, WeightLayout};
use support::mpiexec;

/// The argument that makes the program measure products and print their rate.
const PRODUCTS: &str = "--products";

struct Case {
    name: &'static str,
    ranks: usize,
    arguments: &'static str,
    /// Floating-point operations of one step over all ranks: products only.
    operations: f64,
}

/// `deep-mlp`: two operations for each weight and row, forward, for its gradient, and (but in the first layer) for the inputs'.
const DEEP_OPERATIONS: f64 = 2.0 * 128.0 * 1024.0 * 1024.0 * (4.0 + 4.0 + 3.0);

/// LeNet, dense: 961 thousand forward, the same for gradients of weights, all but the first layer's 288 for those of inputs.
const LENET_OPERATIONS: f64 = 128.0 * (961e3 + 961e3 + 673e3);

const LENET: &str = "--model lenet --data digits --batch-size 128 --epochs 30 --eval-every 0";
const DEEP: &str = "--model deep-mlp --width 1024 --layers 4 --data synthetic --synthetic-samples 2560 --batch-size 128 \
    --optimizer adamw --steps 200 --eval-every 0";

const CASES: &[Case] = &[
    Case { name: "lenet, batch 128", ranks: 1, arguments: LENET, operations: LENET_OPERATIONS },
    Case { name: "lenet, batch 128", ranks: 2, arguments: LENET, operations: LENET_OPERATIONS },
    Case { name: "deep-mlp 1024 x 4, batch 128, AdamW", ranks: 1, arguments: DEEP, operations: DEEP_OPERATIONS },
    Case { name: "deep-mlp 1024 x 4, batch 128, AdamW", ranks: 2, arguments: DEEP, operations: DEEP_OPERATIONS },
];

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == PRODUCTS) {
        println!("{}", product_rate());
        return ExitCode::SUCCESS;
    }
    println!(
        "{:<38} {:>5} {:>10} {:>12} {:>18} {:>10}",
        "case", "ranks", "ms/step", "samples/s", "products GFLOP/s", "of which"
    );
    for case in CASES {
        let before = products(case.ranks);
        let job = mpiexec(case.ranks, env!("CARGO_BIN_EXE_sync_sgd"));
        let job =
            job.args(["--threads", "1", "--quiet", "--check-replicas", "0"]).args(case.arguments.split_whitespace());
        let result = job.run().expect(0).result();
        let rate = f64::max(before, products(case.ranks));
        let milliseconds = result["median_step_ms"].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:<38} {:>5} {milliseconds:>10.3} {:>12.0} {rate:>18.0} {:>9.0}%",
            case.name,
            case.ranks,
            128.0 / milliseconds * 1e3,
            100.0 * case.operations / milliseconds / 1e6 / rate
        );
    }
    println!(
        "products: 1024 x 1024 x 1024 in f32, on as many cores at once as there are ranks; of which: the share of that rate"
    );
    println!("that a step reaches, counting the operations of its dense products and convolutions only");
    ExitCode::SUCCESS
}

/// The rate of products on `ranks` cores at once, in GFLOP/s.
fn products(ranks: usize) -> f64 {
    let program = std::env::current_exe().expect("this program has a path");
    let done = mpiexec(ranks, program).args([PRODUCTS]).run().expect(0);
    done.stdout.lines().filter_map(|line| line.trim().parse::<f64>().ok()).sum()
}

fn product_rate() -> f64 {
    const SIZE: usize = 1024;
    let device = Cpu::new(1).expect("one thread can always be had");
    let shape = LinearShape { rows: SIZE, inputs: SIZE, outputs: SIZE, layout: WeightLayout::InputsByOutputs };
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
