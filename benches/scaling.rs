//! Strong scaling on the cores of one node, beside PyTorch's DistributedDataParallel with gloo: `cargo bench
//! --bench scaling`, or `cargo bench --bench scaling -- 1 16` for these numbers of ranks.
//!
//! The batch stays the same whatever the number of ranks, which have one thread each. A line says how long a
//! step takes: the median of all steps. PyTorch's comes from `benches/pytorch_scaling.py`, in
//! turns with ours; it is left out if there is no PyTorch (`PHALANX_PYTHON` names the interpreter).

#[path = "../tests/support/mod.rs"]
mod support;

mod pytorch;

use std::process::ExitCode;
use std::time::Duration;

use support::mpiexec;

/// The time after which a job is ended: on one slow core a step of `deep-mlp` takes some 20 seconds.
const LIMIT: Duration = Duration::from_secs(600);

struct Case {
    /// The name in `pytorch_scaling.py`.
    name: &'static str,
    arguments: &'static str,
    steps: u32,
}

const CASES: [Case; 2] = [
    Case {
        name: "lenet 1024",
        arguments: "--model lenet --data synthetic --batch-size 1024 --check-replicas 0",
        steps: 30,
    },
    Case {
        name: "deep-mlp 4096 x 8 2048",
        arguments: "--model deep-mlp --width 4096 --layers 8 --data synthetic --synthetic-samples 2048 \
            --batch-size 2048 --optimizer adamw --check-replicas 0",
        steps: 3,
    },
];

fn main() -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let possible =
        std::iter::successors(Some(1), |ranks| Some(2 * ranks)).take_while(|ranks| *ranks <= cores);
    let mut all: Vec<usize> = if wanted.is_empty() { possible.collect() } else { wanted };
    all.sort_unstable();
    println!(
        "{:<24} {:>5} {:>9} {:>10} {:>9} {:>10}",
        "model, batch", "ranks", "ms/step", "efficiency", "PyTorch", "efficiency"
    );
    for case in &CASES {
        let mut first: Option<(usize, [Option<f64>; 2])> = None;
        for &ranks in &all {
            let times = [Some(case.measure(ranks)), pytorch_milliseconds(case, ranks)];
            let (fewest, slowest) = *first.get_or_insert((ranks, times));
            let efficiency =
                |which: usize| Some(slowest[which]? * fewest as f64 / (times[which]? * ranks as f64));
            let figure = |value: Option<f64>, unit: &str| {
                value.map_or("-".into(), |value| format!("{value:.1}{unit}"))
            };
            println!(
                "{:<24} {ranks:>5} {:>9} {:>10} {:>9} {:>10}",
                case.name,
                figure(times[0], ""),
                figure(efficiency(0).map(|share| 100.0 * share), "%"),
                figure(times[1], ""),
                figure(efficiency(1).map(|share| 100.0 * share), "%"),
            );
        }
    }
    println!("efficiency: time x ranks of the first line, divided by time x ranks");
    ExitCode::SUCCESS
}

impl Case {
    /// Returns the milliseconds of a step on `ranks` ranks.
    fn measure(&self, ranks: usize) -> f64 {
        let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1", "--quiet"]);
        let job = job.args(self.arguments.split_whitespace()).args(["--eval-every", "0", "--steps"]);
        let job = job.args([self.steps.to_string()]).limit(LIMIT);
        let result = job.run().expect(0).result();
        result["median_step_ms"].as_f64().unwrap_or(f64::NAN)
    }
}

/// Returns PyTorch's milliseconds of a step, if there is a PyTorch.
fn pytorch_milliseconds(case: &Case, ranks: usize) -> Option<f64> {
    let (ranks, steps) = (ranks.to_string(), case.steps.to_string());
    pytorch::numbers("pytorch_scaling.py", &[case.name, &ranks, &steps]).first().copied()
}
