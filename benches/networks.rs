//! Steps of transformers and residual networks beside PyTorch's on the same cores, in turns:
//! `PHALANX_PYTHON=python3 cargo bench --bench networks`, with a Python that has PyTorch.
//!
//! PyTorch is timed as it comes, and with what was found to help: a fused optimizer, channels last for
//! images, MKL told that the processor is Intel's, so that it uses AVX-512 on others too, and memory that
//! malloc keeps. Each rank has one thread. Times are medians of several rounds: on a shared machine a time
//! changes by a half within seconds, and the best of some runs is luck.

#[path = "../tests/support/mod.rs"]
mod support;

mod pytorch;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use support::mpiexec;

/// The most time of one measurement.
const LIMIT: Duration = Duration::from_secs(300);

/// The times that each is measured, in turns. A run has as many steps as one of `pytorch_networks.py`.
const ROUNDS: usize = 7;

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
                    --clip-norm 1 --steps 43",
        operations: 4.0e9,
        samples: 12.0,
    },
    Case {
        name: "gpt 6 x 384",
        arguments: "--model gpt --layers 6 --heads 6 --width 384 --context 256 --batch-size 8 --stride 1 \
                    --no-bias --optimizer adamw --beta2 0.99 --weight-decay 0.1 --decay matrices \
                    --clip-norm 1 --steps 9",
        operations: 138e9,
        samples: 8.0,
    },
    Case {
        name: "resnet 20",
        arguments: "--model resnet --layers 3 --data synthetic --synthetic-shape 3x32x32 --batch-size 128 \
                    --synthetic-targets classes:10 --synthetic-samples 1280 --momentum 0.9 --steps 43",
        // 40.8 million multiplications an image, three passes
        operations: 128.0 * 3.0 * 2.0 * 40.8e6,
        samples: 128.0,
    },
];

fn main() {
    println!(
        "{:<12} {:>5} {:>9} {:>10} {:>9} {:>6} {:>13} {:>13} {:>6} {:>7}",
        "network",
        "ranks",
        "ms/step",
        "samples/s",
        "GFLOP/s",
        "MB",
        "PyTorch stock",
        "PyTorch tuned",
        "MB",
        "ratio"
    );
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    for Case { name, arguments, operations, samples } in CASES {
        if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        for ranks in [1, 2] {
            let mut rounds = [(); 3].map(|()| Vec::new());
            for _ in 0..ROUNDS {
                rounds[0].push(step(arguments, ranks));
                rounds[1].push(pytorch_figures(name, ranks, false));
                rounds[2].push(pytorch_figures(name, ranks, true));
            }
            let [own, stock, tuned] = rounds.map(|rounds| Figures::median(&rounds));
            println!(
                "{name:<12} {ranks:>5} {:>9.2} {:>10.0} {:>9.0} {:>6.0} {:>13.2} {:>13.2} {:>6.0} {:>7.2}",
                own.step,
                samples / own.step * 1e3,
                operations / own.step / 1e6,
                own.memory,
                stock.step,
                tuned.step,
                stock.memory.min(tuned.memory),
                stock.step.min(tuned.step) / own.step
            );
        }
    }
    println!(
        "ratio: the smaller time of PyTorch divided by the program's; GFLOP/s: of the products and \
         convolutions alone; MB: the peak of rank 0's memory, with libraries, of the program and of the \
         smaller PyTorch"
    );
}

/// What is measured of a run.
#[derive(Clone, Copy)]
struct Figures {
    /// The median milliseconds of a step.
    step: f64,
    /// The peak of the memory of rank 0, in megabytes.
    memory: f64,
}

impl Figures {
    const NONE: Figures = Figures { step: f64::NAN, memory: f64::NAN };

    /// Returns the medians of several runs.
    fn median(runs: &[Figures]) -> Figures {
        let median = |figure: fn(&Figures) -> f64| {
            let mut figures: Vec<f64> = runs.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            figures[figures.len() / 2]
        };
        Figures { step: median(|run| run.step), memory: median(|run| run.memory) }
    }
}

/// Measures `sync_sgd`.
fn step(arguments: &str, ranks: usize) -> Figures {
    let job = mpiexec(ranks, support::program("sync_sgd")).args(arguments.split_whitespace());
    let job = job.args(["--threads", "1", "--quiet", "--eval-every", "0", "--check-replicas", "0"]);
    let result = job.limit(LIMIT).run().expect(0).result();
    let figure = |name: &str| result[name].as_f64().unwrap_or(f64::NAN);
    Figures { step: figure("median_step_ms"), memory: figure("peak_memory_mb") }
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

/// Measures PyTorch, if there is one.
fn pytorch_figures(name: &str, ranks: usize, is_tuned: bool) -> Figures {
    let script = pytorch::script("pytorch_networks.py").into_os_string();
    let mut job = mpiexec(ranks, pytorch::interpreter()).args([script, name.into()]);
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
    let figures: Vec<f64> = done.stdout.split_whitespace().map_while(|word| word.parse().ok()).collect();
    match figures[..] {
        [step, memory] => Figures { step, memory },
        _ => {
            pytorch::say_missing(&done.stderr);
            Figures::NONE
        }
    }
}
