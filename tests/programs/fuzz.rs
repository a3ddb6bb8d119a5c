//! Random options and files, made from a seed: every program ends soon, with exit code 0 or 2 or an
//! expected 1, and explains an error in one line.
//!
//! `$PHALANX_FUZZ` is the number of tries (`make fuzz`: 1,000), `$PHALANX_FUZZ_SEED` the first
//! seed; a failure names the seed of its try.

#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use support::{SETTINGS, data, directory, mpiexec, program};

/// The time after which a try counts as hanging.
const LIMIT: Duration = Duration::from_secs(60);

/// Values that are no number, out of range, or too large.
const ODD: [&str; 16] = [
    "0",
    "-1",
    "",
    "x",
    "1.5",
    "1e30",
    "-0",
    "nan",
    "inf",
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "99999999999999999999",
    "--",
    "é",
];

/// Options with valid values; slow ones are left out.
const OPTIONS: [(&str, &[&str]); 58] = [
    ("--model", &["mlp", "deep-mlp", "lenet", "cifar", "resnet"]),
    ("--network", &["NETWORK", "NETWORK", "FILE", "DIR", "/nowhere"]),
    ("--heads", &["1", "2", "3", "10001"]),
    ("--context", &["1", "8", "1048576"]),
    ("--stride", &["1", "8", "1000000"]),
    ("--tokens", &["characters", "bytes"]),
    ("--dropout", &["0", "0.5", "1"]),
    ("--shuffle", &["on", "off", "full", "blocks"]),
    ("--hidden", &["none", "3", "5,4", "1,1,1,1", "0", ",", "2147483648,2147483648"]),
    ("--width", &["1", "784", "6"]),
    ("--layers", &["1", "3", "10001"]),
    ("--activation", &["relu", "gelu", "tanh"]),
    ("--no-bias", &[]),
    ("--data", &["digits", "synthetic", "FILE", "FILE", "FILE", "FILE", "DIR", "/nowhere", "/dev/null", "."]),
    (
        "--inputs",
        &["x", "/y", "/", "//", "group", "group/x", "group/x/y", "../x", "half", "text", "dangling"],
    ),
    ("--targets", &["y", "/x", "/", "value", "group"]),
    ("--test-fraction", &["0.1", "0.99", "1", "1e-300"]),
    ("--standardise", &["preset", "features", "none"]),
    ("--synthetic-samples", &["1", "2", "50", "1e3", "1099511627777"]),
    (
        "--synthetic-shape",
        &["1", "784", "1x28x28", "3x32x32", "1x1x1", "3x4", "0x1x1", "1048576x1048576x1048576"],
    ),
    (
        "--synthetic-targets",
        &["classes:1", "classes:3", "values:2", "classes:0", "values", "classes:1048577"],
    ),
    ("--batch-size", &["1", "2", "7", "128", "10000"]),
    ("--micro-batches", &["1", "2", "5", "128", "1000"]),
    ("--optimizer", &["sgd", "adam", "adamw", "lion"]),
    ("--learning-rate", &["0.1", "1e-30", "1e30", "-1"]),
    ("--momentum", &["0", "0.5", "1"]),
    ("--nesterov", &[]),
    ("--weight-decay", &["0.1", "1e30"]),
    ("--decay", &["all", "matrices"]),
    ("--beta1", &["0", "0.8", "1"]),
    ("--beta2", &["0.95", "-1"]),
    ("--epsilon", &["1e-6", "0"]),
    ("--learning-rate-schedule", &["constant", "step", "cosine", "linear"]),
    ("--warmup-steps", &["1", "1000"]),
    ("--final-learning-rate", &["0.1"]),
    ("--decay-interval", &["1", "100"]),
    ("--decay-factor", &["0.5", "0"]),
    ("--clip-norm", &["1", "1e-30"]),
    ("--seed", &["7"]),
    ("--device", &["cpu", "auto"]),
    ("--precision", &["f32", "tf32", "bf16"]),
    ("--threads", &["1", "2", "1025"]),
    ("--bucket-mb", &["1", "1e-9", "1e9"]),
    ("--overlap", &["on", "off"]),
    ("--zero", &["auto", "0", "1", "2", "3"]),
    ("--accumulate", &["whole", "parts"]),
    ("--check-replicas", &["1"]),
    ("--audit", &["1", "2", "1000"]),
    ("--audit-action", &["warn", "stop"]),
    ("--inject-fault", &["update:0:1", "product:0:2:stuck", "message:9:1", "heat:0:1"]),
    ("--eval-every", &["1", "2steps"]),
    ("--metrics", &["DIR/m.csv", "DIR/m.jsonl", "DIR", "/dev/null", "/nowhere/m.csv", "FILE"]),
    ("--trace", &["DIR/t.json", "/dev/full", "DIR", "FILE"]),
    ("--checkpoint-dir", &["DIR/c", "DIR/c", "DIR/f.h5", "/proc/none"]),
    ("--checkpoint-every", &["1", "10m", "1000y"]),
    ("--resume", &["auto", "never", "CHECKPOINT", "DIR", "FILE"]),
    ("--init", &["CHECKPOINT", "FILE", "DIR"]),
    ("--export", &["DIR/w.h5", "DIR", "DIR/step-00000001.h5", "CHECKPOINT"]),
];

/// Options of `pipeline` alone.
const OF_PIPELINE: [(&str, &[&str]); 5] = [
    (
        "--schedule",
        &["1f1b", "gpipe", "zero-bubble", "interleaved", "sequential", "deferred", "CSV", "CSV", "CSV"],
    ),
    ("--stages", &["1", "2,1", "1,1,1", "0", "5,5"]),
    ("--stages-per-rank", &["1", "2", "1000000"]),
    ("--recompute", &[]),
    ("--show-schedule", &["-", "DIR/s.svg", "DIR/s.csv", "DIR/s.txt"]),
];

struct Fuzzer {
    random: ChaCha8Rng,
    /// The folder of the files that others are made from.
    sources: PathBuf,
    /// The folder of the files of this try.
    folder: PathBuf,
}

impl Fuzzer {
    fn below(&mut self, end: usize) -> usize {
        (self.random.next_u64() % end as u64) as usize
    }

    fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }

    /// Writes a copy of a random source whose name has this prefix; half of the copies are damaged.
    fn file(&mut self, prefix: &str, name: &str) -> String {
        let names =
            fs::read_dir(&self.sources).expect("there are sources").flatten().map(|entry| entry.file_name());
        let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        names.retain(|name| name.starts_with(prefix));
        names.sort();
        let at = self.below(names.len());
        let mut bytes = fs::read(self.sources.join(&names[at])).expect("a source can be read");
        if self.one_in(2) {
            self.damage(&mut bytes);
        }
        let path = self.folder.join(name);
        fs::write(&path, bytes).expect("a file can be written");
        path.display().to_string()
    }

    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let len = bytes.len().max(1);
            // often at the front, which determines how the rest is read
            let at = if self.one_in(2) { self.below(len.min(2048)) } else { self.below(len) };
            match self.below(5) {
                0 => bytes.truncate(at),
                1 => bytes.splice(at.min(bytes.len())..at.min(bytes.len()), vec![0xFF; 9]).for_each(drop),
                2 => bytes.iter_mut().skip(at).take(16).for_each(|byte| *byte = 0),
                _ => {
                    let with = 1 << self.below(8);
                    bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= with);
                }
            }
        }
    }

    fn value(&mut self, values: &[&str]) -> String {
        let text = if self.one_in(6) { self.pick(&ODD) } else { self.pick(values) };
        let name = format!("f{}", self.random.next_u64() % 1000);
        match text {
            "FILE" => self.file("data", &format!("{name}.h5")),
            "CSV" => self.file("schedule", &format!("{name}.csv")),
            "CHECKPOINT" => self.file("checkpoint", &format!("{name}.h5")),
            "TOKENS" => self.file("tokens", &format!("{name}.h5")),
            "NETWORK" => self.file("network", &format!("{name}.kdl")),
            other => other.replace("DIR", &self.folder.display().to_string()),
        }
    }

    fn command(&mut self) -> (&'static str, Vec<String>) {
        let name = self.pick(&["sync_sgd", "sync_sgd", "tensor_mlp", "pipeline"]);
        let mut words: Vec<String> = ["--steps", "2", "--log-every", "0"].map(str::to_owned).into();
        // combinations that belong together, so that the code behind them runs too
        let bases: [&[&str]; 9] = [
            &[],
            &["--model", "mlp"],
            &["--model", "mlp", "--data", "FILE"],
            &["--model", "deep-mlp", "--data", "FILE"],
            &["--model", "mlp", "--data", "synthetic", "--synthetic-samples", "50"],
            &["--model", "gpt", "--layers", "1", "--heads", "2", "--width", "8", "--data", "TOKENS"],
            &["--model", "resnet", "--layers", "1", "--data", "synthetic", "--synthetic-samples", "50"],
            &["--network", "NETWORK"],
            &["--network", "NETWORK", "--data", "TOKENS"],
        ];
        for word in bases[self.below(bases.len())] {
            words.push(match *word {
                "FILE" => self.file("data", "base.h5"),
                "TOKENS" => self.file("tokens", "tokens.h5"),
                "NETWORK" => self.file("network", "base.kdl"),
                other => other.to_owned(),
            });
        }
        let more: &[(&str, &[&str])] = if name == "pipeline" { &OF_PIPELINE } else { &[] };
        for _ in 0..self.below(6) {
            let at = self.below(OPTIONS.len() + 3 * more.len());
            let (option, values) =
                if at < OPTIONS.len() { OPTIONS[at] } else { more[(at - OPTIONS.len()) % more.len()] };
            words.push(option.to_owned());
            if !values.is_empty() {
                words.push(self.value(values));
            }
        }
        // a set like MNIST is a directory of files with fixed names
        if self.one_in(8) {
            for part in ["train", "t10k"] {
                self.file("images", &format!("{part}-images-idx3-ubyte"));
                self.file("labels", &format!("{part}-labels-idx1-ubyte"));
            }
            words.extend(["--data".to_owned(), self.folder.display().to_string()]);
        }
        (name, words)
    }
}

/// Writes the sources: data of several layouts, tokens, networks, schedules, a checkpoint, images and labels.
fn make_sources(folder: &Path) {
    let at = |name: &str| folder.join(name);
    data::table(&at("data-plain.h5"));
    let file = hdf5::File::create(at("data-many.h5")).expect("a file can be made");
    let (x, y) = data::rows(60);
    let put = |name: &str, chunked: bool| {
        let builder = file.new_dataset_builder();
        let builder = if chunked { builder.shuffle().deflate(1) } else { builder };
        builder.with_data(&x).create(name).expect("a dataset can be written");
    };
    file.create_group("group").expect("a group can be made");
    put("x", true);
    put("group/x", false);
    file.new_dataset_builder().with_data(&y).create("y").expect("a dataset can be written");
    file.new_dataset_builder()
        .with_data(&x.mapv(half::f16::from_f32))
        .create("half")
        .expect("a dataset can be written");
    file.new_dataset_builder()
        .with_data(&x.column(0).to_owned())
        .create("value")
        .expect("a dataset can be written");
    file.link_soft("/gone", "dangling").expect("a link can be made");
    drop(file);
    for (name, shape) in [("tokens-1.h5", &[200][..]), ("tokens-2.h5", &[20, 10])] {
        let tokens: Vec<u16> = (0..200).map(|at| at % 23).collect();
        let file = hdf5::File::create(at(name)).expect("a file can be made");
        let dataset = file.new_dataset::<u16>().shape(shape).create("tokens").expect("it can be made");
        dataset.write_raw(&tokens).expect("it can be written");
    }
    for (number, network) in ["residual", "resnet-cifar", "gpt", "transformer"].iter().enumerate() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/networks");
        let copied = fs::copy(page.join(format!("{network}.kdl")), at(&format!("network-{number}")));
        copied.expect("it can be copied");
    }
    let (images, labels) = (vec![7_u8; 12 * 784], vec![3_u8; 12]);
    let idx = |sizes: &[u32], bytes: &[u8]| {
        let header: Vec<u8> = sizes.iter().flat_map(|size| size.to_be_bytes()).collect();
        [&[0, 0, 8, sizes.len() as u8][..], &header, bytes].concat()
    };
    fs::write(at("images"), idx(&[12, 28, 28], &images)).expect("it can be written");
    fs::write(at("labels"), idx(&[12], &labels)).expect("it can be written");
    fs::write(at("schedule-1.csv"), "0F0,0B0,0F1,0B1\n").expect("it can be written");
    fs::write(at("schedule-2.csv"), "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n").expect("it can be written");
    let weights = at("checkpoints");
    let arguments =
        ["--steps", "2", "--model", "mlp", "--hidden", "3", "--checkpoint-dir"].map(PathBuf::from);
    mpiexec(1, program("sync_sgd")).args(arguments).args([&weights]).run().expect(0);
    fs::rename(weights.join("step-00000002.h5"), at("checkpoint.h5")).expect("it can be renamed");
    fs::remove_dir(weights).expect("it is empty");
}

/// Runs the command; returns its exit code, or why the way it ended is wrong.
fn attempt(name: &str, ranks: usize, words: &[String], folder: &Path) -> Result<i32, String> {
    // one rank needs no launcher
    let (code, said) = if ranks == 1 {
        let mut command = Command::new(program(name));
        command
            .args(words)
            .current_dir(folder)
            .envs(SETTINGS)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let errors = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
        command.stderr(errors.reopen().map_err(|error| error.to_string())?);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
                break Some(status);
            }
            if start.elapsed() > LIMIT {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let said = fs::read(errors.path()).unwrap_or_default();
        let status = status.ok_or_else(|| format!("it hangs: {}", String::from_utf8_lossy(&said)))?;
        (status.code(), String::from_utf8_lossy(&said).into_owned())
    } else {
        let done = mpiexec(ranks, program(name)).args(words).directory(folder).limit(LIMIT).run();
        (done.code, done.stderr)
    };
    let errors = said.lines().filter(|line| line.contains("error: ")).count();
    // an error is one line; clap's are followed by a hint and the usage
    let others = said.lines().filter(|line| !line.starts_with("20") && !line.trim().is_empty()).count();
    let is_short = ranks > 1 || said.contains("For more information") || others <= 2;
    let designed = code.filter(|code| match code {
        0 => errors == 0,
        1 | 2 => errors == 1 && is_short,
        _ => false,
    });
    designed.filter(|_| !said.contains("panicked")).ok_or_else(|| format!("exit code {code:?}: {said}"))
}

#[test]
fn whatever_comes_is_taken_or_refused() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (tries, first) = (number("PHALANX_FUZZ").unwrap_or(80), number("PHALANX_FUZZ_SEED").unwrap_or(1));
    let (sources, _) = directory();
    make_sources(sources.path());
    let (mut wrong, mut counts) = (Vec::new(), [0; 3]);
    let (start, mut longest) = (Instant::now(), Duration::ZERO);
    for seed in first..first + tries {
        let (folder, _) = directory();
        let random = ChaCha8Rng::seed_from_u64(seed);
        let mut fuzzer =
            Fuzzer { random, sources: sources.path().to_owned(), folder: folder.path().to_owned() };
        let (name, words) = fuzzer.command();
        let ranks = if fuzzer.one_in(6) { 2 + fuzzer.below(2) } else { 1 };
        let began = Instant::now();
        match attempt(name, ranks, &words, folder.path()) {
            Ok(code) => counts[code as usize] += 1,
            Err(why) => wrong.push(format!("seed {seed}: {ranks} ranks of {name} {words:?}\n{why}")),
        }
        longest = longest.max(began.elapsed());
    }
    let [done, failed, refused] = counts;
    println!(
        "{tries} tries in {:.0?}, the longest {longest:.1?}: {done} done, {failed} failed, \
         {refused} refused, {} wrong",
        start.elapsed(),
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // commands that are all refused would test the command line alone
    assert!(done >= tries / 8, "{done} of {tries} commands were run");
}
