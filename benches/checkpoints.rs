//! The cost of checkpoints: `cargo bench --bench checkpoints`.
//!
//! Trains `deep-mlp` 1024 × 4 with AdamW, a state of 50 MB, with a checkpoint every 50 steps and
//! without, alternately, because on a shared machine only runs of the same minutes are comparable. The
//! lower bound: every rank copies its part of the state once (50 MB at memory speed are about 10 ms).
//! While rank 0's thread reads the parts, writes, hashes twice and waits for the disk, it takes its
//! share of memory bandwidth, and of a core if none is idle.

#[path = "../tests/support/mod.rs"]
mod support;

use support::mpiexec;

const TRAINING: &str = "--model deep-mlp --width 1024 --layers 4 --data synthetic \
    --synthetic-samples 2560 --batch-size 128 \
    --optimizer adamw --steps 201 --eval-every 0 --threads 1 --quiet";

/// The number of runs of each kind.
const ROUNDS: usize = 5;

/// The size of the state: parameters and two slots.
const STATE_MB: f64 = 3.0 * 4.0 * 4.0 * 1024.0 * 1024.0 / 1e6;

fn main() {
    println!(
        "deep-mlp 1024 x 4, AdamW, batch 128; a checkpoint of {STATE_MB:.0} MB every 50 steps; \
         best of {ROUNDS} runs each, alternately"
    );
    println!(
        "{:>5} {:>14} {:>14} {:>8} {:>22}",
        "ranks", "ms/step with", "ms/step without", "more", "more memory of rank 0"
    );
    for ranks in [1, 2] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory can be made");
        let mut best = [[f64::INFINITY; 2]; 2];
        for round in 0..ROUNDS {
            for (kind, best) in best.iter_mut().enumerate() {
                let path = directory.path().join(round.to_string());
                let mut job =
                    mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(TRAINING.split_whitespace());
                if kind == 0 {
                    job = job
                        .args(["--checkpoint-every", "50", "--keep", "1", "--checkpoint-dir"])
                        .args([&path]);
                }
                let result = job.run().expect(0).result();
                let value = |name: &str| result[name].as_f64().unwrap_or(f64::NAN);
                best[0] = best[0].min(128.0 / value("samples_per_second") * 1e3);
                best[1] = best[1].min(value("peak_memory_mb"));
            }
        }
        let [[with, memory_with], [without, memory_without]] = best;
        println!(
            "{ranks:>5} {with:>14.2} {without:>14.2} {:>7.1}% {:>13.0} MB = {:.2} copies",
            100.0 * (with / without - 1.0),
            memory_with - memory_without,
            (memory_with - memory_without) / STATE_MB
        );
    }
}
