//! The programs `probe`, with jobs that work, crash, hang and give wrong values, and `collectives`,
//! whose values are checked.

#[path = "../support/mod.rs"]
mod support;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use signal_hook::consts::{SIGINT, SIGTERM};
use support::{cuda, directory, mpiexec, say_skipped};

/// Returns the command `probe` with jobs started by `launcher`, in the environment of the tests' jobs.
fn command(launcher: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_probe"));
    for (name, value) in support::SETTINGS {
        command.env(name, value);
    }
    command.args(["--launcher", launcher]).args(arguments);
    command
}

fn probe(launcher: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    command(launcher, arguments).envs(variables.iter().copied()).output().expect("it starts")
}

/// Makes a launcher of jobs of two ranks, but for those whose arguments match one of `cases` of the shell.
fn launcher_but_for(folder: &Path, cases: &str) -> String {
    let path = folder.join("launcher");
    let script = format!("#!/bin/sh\ncase \"$*\" in\n{cases}esac\nexec {} \"$@\"\n", launcher(2));
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn launcher(ranks: usize) -> String {
    format!("{} -n {ranks}", std::env::var("MPIEXEC").unwrap_or_else(|_| "mpiexec".into()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn it_draws_where_ranks_are() {
    let output = probe(&launcher(3), &["--topology"], &[]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("3 ranks on 1 node,") && said.contains("thread level"), "{said}");
    let header = said.lines().position(|line| line.trim_start().starts_with("rank ")).expect("a table");
    for rank in 0..3 {
        let row = said.lines().nth(header + 1 + rank).unwrap_or_default();
        let words: Vec<&str> = row.split_whitespace().collect();
        let number = rank.to_string();
        // the node and its name stand in the first row only
        let [first, others] = [words.first(), words.get(if rank == 0 { 3 } else { 1 })];
        assert_eq!([first, others], [Some(&&*number); 2], "{said}");
        let cores = words.get(if rank == 0 { 4 } else { 2 });
        assert!(cores.is_some_and(|cores| cores.parse::<usize>().is_ok_and(|cores| cores > 0)), "{said}");
    }
}

/// A launcher makes some trials crash, hang, or end with wrong values.
#[test]
fn what_dies_and_what_hangs_is_told_from_what_works() {
    let (folder, path) = directory();
    let script = launcher_but_for(
        folder.path(),
        "*broadcast:host:non-blocking*) kill -SEGV $$ ;;\n\
         *' gather:host:blocking'*) exec sleep 1000 ;;\n\
         *reduce:host:non-blocking*)\n\
         echo 'error: comparing the values: 3 elements are wrong' >&2; exit 1 ;;\n",
    );
    let json = format!("{path}/found.json");
    let output = probe(&script, &["--quick", "--limit", "10s", "--json", &json], &[]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "wrong values are a failure\n{said}{}", text(&output.stderr));
    let found: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let trials = found["trials"].as_array().unwrap();
    assert!(trials.len() >= 18, "{said}");
    for trial in trials {
        let name = |key: &str| trial[key].as_str().unwrap();
        let expected = match (name("operation"), name("call")) {
            ("broadcast", "non-blocking") => "died",
            ("gather", "blocking") => "hung",
            ("reduce" | "all-reduce", "non-blocking") => "wrong",
            _ => "works",
        };
        assert_eq!(name("outcome"), expected, "{trial}");
    }
    assert!(said.contains("HANGS") && said.contains("signal 11"), "{said}");
}

/// A job is in a process group of its own, which a terminal does not interrupt.
#[test]
fn a_signal_ends_the_job_too() {
    let (folder, path) = directory();
    let script =
        launcher_but_for(folder.path(), "*--attempt*) echo $$ > \"${0%/*}/job\"; exec sleep 1000 ;;\n");
    for signal in [SIGINT, SIGTERM] {
        let mut probe = command(&script, &["--quick"]).stdout(Stdio::null()).spawn().unwrap();
        let job = || std::fs::read_to_string(format!("{path}/job")).unwrap_or_default();
        support::until(|| job().ends_with('\n'));
        let status = || std::fs::read_to_string(format!("/proc/{}/stat", job().trim()));
        support::until(|| status().is_ok_and(|status| status.contains("(sleep)")));
        support::kill(&signal.to_string(), &probe.id().to_string());
        assert_eq!(probe.wait().unwrap().signal(), Some(signal));
        assert!(status().is_err(), "the job goes on: {:?}", status());
        std::fs::remove_file(format!("{path}/job")).unwrap();
    }
}

/// Findings decide how GPU memory is sent; here that of the emulator, which any MPI accepts.
#[test]
fn programs_go_by_what_was_found() {
    let libraries = match cuda::emulator() {
        Ok(libraries) => libraries,
        Err(why) => return say_skipped(&why),
    };
    let (_folder, path) = directory();
    let json = format!("{path}/found.json");
    let output = probe(
        &launcher(2),
        &["--quick", "--json", &json],
        &[("LD_LIBRARY_PATH", &support::library_path(libraries))],
    );
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let run = |more: &[&str]| {
        let arguments =
            ["--model", "mlp", "--steps", "2", "--eval-every", "0", "--threads", "1", "--device", "cuda"];
        mpiexec(2, support::program("sync_sgd"))
            .args(arguments)
            .args(more.iter().copied())
            .libraries(Some(libraries))
            .run()
    };
    run(&["--probe", &json]).expect(0).says_once("messages from its memory");
    let other = std::fs::read_to_string(&json).unwrap().replacen("\"mpi\": \"", "\"mpi\": \"Another ", 1);
    std::fs::write(&json, other).unwrap();
    run(&["--probe", &json]).expect(2).says_once("run probe again");
    std::fs::write(&json, "{}").unwrap();
    run(&["--probe", &json]).expect(2).says_once("reading the findings of probe");
}

#[test]
fn collectives_measure_a_device_beside_the_other_ways() {
    let libraries = match cuda::emulator() {
        Ok(libraries) => libraries,
        Err(why) => return say_skipped(&why),
    };
    let aware = move || format!("{libraries}/libaware.so.1");
    let messages = &["direct", "pairwise"][..];
    for (transfers, precision, ours, others) in [
        ("auto", "f32", &["ipc"][..], &["staged", "mpi"][..]),
        ("aware", "f32", messages, &["staged", "mpi"]),
        ("aware", "bf16", messages, &["staged"]),
    ] {
        let arguments = format!(
            "--device cuda --device-transfers {transfers} --precision {precision} --json --compare \
             --operation all-reduce,all-gather --from 8 --to 64KiB --factor 8192 --seconds 0.002"
        );
        let job = mpiexec(3, env!("CARGO_BIN_EXE_collectives")).args(arguments.split_whitespace());
        let done = job.libraries(Some(libraries)).env("LD_PRELOAD", aware).run().expect(0);
        let rows: Vec<serde_json::Value> =
            done.stdout.lines().map(|line| serde_json::from_str(line).expect("a row is JSON")).collect();
        assert_eq!(rows.len(), 8, "{}", done.describe());
        for row in rows {
            let is_sum = row["operation"] == "all-reduce";
            let names: Vec<&str> = row["others"]
                .as_array()
                .unwrap()
                .iter()
                .map(|other| other["algorithm"].as_str().unwrap())
                .collect();
            assert_eq!(names, if is_sum { others } else { &["staged"] }, "{row}");
            assert!(ours.contains(&row["algorithm"].as_str().unwrap()), "{row}");
            assert_eq!(row["overlap_percent"].is_number(), row["call"] == "non-blocking", "{row}");
            assert!(row["wrong"] == 0 && row["memory"] == "device", "{row}");
        }
    }
    // what MPI cannot do by itself is done otherwise
    for precision in ["f32", "bf16"] {
        let arguments = format!(
            "--device cuda --device-transfers aware --precision {precision} --json --algorithm mpi \
             --from 8 --to 64KiB --factor 8192 --seconds 0.002"
        );
        let job = mpiexec(3, env!("CARGO_BIN_EXE_collectives")).args(arguments.split_whitespace());
        let done = job.libraries(Some(libraries)).env("LD_PRELOAD", aware).run().expect(0);
        let rows: Vec<serde_json::Value> =
            done.stdout.lines().map(|line| serde_json::from_str(line).expect("a row is JSON")).collect();
        for operation in ["all-reduce", "reduce-scatter", "all-gather", "broadcast"] {
            let of_operation = rows.iter().filter(|row| row["operation"] == operation);
            let algorithms: Vec<_> = of_operation.map(|row| &row["algorithm"]).collect();
            let has_sums = operation == "all-reduce" && precision == "f32";
            assert!(
                !algorithms.is_empty() && (!has_sums || algorithms.iter().all(|by| **by == "mpi")),
                "{rows:?}"
            );
        }
        assert!(rows.iter().all(|row| row["wrong"] == 0 && row["memory"] == "device"), "{rows:?}");
    }
}

#[test]
fn a_launcher_that_is_none_is_named() {
    for launcher in ["no-such-launcher -n 2", "false"] {
        let output = probe(launcher, &[], &[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("starting a job with `{launcher}`")), "{said}");
    }
}

#[test]
fn collectives_show_and_measure_right_values() {
    let program = env!("CARGO_BIN_EXE_collectives");
    let demo = mpiexec(3, program).args(["--demo"]).run().expect(0);
    assert!(demo.stdout.contains("rank 2    20  21  22   ->    30  33  36"), "{}", demo.describe());
    for (ranks, more) in [(1, ""), (2, "--compare"), (3, "--algorithm ring --chunk 1KiB"), (5, "")] {
        let arguments = format!("--json --from 4 --to 64KiB --factor 128 --seconds 0.002 {more}");
        let done = mpiexec(ranks, program).args(arguments.split_whitespace()).run().expect(0);
        let rows: Vec<serde_json::Value> =
            done.stdout.lines().map(|line| serde_json::from_str(line).expect("a row is JSON")).collect();
        assert!(rows.len() > 40, "{}", done.describe());
        for row in rows {
            assert!(row["wrong"] == 0 && row["median_us"].as_f64().unwrap() > 0.0, "{row}");
            assert_eq!(row["others"].is_array(), more == "--compare", "{row}");
        }
    }
    mpiexec(2, program)
        .args(["--algorithm", "best"])
        .run()
        .expect(2)
        .says_once("[possible values: mpi, direct, ");
    let endless = mpiexec(2, program).args(["--seconds", "NaN"]).run().expect(2);
    endless.says_once("--seconds: it must be a number above 0");
    let unused = mpiexec(2, program).args(["--device-transfers", "staged"]).run().expect(2);
    unused.says_once("--device-transfers: it has no effect in this run");
    let vast = mpiexec(2, program).args(["--to", "900000GiB"]).run().expect(2);
    vast.says_once("--to: the buffers on ");
    let backwards = mpiexec(2, program).args(["--from", "32MiB"]).run().expect(2);
    backwards.says_once("--from: 33554432 bytes are more than the 16777216 of --to");
}
