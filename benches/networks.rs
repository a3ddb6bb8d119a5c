//! Steps of transformers and residual networks beside PyTorch's on the same cores, in turns:
//! `PHALANX_PYTHON=python3 cargo bench --bench networks`, with a Python that has PyTorch.
//!
//! PyTorch is timed as it comes, and with what was found to help: a fused optimizer, channels last for
//! images, MKL told that the processor is Intel's, so that it uses AVX-512 on others too, and memory that
//! malloc keeps. Each rank has one thread. Of
//! several rounds the best time of each counts, because other work on the machine only adds time.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use support::mpiexec;

/// The most time of one measurement.
const LIMIT: Duration = Duration::from_secs(300);

/// The times that each is measured.
const ROUNDS: usize = 3;

struct Case {
    /// The name in `pytorch_networks.py`.
    name: &'static str,
    arguments: &'static str,
    /// Floating-point operations of the products of a step, over all ranks.
    operations: f64,
    samples: f64,
}

const CASES: &[Case] = &[
    Case {
        name: "gpt 4 x 128",
        arguments: "--model gpt --layers 4 --heads 4 --width 128 --context 64 --batch-size 12 --stride 1 \
                    --no-bias --optimizer adamw --beta2 0.99 --weight-decay 0.1 --decay matrices \
                    --clip-norm 1 --steps 200",
        operations: 4.0e9,
        samples: 12.0,
    },
    Case {
        name: "gpt 6 x 384",
        arguments: "--model gpt --layers 6 --heads 6 --width 384 --context 256 --batch-size 8 --stride 1 \
                    --no-bias --optimizer adamw --beta2 0.99 --weight-decay 0.1 --decay matrices \
                    --clip-norm 1 --steps 12",
        operations: 138e9,
        samples: 8.0,
    },
    Case {
        name: "resnet 20",
        arguments: "--model resnet --layers 3 --data synthetic --synthetic-shape 3x32x32 --batch-size 128 \
                    --synthetic-targets classes:10 --synthetic-samples 1280 --momentum 0.9 --steps 30",
        // 40.8 million multiplications an image, three passes
        operations: 128.0 * 3.0 * 2.0 * 40.8e6,
        samples: 128.0,
    },
];

fn main() {
    println!(
        "{:<12} {:>5} {:>9} {:>10} {:>9} {:>13} {:>13} {:>7}",
        "network", "ranks", "ms/step", "samples/s", "GFLOP/s", "PyTorch stock", "PyTorch tuned", "ratio"
    );
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    for Case { name, arguments, operations, samples } in CASES {
        if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        for ranks in [1, 2] {
            let [mut own, mut stock, mut tuned] = [f64::INFINITY; 3];
            for _ in 0..ROUNDS {
                own = own.min(step(arguments, ranks));
                stock = stock.min(pytorch(name, ranks, false));
                tuned = tuned.min(pytorch(name, ranks, true));
            }
            println!(
                "{name:<12} {ranks:>5} {own:>9.2} {:>10.0} {:>9.0} {stock:>13.2} {tuned:>13.2} {:>7.2}",
                samples / own * 1e3,
                operations / own / 1e6,
                stock.min(tuned) / own
            );
        }
    }
    println!(
        "ratio: the best time of PyTorch by the program's; GFLOP/s: of the products and convolutions alone"
    );
}

/// Returns the median milliseconds of a step of `sync_sgd`.
fn step(arguments: &str, ranks: usize) -> f64 {
    let job = mpiexec(ranks, support::program("sync_sgd")).args(arguments.split_whitespace());
    let job = job.args(["--threads", "1", "--quiet", "--eval-every", "0", "--check-replicas", "0"]);
    job.limit(LIMIT).run().expect(0).result()["median_step_ms"].as_f64().unwrap_or(f64::NAN)
}

/// Returns a library whose answer makes MKL take any processor for one of Intel's, if it can be compiled.
fn intel_for_mkl() -> Option<PathBuf> {
    let folder = std::env::temp_dir();
    let (source, library) = (folder.join("phalanx_mkl.c"), folder.join("phalanx_mkl.so"));
    std::fs::write(&source, "int mkl_serv_intel_cpu_true(void) { return 1; }\n").ok()?;
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().ok()?;
    compiled.success().then_some(library)
}

/// Returns the median milliseconds of a step of PyTorch, or NaN if there is none.
fn pytorch(name: &str, ranks: usize, is_tuned: bool) -> f64 {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/pytorch_networks.py");
    let python = std::env::var("PHALANX_PYTHON").unwrap_or_else(|_| "python3".into());
    let mut job = mpiexec(ranks, python).args([script.into_os_string(), name.into()]);
    if is_tuned {
        job = job.args(["tuned"]).env("MKL_ENABLE_INSTRUCTIONS", || "AVX512".into());
        if let Some(library) = intel_for_mkl() {
            job = job.env("LD_PRELOAD", move || library.display().to_string());
        }
        for variable in ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"] {
            job = job.env(variable, || (4_u64 << 30).to_string());
        }
    }
    let done = job.limit(LIMIT).run();
    done.stdout.trim().parse().unwrap_or_else(|_| {
        eprintln!("no figures of PyTorch: {}", done.stderr.lines().last().unwrap_or_default());
        f64::NAN
    })
}
