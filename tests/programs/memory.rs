//! The memory of a run: said before it is taken, refused where it cannot suffice, and shared by the
//! ranks.

use std::fs;

use crate::support::{Done, Job, directory, kill, mpiexec, program, rank_processes, until};

fn sync_sgd(ranks: usize, arguments: &str) -> Job {
    let job =
        mpiexec(ranks, program("sync_sgd")).args(["--threads", "1", "--eval-every", "0", "--log-every", "0"]);
    job.args(arguments.split_whitespace())
}

/// Runs `arguments` of sync_sgd on 4 ranks that may map `kibibytes` each.
fn limited(kibibytes: usize, arguments: &str) -> Done {
    let script = format!("ulimit -v {kibibytes}; exec \"$0\" \"$@\"");
    mpiexec(4, "sh")
        .args(["-c", &script, program("sync_sgd")])
        .args(arguments.split_whitespace())
        .args(["--threads", "1", "--eval-every", "0"])
        .run()
}

#[test]
fn memory_that_cannot_suffice_is_refused_with_the_next_layout_that_fits() {
    const MODEL: &str = "--model deep-mlp --width 1024 --layers 8 --data synthetic --synthetic-samples 256 \
                         --optimizer adamw --steps 3";
    let number = |text: &str, before: &str| -> usize {
        let (_, rest) = text.split_once(before).unwrap_or_else(|| panic!("{before} is not in {text}"));
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("a number follows")
    };
    // what MPI and the program map by themselves is known only by trying
    let enough = 1 << 20;
    let first = limited(enough, &format!("{MODEL} --width 8192")).expect(2);
    first.says_once("planning the memory: rank 0 needs");
    let own = enough * 1024 / 1_000_000 - number(&first.stderr, "but may allocate ");
    let limit = (own + 110) * 1000;
    let refused = limited(limit, &format!("{MODEL} --zero 0")).expect(2);
    refused.says_once("rank 0 needs 146 MB, but may allocate");
    refused.says_once("--zero 1 would fit");
    let done = limited(limit, &format!("{MODEL} --zero 1")).expect(0);
    done.says_once("memory of the fullest rank, in MB: parameters 33.6, gradients 33.6, optimizer 16.8");
    done.says_once("memory reached: ");
    let free = sync_sgd(4, &format!("{MODEL} --zero 0")).run().expect(0);
    let small = limited((own + 60) * 1000, &format!("{MODEL} --zero 3")).expect(0);
    assert_eq!(small.digest(), free.digest());
    // parameters, slots and gradients are 134 MB: no rank has room for all of them, because the
    // thread that waits for signals maps 70 MB
    let (_directory, path) = directory();
    let in_parts = format!("{MODEL} --zero 3 --checkpoint-dir {path}/c --checkpoint-every 1");
    let limit = (own + 190) * 1000;
    limited(limit, &in_parts.replace("--zero 3", "--zero 0")).expect(2).says_once("--zero 2 would fit");
    assert_eq!(limited(limit, &in_parts).expect(0).digest(), free.digest());
    fs::remove_file(format!("{path}/c/step-00000003.h5")).expect("it was written");
    let resumed = limited(limit, &format!("{in_parts} --export {path}/w.h5")).expect(0);
    resumed.says_once("resuming after step 2");
    assert_eq!(resumed.digest(), free.digest());
}

/// The first checkpoint of a large state takes no longer than the others, because its memory has
/// been touched before.
#[test]
fn memory_for_checkpoints_is_there_before_the_first() {
    let (directory, path) = directory();
    let run = format!(
        "--model deep-mlp --width 1024 --data synthetic --synthetic-samples 128 --optimizer adamw \
         --steps 1000 --pace 300ms --metrics {path}/m.csv"
    );
    let metrics = directory.path().join("m.csv");
    let resident = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the rank runs");
        let kibibytes =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        kibibytes.and_then(|text| text.trim().parse::<f64>().ok()).expect("a size in kB") * 1.024e-3
    };
    let [without, with] = ["", &format!("--checkpoint-dir {path}")].map(|more| {
        let _ = fs::remove_file(&metrics);
        let mut memory = Vec::new();
        let done = sync_sgd(2, &format!("{run} {more}")).run_with(|launcher| {
            // a few steps later, all other memory has been touched
            until(|| fs::read_to_string(&metrics).is_ok_and(|rows| rows.lines().count() > 5));
            let ranks = rank_processes(launcher);
            memory = ranks.iter().map(|rank| resident(*rank)).collect();
            kill("TERM", &ranks[1].to_string());
        });
        // nothing but checkpoints makes a run catch signals
        done.expect(if more.is_empty() { 143 } else { 75 });
        memory
    });
    let files = fs::read_dir(directory.path()).expect("it can be read");
    let names = files.map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned());
    assert_eq!(names.filter(|name| name.ends_with(".h5")).count(), 1);
    // every rank has a copy of its half of 16.8 MB and of two slots, 25 MB; whether other memory is
    // on huge pages of 2 MB differs from run to run, by 4 MB in each of the two
    for rank in [0, 1] {
        let more = with[rank] - without[rank];
        assert!(more > 17.0, "rank {rank} has {more:.0} MB more than without checkpoints");
    }
}

#[test]
fn a_checkpoint_costs_rank_0_a_copy_of_its_part() {
    let (_directory, path) = directory();
    let base =
        "--model deep-mlp --width 1024 --data synthetic --synthetic-samples 256 --optimizer adamw --steps 6";
    let peak = |arguments: &str| {
        let result = sync_sgd(2, &format!("{base} {arguments}")).run().expect(0).result();
        result["peak_memory_mb"].as_f64().expect("Linux says how much memory a process had")
    };
    let without = peak("");
    let with = peak(&format!("--checkpoint-dir {path} --checkpoint-every 2 --keep 1 --export {path}/w.h5"));
    // 1024 × 1024 parameters in each of four layers, and two slots; batches of two layers, of which
    // half a batch arrives in a message; the rest is the HDF5 library's and the thread's own
    let layer = 4.0 * 1024.0 * 1024.0 / 1e6;
    let (copy, batches) = (3.0 * 4.0 * layer / 2.0, (1.0 + 2.0 / 2.0) * 2.0 * layer);
    let bound = copy + batches + 10.0;
    assert!(with - without < bound, "{with} MB with checkpoints, {without} MB without, not {bound} more");
}
