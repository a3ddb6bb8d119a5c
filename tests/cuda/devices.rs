//! The programs on a GPU: missing libraries are named, the host's calls per step are counted, and a
//! run resumes from one device on another. The GPU is emulated, because its faults can be chosen.

#[path = "../support/mod.rs"]
mod support;
mod tuned_products;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;

use support::{Done, Job, cuda, directory, mpiexec, program, say_skipped};

const SHORT: &str = "--model mlp --steps 6 --eval-every 0 --threads 1";

/// Returns the directory of the emulated libraries, if they can be built.
fn emulator() -> Option<&'static str> {
    cuda::emulator().map_err(|why| say_skipped(&why)).ok()
}

fn job(ranks: usize, name: &str, arguments: &str) -> Job {
    mpiexec(ranks, program(name)).args(arguments.split_whitespace())
}

/// Returns a job of `sync_sgd` on emulated devices with `settings`.
fn emulated(libraries: &'static str, ranks: usize, settings: &'static str, arguments: &str) -> Job {
    let job = job(ranks, "sync_sgd", &format!("{SHORT} {arguments}"));
    job.libraries(Some(libraries)).env("PHALANX_EMULATED_CUDA", || settings.into())
}

/// Checks on 1 and 3 ranks that `--device cuda` ends with exit code 2 and `texts`, and that
/// `--device auto` computes on the CPU instead.
fn is_refused(start: impl Fn(usize, &str) -> Job, texts: &[&str]) {
    for ranks in [1, 3] {
        let done = start(ranks, "--device cuda").run().expect(2);
        texts.iter().for_each(|text| {
            done.says_once(text);
        });
        let done = start(ranks, "--device auto").run().expect(0);
        assert_eq!(done.result()["device"], "cpu");
        done.says_once("computing on the CPU: ");
        texts.iter().for_each(|text| {
            done.says_once(text);
        });
    }
}

#[test]
fn what_is_missing_is_named() {
    let Some(libraries) = emulator() else { return };
    // a directory with links to these CUDA libraries and no others, whatever this machine has
    let only = |names: &[&str]| {
        let (directory, path) = directory();
        for name in names {
            symlink(format!("{libraries}/{name}"), directory.path().join(name)).expect("a link can be made");
        }
        (directory, path)
    };
    let without = |path: &str| {
        let path = path.to_owned();
        move |ranks, arguments: &str| {
            let path = path.clone();
            job(ranks, "sync_sgd", &format!("{SHORT} {arguments}"))
                .env("LD_LIBRARY_PATH", move || path.clone())
        }
    };
    if cuda::has_driver() {
        say_skipped("this machine has a driver: its absence cannot be tried");
    } else {
        let (_nothing, path) = only(&[]);
        is_refused(
            without(&path),
            &["libcuda.so.1, the NVIDIA driver's library, cannot be loaded", "--device cpu"],
        );
        let (_driver, path) = only(&["libcuda.so.1"]);
        is_refused(without(&path), &["libnvrtc.so, which compiles kernels for the device, cannot be loaded"]);
        let (_compiler, path) = only(&["libcuda.so.1", "libnvrtc.so.12"]);
        is_refused(without(&path), &["libcublasLt.so, which multiplies matrices, cannot be loaded"]);
    }
    let with = |settings| move |ranks, arguments: &str| emulated(libraries, ranks, settings, arguments);
    is_refused(with("devices=0"), &["the driver finds no device; ask Slurm for one"]);
    is_refused(with("driver=11040"), &["is for CUDA 11.4; one for CUDA 12.0 or later is needed"]);
    let newer = |ranks, arguments: &str| {
        emulated(libraries, ranks, "driver=12040", arguments).env("PHALANX_EMULATED_NVRTC", || "13".into())
    };
    is_refused(newer, &["NVRTC is of CUDA 13.0", "for CUDA 12.4 only; load an older CUDA toolkit"]);
    is_refused(with("capability=61"), &["has compute capability 6.1; 7.0 (Volta) or later is needed"]);
    let hidden = |ranks, arguments: &str| {
        emulated(libraries, ranks, "", arguments).env("CUDA_VISIBLE_DEVICES", String::new)
    };
    is_refused(hidden, &["the driver finds no device; CUDA_VISIBLE_DEVICES is ''; "]);
}

#[test]
fn a_device_that_is_too_small_says_so_with_the_sizes() {
    let Some(libraries) = emulator() else { return };
    let arguments = "--device cuda --model deep-mlp --data synthetic --width 512 --batch-size 64";
    for ranks in [1, 2] {
        let done = emulated(libraries, ranks, "memory=40000000", arguments).run().expect(2);
        done.says_once("GiB on CUDA device 0 (Emulated CUDA device 0): 0.0");
        done.says_once("would need less");
    }
}

#[test]
fn more_ranks_than_devices_share_them() {
    let Some(libraries) = emulator() else { return };
    let shared = emulated(libraries, 3, "devices=2", "--device cuda").run().expect(0);
    shared.says_once("3 ranks of this node share 2");
    let alone = emulated(libraries, 3, "devices=4", "--device auto").run().expect(0);
    assert!(!alone.stderr.contains("share"), "{}", alone.describe());
    assert_eq!(alone.result()["device"], "cuda");
    assert_eq!(shared.digest(), alone.digest());
}

/// An MPI that is not CUDA-aware gets no device memory; one that is does, and the numbers are the
/// same.
#[test]
fn messages_straight_from_memory_where_mpi_takes_it() {
    let Some(libraries) = emulator() else { return };
    let arguments = "--device cuda --device-transfers aware";
    if phalanx::comm::awareness() == phalanx::comm::Awareness::No("MPIX_Query_cuda_support answers 0") {
        let done = emulated(libraries, 3, "", arguments).run().expect(2);
        done.says_once("cannot read the memory of a GPU (MPIX_Query_cuda_support answers 0)");
        done.says_once("or --device-transfers staged");
    }
    let aware = move || format!("{libraries}/libaware.so.1");
    for (ranks, name, options) in [
        (2, "sync_sgd", ""),
        (2, "sync_sgd", "--zero 1"),
        (3, "tensor_mlp", ""),
        (3, "tensor_mlp", "--precision bf16"),
        (2, "pipeline", ""),
    ] {
        let run = |transfers: &str| {
            let arguments = format!("{SHORT} --device cuda --device-transfers {transfers} {options}");
            job(ranks, name, &arguments).libraries(Some(libraries)).env("LD_PRELOAD", aware).run().expect(0)
        };
        let (through, straight) = (run("staged"), run("aware"));
        through.says_once("messages through the host");
        straight.says_once("messages from its memory");
        assert_eq!(through.digest(), straight.digest(), "{name} {options}");
    }
}

/// Ranks of a node map each other's memory where the driver lets them, and use MPI where it does not; the
/// numbers are the same.
#[test]
fn ranks_of_a_node_map_each_others_memory() {
    let Some(libraries) = emulator() else { return };
    for (ranks, devices, name, options) in [
        (2, 1, "sync_sgd", "--zero 0"),
        (3, 2, "sync_sgd", "--zero 2"),
        (4, 4, "hybrid", "--data 2 --tensor 2 --precision bf16"),
    ] {
        let run = |settings: &str| {
            let settings = format!("devices={devices},{settings}");
            let job = job(ranks, name, &format!("{SHORT} --device cuda {options}"));
            job.libraries(Some(libraries))
                .env("PHALANX_EMULATED_CUDA", move || settings.clone())
                .run()
                .expect(0)
        };
        let (mapped, refused, lossy) = (run("ipc=1"), run("ipc=0"), run("ipc=lossy"));
        mapped.says_once("values within a node by CUDA IPC, other messages");
        refused.says_once("the ranks of a node use MPI for all values: exporting device memory");
        lossy.says_once("the ranks of a node use MPI for all values: writing from rank");
        assert_eq!(mapped.digest(), refused.digest(), "{name} {options}");
        assert_eq!(mapped.digest(), lossy.digest(), "{name} {options}");
    }
}

/// A fault of the trial leaves the driver without use: there is no going on by other ways.
#[test]
fn a_gpu_that_is_lost_in_the_trial_is_named_once() {
    let Some(libraries) = emulator() else { return };
    let run = |options: &str| {
        let job = job(2, "sync_sgd", &format!("{SHORT} --device cuda {options}"));
        job.libraries(Some(libraries))
            .env("PHALANX_EMULATED_CUDA", || "devices=2,ipc=faulty".to_owned())
            .run()
    };
    run("").expect(1).says_once(
        "trying to map the GPU memory of other ranks: computing on CUDA device 0 (Emulated CUDA device 0): \
         an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS); avoid it with \
         --device-transfers staged",
    );
    run("--device-transfers staged").expect(0);
}

#[test]
fn the_cpu_takes_no_other_precision() {
    let done = job(2, "sync_sgd", &format!("{SHORT} --precision bf16")).run().expect(2);
    done.says_once("--precision bf16: the CPU computes in f32; choose --device cuda or --precision f32");
}

fn loss(done: &Done) -> f64 {
    done.result()["loss"].as_f64().expect("a loss is a number")
}

#[test]
fn every_program_and_precision_trains() {
    let Some(libraries) = emulator() else { return };
    for (ranks, name, options) in
        [(2, "sync_sgd", ""), (3, "tensor_mlp", "--split gather"), (2, "pipeline", "")]
    {
        let arguments = format!("{SHORT} {options}");
        let expected = loss(&job(ranks, name, &arguments).run().expect(0));
        for (precision, tolerance) in [("f32", 1e-5), ("tf32", 1e-3), ("bf16", 1e-2)] {
            let arguments =
                format!("{arguments} --device cuda --precision {precision} --device-transfers staged");
            let done = job(ranks, name, &arguments).libraries(Some(libraries)).run().expect(0);
            let found = loss(&done);
            assert!(
                (found - expected).abs() < tolerance * expected,
                "{name} {precision}: {found}, not {expected}"
            );
            assert_eq!(done.result()["precision"], precision);
            let again = job(ranks, name, &arguments).libraries(Some(libraries)).run().expect(0);
            assert_eq!(again.digest(), done.digest(), "{name} {precision}: the same twice");
        }
    }
}

#[test]
fn a_run_goes_on_from_one_device_on_another() {
    let Some(libraries) = emulator() else { return };
    let run = "--steps 12 --optimizer adamw --learning-rate-schedule constant";
    let whole = emulated(libraries, 1, "", &format!("--device cuda {run}")).run().expect(0);
    for (first, second) in [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")] {
        let (_directory, path) = directory();
        let arguments = format!("{run} --checkpoint-dir {path}");
        emulated(libraries, 1, "", &format!("--device {first} {arguments} --steps 5")).run().expect(0);
        let done = emulated(libraries, 1, "", &format!("--device {second} {arguments}")).run().expect(0);
        done.says_once("resuming after step 5");
        assert!((loss(&done) - loss(&whole)).abs() < 1e-5 * loss(&whole), "{first} to {second}");
        if first == second {
            assert_eq!(done.digest(), whole.digest());
        }
    }
}

/// The host runs a step ahead, and still every step is recorded once, in order, with the CPU's
/// numbers; signals and checkpoints due by time are noticed.
#[test]
fn a_host_that_runs_ahead_loses_nothing() {
    let Some(libraries) = emulator() else { return };
    for ranks in [1, 3] {
        for log_every in [0, 3] {
            let (_directory, path) = directory();
            let rows = |device: &str| -> Vec<(u64, f64)> {
                let metrics = format!("{path}/{device}.csv");
                let arguments =
                    format!("--device {device} --steps 20 --metrics {metrics} --log-every {log_every}");
                emulated(libraries, ranks, "", &arguments).run().expect(0);
                let text = fs::read_to_string(&metrics).expect("there are metrics");
                let row = |line: &str| {
                    let fields: Vec<&str> = line.split(',').collect();
                    (
                        fields[0].parse().expect("a step is a number"),
                        fields[2].parse().expect("a loss is a number"),
                    )
                };
                text.lines().skip(1).map(row).collect()
            };
            let (found, expected) = (rows("cuda"), rows("cpu"));
            assert_eq!(found.len(), 20, "{ranks} ranks, --log-every {log_every}");
            for (step, ((number, loss), (_, other))) in found.iter().zip(&expected).enumerate() {
                assert_eq!(*number, step as u64 + 1);
                assert!((loss - other).abs() < 1e-5 * other, "step {number}: {loss}, not {other}");
            }
        }
        let (_directory, path) = directory();
        let run =
            format!("--device cuda --log-every 0 --learning-rate-schedule constant --checkpoint-dir {path}");
        let arguments = format!("{run} --steps 100000 --checkpoint-every 200ms --time-limit 3s");
        let done = emulated(libraries, ranks, "", &arguments).run().expect(75);
        done.says_once("stopped after step");
        let files =
            phalanx::checkpoint::list(std::path::Path::new(&path)).expect("the directory can be read");
        let last = files.iter().map(|(step, _)| *step).max().expect("there is a checkpoint");
        assert!(files.len() > 1, "there are those of the clock and the last one: {files:?}");
        let steps = last + 5;
        let resumed = emulated(libraries, ranks, "", &format!("{run} --steps {steps}")).run().expect(0);
        resumed.says_once(&format!("resuming after step {last},"));
        let whole = "--device cuda --log-every 0 --learning-rate-schedule constant";
        let whole = emulated(libraries, ranks, "", &format!("{whole} --steps {steps}")).run().expect(0);
        assert_eq!(resumed.digest(), whole.digest(), "{ranks} ranks");
    }
}

/// A NaN in the parameters ends the run, although cuBLASLt's ReLU would hide it.
#[test]
fn a_run_that_blows_up_is_ended() {
    let Some(libraries) = emulator() else { return };
    let arguments = "--device cuda --learning-rate 1e30 --steps 40";
    let done = emulated(libraries, 2, "", arguments).run().expect(1);
    done.says_once("try a smaller --learning-rate");
}

/// Returns the names of the calls in the emulator's log, in order.
fn calls(log: &str) -> Vec<&str> {
    log.lines().filter_map(|line| line.split_whitespace().nth(1)).filter(|name| *name != "summary").collect()
}

/// Counts the calls that allocate, free, wait or record in a run of `steps` steps.
fn count_calls(libraries: &'static str, ranks: usize, options: &str, steps: u64) -> BTreeMap<String, u64> {
    let (_directory, path) = directory();
    let log = format!("{path}/log");
    let arguments =
        format!("--device cuda {options} --steps {steps} --batch-size 32 --check-replicas 0 --log-every 0");
    let logged = log.clone();
    let job = emulated(libraries, ranks, "", &arguments);
    job.env("PHALANX_EMULATED_CUDA_LOG", move || logged.clone()).run().expect(0);
    let text = fs::read_to_string(&log).expect("the emulator writes a log");
    let mut counts = BTreeMap::new();
    calls(&text).into_iter().for_each(|call| *counts.entry(call.to_owned()).or_insert(0) += 1);
    counts
}

/// A network whose recorded step draws anew each time.
const SMALL_GPT: &str =
    "--model gpt --layers 1 --heads 2 --width 8 --context 6 --dropout 0.3 --test-fraction 0.001";

/// At steady state a step allocates nothing, and the host waits for the device only for the result
/// of the previous step: these waits are the only calls that longer runs have more of.
#[test]
fn a_step_allocates_nothing_and_waits_once() {
    let Some(libraries) = emulator() else { return };
    for options in [
        "--model lenet",
        "--model mlp --optimizer adamw --clip-norm 1",
        "--model mlp --data synthetic --precision bf16",
        SMALL_GPT,
    ] {
        let [short, long] = [12, 32].map(|steps| count_calls(libraries, 1, options, steps));
        for (call, times) in &long {
            let more = times - short.get(call).copied().unwrap_or_default();
            let expected = if call == "cuEventSynchronize" { 20 } else { 0 };
            assert!(more <= expected, "{options}: {call} {more} times more in 20 more steps");
        }
        assert!(long.contains_key("cuMemAlloc_v2") && long.contains_key("cuEventSynchronize"), "{long:?}");
        assert!(long.contains_key("cuGraphInstantiateWithFlags"), "the step is recorded: {long:?}");
    }
}

/// A step whose operations are started one by one, as when they are traced, has the bits of a recorded one,
/// in which samples are gathered too.
#[test]
fn recorded_steps_have_the_bits_of_others() {
    let Some(libraries) = emulator() else { return };
    let residual =
        concat!("--batch-size 3 --network ", env!("CARGO_MANIFEST_DIR"), "/docs/networks/residual.kdl");
    for model in [
        "--model lenet --batch-size 8",
        "--model cifar --batch-size 3",
        "--model mlp --hidden 40,30,20 --recompute",
        "--model mlp --hidden 40,30,20 --bucket-mb 0.005",
        residual,
        &format!("{residual} --recompute"),
        &format!("{SMALL_GPT} --batch-size 4 --recompute"),
        // batches of 21, 21 and 8 samples: recorded steps and others take turns
        "--model gpt --layers 1 --heads 2 --width 8 --context 6 --dropout 0.3 --batch-size 21 \
         --data synthetic --synthetic-samples 50 --synthetic-targets classes:13",
    ] {
        let (_directory, path) = directory();
        let run = |more: &str| {
            let words = format!("{model} --device cuda --steps 5 --eval-every 0 --threads 1 {more}");
            job(1, "sync_sgd", &words).libraries(Some(libraries)).run().expect(0).digest()
        };
        assert_eq!(run(&format!("--trace {path}/trace.json")), run(""), "{model}");
    }
}

/// Several ranks, which also wait for their messages, allocate nothing either.
#[test]
fn messages_allocate_nothing_after_the_first() {
    let Some(libraries) = emulator() else { return };
    for (ranks, options) in [
        (2, "--model mlp --optimizer adamw --zero 1 --bucket-mb 0.1"),
        (3, "--model lenet --zero 0"),
        (2, "--model mlp --zero 0 --clip-norm 1"),
        (2, "--model mlp --zero 1 --device-transfers staged"),
        (3, "--model lenet --zero 0 --device-transfers staged"),
    ] {
        let [short, long] = [4, 12].map(|steps| count_calls(libraries, ranks, options, steps));
        for (call, times) in long.iter().filter(|(call, _)| *call != "cuEventSynchronize") {
            let more = times - short.get(call).copied().unwrap_or_default();
            // the host of every rank reads the norm of its part
            let reads_norm = call == "cuStreamSynchronize" && options.contains("clip");
            let expected = if reads_norm { 8 * ranks as u64 } else { 0 };
            assert_eq!(more, expected, "{ranks} ranks, {options}: {call} in 8 more steps");
        }
        assert!(long["cuMemAlloc_v2"] > 0 && long["cuMemHostAlloc"] > 0, "{long:?}");
    }
}
