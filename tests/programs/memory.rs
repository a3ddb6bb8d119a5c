//! The memory of a run: said before it is taken, refused where it cannot suffice, and shared by the
//! ranks.

use std::fs;

use crate::support::{Done, Job, data, directory, kill, mpiexec, program, rank_processes, until};

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

/// Returns the number that follows `what` in `text`.
fn number_after(what: &str, text: &str) -> f64 {
    let (_, rest) = text.split_once(&format!("{what} ")).unwrap_or_else(|| panic!("{what} is not in {text}"));
    let number: String = rest.chars().take_while(|digit| digit.is_ascii_digit() || *digit == '.').collect();
    number.parse().unwrap_or_else(|_| panic!("no number follows {what} in {text}"))
}

/// Returns the megabytes that a rank has mapped when it plans the memory of `run`, of a deep-mlp: what MPI
/// and the program map by themselves is known only by trying.
fn mapped_before(run: &str) -> usize {
    let limit = 1 << 20;
    let refused = limited(limit, &format!("{run} --width 8192")).expect(2);
    refused.says_once("planning the memory: rank 0 needs");
    limit * 1024 / 1_000_000 - number_after("but may allocate", &refused.stderr) as usize
}

#[test]
fn memory_that_cannot_suffice_is_refused_with_the_next_layout_that_fits() {
    const MODEL: &str = "--model deep-mlp --width 1024 --layers 8 --data synthetic --synthetic-samples 256 \
                         --optimizer adamw --steps 3";
    let own = mapped_before(MODEL);
    let limit = (own + 110) * 1000;
    let refused = limited(limit, &format!("{MODEL} --zero 0")).expect(2);
    refused.says_once("rank 0 needs 145 MB, but may allocate");
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

#[test]
fn more_micro_batches_are_a_way_out() {
    let run = "--model deep-mlp --width 64 --layers 4 --data synthetic --synthetic-samples 131072 \
               --batch-size 131072 --steps 1";
    // activations take 109 MB, or 55 of two micro-batches; the samples have mapped 29 MB more
    let limit = (mapped_before(run) + 105) * 1000;
    let refused = limited(limit, &format!("{run} --micro-batches 1")).expect(2);
    refused.says_once("rank 0 needs 109 MB, but may allocate");
    refused.says_once("--micro-batches 2 would fit");
    // the packed operands of products are in no plan, so that two fit barely or not
    let cut = limited(limit, &format!("{run} --micro-batches 4")).expect(0);
    let whole = sync_sgd(4, &format!("{run} --micro-batches 1")).run().expect(0);
    assert_eq!(cut.digest(), whole.digest());
}

/// The samples of a rank that is alone on its node are in its own memory, and the tensors of a file are whole
/// on each rank for a while.
#[test]
fn the_plan_counts_what_a_run_holds_before_its_first_step() {
    let (_directory, path) = directory();
    let rows = ndarray::Array2::from_shape_fn((20_000, 500), |(row, column)| (row ^ column) as f32);
    let classes = ndarray::Array1::from_shape_fn(20_000, |row| (row % 3) as i64);
    let file = hdf5::File::create(format!("{path}/data.h5")).expect("it can be made");
    data::put(&file, "x", &rows);
    data::put(&file, "y", &classes);
    file.close().expect("it can be written");
    let held = |ranks: usize| {
        let run = format!("--model mlp --data {path}/data.h5 --data-store on --steps 1");
        number_after("in all, beside", &sync_sgd(ranks, &run).run().expect(0).stderr)
    };
    // 40 MB of samples, beside less than as much again for MPI and the program
    for ranks in [1, 2] {
        assert!((40.0..80.0).contains(&held(ranks)), "{} MB on {ranks} ranks", held(ranks));
    }
    let model = "--model deep-mlp --width 1024 --layers 2 --data synthetic --synthetic-samples 64 --steps 1";
    sync_sgd(1, &format!("{model} --export {path}/weights.h5")).run().expect(0);
    let copies = |more: &str| {
        let run = sync_sgd(2, &format!("{model} {more}")).run().expect(0);
        number_after("copies for files", &run.stderr)
    };
    // a layer has 1024 × 1024 weights: the whole tensor, and the part of a rank without a tensor axis
    assert_eq!(copies(&format!("--init {path}/weights.h5")), 8.4);
    assert_eq!(copies(""), 0.0);
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
