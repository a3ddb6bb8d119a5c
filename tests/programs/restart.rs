//! Runs interrupted by signals and by SIGKILL, and resumed in other layouts and by other programs, end
//! with the bits of an undisturbed run on one rank.
//!
//! `$PHALANX_SOAK` is the number of interruptions (`make soak`: 200); with it, all pairs of
//! programs and ranks are tried.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{self, Done, Job, kill, mpiexec, rank_processes, soak};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The number of steps between checkpoints.
const EVERY: u64 = 20;

fn job(program: &str, ranks: usize, arguments: &str) -> Job {
    mpiexec(ranks, support::program(program)).args(["--threads", "1"]).args(arguments.split_whitespace())
}

fn digest(done: Done) -> String {
    done.expect(0).digest()
}

/// Returns the last step in a metrics file, 0 if there is none.
fn steps_done(metrics: &Path) -> u64 {
    let text = fs::read_to_string(metrics).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().last().and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// Returns the step after which a run resumed.
fn resumed_after(done: &Done) -> Option<u64> {
    let (_, rest) = done.stderr.split_once("resuming after step ")?;
    rest.split(',').next()?.parse().ok()
}

/// A run, which may be resumed in any of its layouts.
struct Interrupted {
    arguments: &'static str,
    num_steps: u64,
    /// The program, the number of ranks and more arguments of each layout.
    layouts: &'static [(&'static str, usize, &'static str)],
}

/// Runs `run` to its end, with at most `wanted` interruptions, which it counts down, and every start in
/// a random layout; returns the digest.
fn interrupted(run: &Interrupted, random: &mut ChaCha8Rng, wanted: &mut usize) -> String {
    let Interrupted { arguments, num_steps, layouts } = *run;
    let directory = tempfile::tempdir().expect("a directory can be made");
    let metrics = directory.path().join("metrics.csv");
    let more = format!(
        "--checkpoint-every {EVERY} --checkpoint-dir {}/checkpoints --metrics {}",
        directory.path().display(),
        metrics.display()
    );
    // the steps done when it was interrupted, and how many of them the restart must find
    let mut before: Option<(u64, u64)> = None;
    loop {
        let (program, ranks, layout) = layouts[random.next_u64() as usize % layouts.len()];
        let from = steps_done(&metrics);
        let target = from + 1 + random.next_u64() % (num_steps / 4);
        let victim = random.next_u64() as usize % ranks;
        let signal = ["USR1", "TERM", "INT", "KILL", "KILL", "KILL"][random.next_u64() as usize % 6];
        let interrupts = *wanted > 0;
        let mut was_sent = false;
        let done = job(program, ranks, &format!("{arguments} {layout} {more}")).run_with(|launcher| {
            let start = Instant::now();
            while interrupts && start.elapsed() < Duration::from_secs(60) {
                if steps_done(&metrics) >= target.min(num_steps) {
                    if let Some(rank) = rank_processes(launcher).get(victim) {
                        kill(signal, &rank.to_string());
                        was_sent = true;
                    }
                    break;
                }
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        if let Some((step, least)) = before {
            let found = resumed_after(&done).unwrap_or(0);
            assert!((least..=step).contains(&found), "{least} to {step}, not {found}\n{}", done.describe());
            println!("{program} {ranks} {layout}: {} of {step} steps lost", step - found);
        }
        match done.code {
            Some(0) => {
                let rows = fs::read_to_string(&metrics).expect("there are metrics");
                let steps =
                    rows.lines().skip(1).map(|row| row.split(',').next().and_then(|step| step.parse().ok()));
                assert!(steps.eq((1..=num_steps).map(Some)), "{rows}");
                return digest(done);
            }
            Some(75) => {
                assert!(was_sent && signal != "KILL", "{}", done.describe());
                done.says_once("the same command resumes from the checkpoint");
                let step = steps_done(&metrics);
                before = Some((step, step));
            }
            code => {
                assert!(was_sent && signal == "KILL" && code != Some(2), "{}", done.describe());
                // SIGKILL may come while the last checkpoint is written, because training does not
                // wait for that; nor does the row of the step after which the next one is due
                let step = steps_done(&metrics);
                let (due, begun) = (step / EVERY * EVERY, step.saturating_sub(1) / EVERY * EVERY);
                let is_written = |step: &u64| done.stderr.contains(&format!("checkpoint of step {step}: "));
                let newest = [due, begun].into_iter().find(is_written);
                before = Some((step, newest.unwrap_or(begun.saturating_sub(EVERY))));
            }
        }
        *wanted -= 1;
    }
}

/// A file from before checkpoints had a loss, and from before means and deviations were computed as
/// they are now.
#[test]
fn files_of_earlier_versions_go_on() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/step-00000010.h5");
    for (program, ranks) in [("sync_sgd", 3), ("tensor_mlp", 2), ("pipeline", 2)] {
        let directory = tempfile::tempdir().expect("a directory can be made");
        fs::copy(&fixture, directory.path().join("step-00000010.h5")).expect("it can be copied");
        let run = format!(
            "--optimizer adam --standardise features --model mlp --hidden 3 --checkpoint-dir {}",
            directory.path().display()
        );
        // nothing is left to do, and the file does not contain the loss
        let done = job(program, ranks, &format!("{run} --steps 10")).run().expect(0);
        assert!(done.result()["loss"].is_null(), "{}", done.describe());
        let done = job(program, ranks, &format!("{run} --steps 14")).run().expect(0);
        assert_eq!(resumed_after(&done), Some(10), "{}", done.describe());
        assert!(done.result()["loss"].as_f64().is_some_and(|loss| loss < 2.3), "{}", done.describe());
    }
}

#[test]
fn interrupted_runs_end_with_the_same_bits() {
    let runs = [
        Interrupted {
            arguments: "--model mlp --hidden 64,32 --steps 300 --optimizer adamw --clip-norm 1 \
                        --eval-every 0",
            num_steps: 300,
            layouts: &[
                ("sync_sgd", 1, ""),
                ("sync_sgd", 3, "--zero 1 --bucket-mb 0.02"),
                ("sync_sgd", 5, "--zero 3 --micro-batches 2 --accumulate parts"),
                ("tensor_mlp", 2, "--threads 2"),
                ("tensor_mlp", 3, "--split gather --vectors avx2"),
                ("pipeline", 3, "--schedule zero-bubble"),
                ("hybrid", 4, "--stage 2 --zero 3"),
                ("hybrid", 4, "--tensor 2 --micro-batches 4 --recompute"),
            ],
        },
        Interrupted {
            arguments: "--model lenet --epochs 3 --momentum 0.9 --eval-every 0",
            num_steps: 213,
            layouts: &[
                ("sync_sgd", 1, "--threads 2"),
                ("sync_sgd", 2, ""),
                ("sync_sgd", 3, "--zero 2 --overlap off"),
                ("pipeline", 2, "--schedule interleaved --micro-batches 4"),
                ("pipeline", 4, "--schedule gpipe"),
                ("hybrid", 4, "--stage 2 --zero 2"),
            ],
        },
    ];
    let each = soak().unwrap_or(24).div_ceil(runs.len());
    let mut random = ChaCha8Rng::seed_from_u64(soak().unwrap_or(11) as u64);
    for run in &runs {
        let undisturbed = digest(job("sync_sgd", 1, run.arguments).run());
        let mut wanted = each;
        while wanted > 0 {
            // a run may end before all interruptions have happened
            let found = interrupted(run, &mut random, &mut wanted);
            assert_eq!(found, undisturbed, "{}", run.arguments);
        }
    }
    println!("{} interruptions", each * runs.len());
}

#[test]
fn any_program_goes_on_from_any_other_s_checkpoint() {
    const MODEL: &str = "--model mlp --hidden 24,20,16 --optimizer adamw --learning-rate-schedule constant \
                         --batch-size 48 --micro-batches 4 --eval-every 0 --quiet";
    let directory = tempfile::tempdir().expect("a directory can be made");
    let at = |name: &str| directory.path().join(name);
    let programs = [
        "sync_sgd --zero 1",
        "tensor_mlp",
        "pipeline --schedule zero-bubble",
        "hybrid --zero 3 --bucket-mb 0.004 --stage {}",
        "hybrid --zero 2 --accumulate parts --tensor {}",
    ];
    let run = |program: &str, ranks: usize, arguments: &str| {
        let (program, more) = program.split_once(' ').unwrap_or((program, ""));
        let more = more.replace("{}", if ranks.is_multiple_of(2) { "2" } else { "1" });
        job(program, ranks, &format!("{MODEL} {more} {arguments}")).run()
    };
    let undisturbed = digest(run("sync_sgd", 1, "--steps 40"));
    for (number, writer) in programs.iter().enumerate() {
        for ranks in 1..=4 {
            let checkpoints = at(&format!("{number}-{ranks}"));
            run(writer, ranks, &format!("--steps 20 --checkpoint-dir {}", checkpoints.display())).expect(0);
        }
    }
    let pairs = (0..programs.len().pow(2)).map(|pair| (pair / programs.len(), pair % programs.len()));
    for (first, second) in pairs {
        let (writer, reader) = (programs[first], programs[second]);
        for (before, after) in (1..=4).flat_map(|before| (1..=4).map(move |after| (before, after))) {
            if soak().is_none() && !(4 * before + after + first + 5 * second).is_multiple_of(13) {
                continue;
            }
            let words = format!("{writer} on {before} ranks, then {reader} on {after}");
            let from = at(&format!("{first}-{before}/step-00000020.h5"));
            let found = digest(run(reader, after, &format!("--steps 40 --resume {}", from.display())));
            assert_eq!(found, undisturbed, "{words}");
        }
    }
}
