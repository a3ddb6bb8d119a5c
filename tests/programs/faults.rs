//! Faults outside of the program: a flipped bit, a full disk, a removed directory, a file named
//! twice.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::support::{Job, Mounted, data, directory, mpiexec, program, rank_processes, until};
use phalanx::checkpoint::{self, Checkpoint};

fn sync_sgd(ranks: usize, arguments: &str) -> Job {
    let job =
        mpiexec(ranks, program("sync_sgd")).args(["--threads", "1", "--eval-every", "0", "--log-every", "0"]);
    job.args(arguments.split_whitespace())
}

fn steps_in(directory: &Path) -> Vec<u64> {
    let found = checkpoint::list(directory).expect("the directory can be read");
    found.into_iter().map(|(step, _)| step).collect()
}

/// Flips a bit of the first of `values` wherever they occur in the writable memory of `process`;
/// returns the number of places.
fn flip_bits(process: u32, values: &[f32]) -> std::io::Result<usize> {
    let pattern: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let maps = fs::read_to_string(format!("/proc/{process}/maps"))?;
    let mut memory = File::options().read(true).write(true).open(format!("/proc/{process}/mem"))?;
    let mut count = 0;
    // private memory only: a bit flipped in shared memory would be flipped for both ranks
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let ends = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let ends = ends.map(|(start, end)| [start, end].map(|end| u64::from_str_radix(end, 16).unwrap_or(0)));
        let Some([start, end]) = ends else { continue };
        let mut bytes = vec![0; (end - start) as usize];
        if memory.seek(SeekFrom::Start(start)).is_err() || memory.read_exact(&mut bytes).is_err() {
            continue;
        }
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(pattern.len()).position(|window| window == pattern) {
            at += found;
            // a high bit of the mantissa, which no rounding hides
            memory.seek(SeekFrom::Start(start + at as u64 + 2))?;
            memory.write_all(&[bytes[at + 2] ^ 0x20])?;
            count += 1;
            at += pattern.len();
        }
    }
    Ok(count)
}

#[test]
fn a_flipped_bit_gets_into_no_checkpoint() {
    let (directory, path) = directory();
    let one_more = |slot: Option<&str>, group: &str| {
        // slow enough for the other process to be changed between two steps
        let home = directory.path().join(slot.unwrap_or("parameters"));
        let arguments = format!(
            "--steps 1000 --pace 2s --zero 0 --checkpoint-every 1 --checkpoint-dir {}",
            home.display()
        );
        let mut flipped = 0;
        let done = sync_sgd(2, &arguments).run_with(|launcher| {
            until(|| steps_in(&home).contains(&2));
            let found =
                checkpoint::newest_sound(&home).expect("it can be read").checkpoint.expect("there is one");
            let values = found.read(group, "fc2.weight", &[10, 50]).expect("it has this tensor");
            let ranks = rank_processes(launcher);
            flipped =
                flip_bits(ranks[1], &values[7..40]).expect("a process may change its children's memory");
        });
        assert!(flipped > 0, "the values were not found\n{}", done.describe());
        let done = done.expect(1);
        done.says_once("comparing the replicas at step").says_once("hold different");
        done.says_once("the last checkpoint before it is ");
        let good = done
            .stderr
            .split("the last checkpoint before it is ")
            .nth(1)
            .and_then(|rest| rest.lines().next());
        let good = Checkpoint::open(Path::new(good.expect("a name follows"))).expect("it is sound");
        assert_eq!(good.description.written_by["replicas"], "the same bits");
        assert_eq!(steps_in(&home).last(), Some(&good.description.step), "nothing was written after it");
    };
    one_more(None, "model");
    one_more(Some("momentum_buffer"), "optimizer/momentum_buffer");
    let _ = path;
}

#[test]
fn an_audit_stops_a_job_that_computes_wrongly() {
    let (directory, path) = directory();
    let audited = |ranks, more: &str| sync_sgd(ranks, &format!("--steps 60 --audit 10 {more}")).run();
    let sound = audited(3, "").expect(0).digest();
    assert_eq!(sound, sync_sgd(1, "--steps 60").run().expect(0).digest(), "audits change no bit");

    let kept = format!("--checkpoint-every 8 --checkpoint-dir {path}");
    let stopped = audited(3, &format!("--inject-fault product:1:30:5 {kept}")).expect(1);
    stopped.says_once("auditing step 30: the ").says_once("on rank 1 differs from its repetition on rank 0");
    stopped.says_once(" in 1 bit; rank 2 confirms rank 0; this is a fault of the hardware");
    stopped.says_once(&format!("the last checkpoint before it is {path}/step-00000024.h5"));
    assert_eq!(steps_in(directory.path()).last(), Some(&24), "nothing was written after it");
    let resumed = audited(2, &kept).expect(0);
    assert_eq!(resumed.digest(), sound, "the last checkpoint is sound");

    let warned = audited(2, "--audit-action warn --inject-fault gradient:0:20:stuck").expect(0);
    warned.says_once("auditing step 20: ").says_once("auditing step 60: ");
    let bad = audited(2, "--inject-fault heat:0:20").expect(2);
    bad.says_once("expected KIND:RANK:STEP, such as product:1:20");
    let unused = sync_sgd(2, "--inject-fault product:0:20").run().expect(2);
    unused.says_once("--inject-fault").says_once("it is for --audit");
}

#[test]
fn checkpoints_say_whether_replicas_were_compared() {
    let (directory, path) = directory();
    for (ranks, more, expected) in
        [(1, "", "one"), (2, "", "the same bits"), (2, "--check-replicas 0", "not compared")]
    {
        let home = directory.path().join(format!("{ranks}{}", more.len()));
        sync_sgd(ranks, &format!("--steps 2 --checkpoint-dir {} {more}", home.display())).run().expect(0);
        let found =
            checkpoint::newest_sound(&home).expect("it can be read").checkpoint.expect("there is one");
        assert_eq!(found.description.written_by["replicas"], expected, "{path}");
    }
}

#[test]
fn no_output_overwrites_an_input_or_another_output() {
    let (directory, path) = directory();
    let at = |name: &str| directory.path().join(name);
    data::table_of(&at("d.h5"), 60);
    fs::hard_link(at("d.h5"), at("same.h5")).expect("a link can be made");
    let before = fs::read(at("d.h5")).expect("it can be read");
    let data = format!("--model mlp --steps 4 --batch-size 6 --data {path}/d.h5");
    let refused = |more: &str, first: &str, second: &str| {
        let done = sync_sgd(2, &format!("{data} {}", more.replace("DIR", &path))).run().expect(2);
        done.says_once(first).says_once(second);
        assert_eq!(fs::read(at("d.h5")).expect("it is still there"), before);
    };
    for option in ["--metrics", "--export", "--trace"] {
        refused(
            &format!("{option} DIR/d.h5"),
            &format!("{option} {path}/d.h5: "),
            &format!("--data {path}/d.h5 is the same file"),
        );
        refused(&format!("{option} DIR/same.h5"), &format!("{option} {path}/same.h5: "), "is the same file");
    }
    refused("--metrics DIR/f --trace DIR/f", &format!("--metrics {path}/f: "), "is the same file");
    refused("--metrics DIR/f --export DIR/./f", &format!("--export {path}/./f: "), "is the same file");
    assert!(!at("f").exists());

    // weights under the name of a checkpoint
    let run = format!("{data} --checkpoint-dir {path}/c --checkpoint-every 2");
    sync_sgd(2, &run).run().expect(0);
    refused("--export DIR/c/step-00000004.h5", "--export", "that is the name of a checkpoint");
    refused("--metrics DIR/c/step-00000004.h5", "--metrics", "that is the name of a checkpoint");
    refused("--trace DIR/c/step-00000004.h5", "--trace", "that is the name of a checkpoint");
    sync_sgd(2, &format!("{data} --export {path}/w.h5")).run().expect(0);
    fs::rename(at("w.h5"), at("c/step-00000004.h5")).expect("it can be renamed");
    let done = sync_sgd(2, &run).run().expect(0);
    done.says_once("it holds weights alone").says_once("resuming after step 2,");
}

#[test]
fn a_disk_with_room_for_two_checkpoints_keeps_two() {
    let (_directory, path) = directory();
    let small = format!("{path}/small");
    fs::create_dir(&small).expect("a directory can be made");
    let Some(_mounted) = Mounted::new(&small, 5 << 10) else { return };
    // of 2.1 MiB each
    let run = format!(
        "--model mlp --hidden 256,256 --steps 200 --checkpoint-every 20 --keep 3 --checkpoint-dir {small}",
    );
    let done = sync_sgd(2, &run).run().expect(0);
    assert_eq!(steps_in(Path::new(&small)), [180, 200], "{}", done.describe());
    // eight had no room, of which the first, second, fourth and eighth are logged
    let count = done.stderr.matches("to make room for it: the disk has no room for --keep 3").count();
    assert!((2..=4).contains(&count), "{count}\n{}", done.describe());
    // the sound one stays in every case
    fs::remove_file(format!("{small}/step-00000180.h5")).expect("it can be removed");
    fs::write(format!("{small}/filler"), vec![0; 1_500_000]).expect("there is some room");
    let done = sync_sgd(2, &run.replace("--steps 200", "--steps 240")).run().expect(1);
    done.says_once("resuming after step 200");
    assert!(steps_in(Path::new(&small)).contains(&200), "{}", done.describe());
}

#[test]
fn a_directory_that_was_removed_is_made_again() {
    let (directory, path) = directory();
    let home = directory.path().join("c");
    let run = format!("--steps 60 --pace 20ms --checkpoint-every 10 --checkpoint-dir {path}/c");
    let done = sync_sgd(2, &run).run_with(|_| {
        until(|| steps_in(&home).contains(&10));
        fs::remove_dir_all(&home).expect("it can be removed");
    });
    done.expect(0);
    assert_eq!(steps_in(&home).last(), Some(&60));
}
