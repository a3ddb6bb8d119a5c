//! Applies a trained network, from a checkpoint or a file of `--export`, to all samples of a data set.
//!
//! ```text
//! sync_sgd --export lenet.h5                                    trains one on the digits
//! predict lenet.h5 --part test                                  its accuracy, overall and of each class
//! mpiexec -n 4 predict lenet.h5 --data new.h5 --output out.h5   outputs and classes of 4 ranks' samples
//! ```
//!
//! The inputs are standardised as in training. On the CPU, the file and the score are the same on any number
//! of ranks.
//! For a text, classes and losses are those of each position's next token.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use phalanx::app::{self, CommonOptions, FileOption, Program};
use phalanx::comm::World;
use phalanx::dataset::TextTokens;
use phalanx::infer::{
    PredictionFile, PredictionShape, Predictor, SampleSets, ScoreSummary, TrainedNetwork, predict,
    rows_at_once,
};
use phalanx::nn::{Features, Loss};
use phalanx::train::{
    AnyDevice, DeviceOptions, Given, SamplePart, SampleRequest, ShapeText, SourceOptions, TargetsNeed,
    check_files, open_part,
};
use phalanx::{Error, Result};
use serde::Serialize;

/// The most classes or outputs of which each has a log line.
const MOST_LINES: usize = 32;

/// Apply a trained network to a data set; the ranks share the samples.
#[derive(Parser)]
#[command(name = "predict", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    given: Given,

    /// A checkpoint, or a file of --export
    network: PathBuf,

    /// HDF5 file to write, with one row per sample in /outputs, /classes and /losses, as far as the network
    /// and the data have them [default: none]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Write the logits of sequences too: /outputs is [samples, positions, tokens], which may be large
    #[arg(long, requires = "output")]
    logits: bool,

    /// Samples to predict
    #[arg(long, value_enum, default_value = "all")]
    part: SamplePart,

    #[command(flatten)]
    source: SourceOptions,

    #[command(flatten)]
    machine: DeviceOptions,

    /// Threads of each rank [default: one for each core that it may use; cores of several ranks are
    /// divided among them]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Machine",
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    threads: Option<u16>,

    #[command(flatten)]
    common: CommonOptions,
}

/// The result line.
#[derive(Serialize)]
struct Report {
    program: &'static str,
    ranks: usize,
    model: String,
    data: String,
    samples: usize,
    #[serde(flatten)]
    score: ScoreSummary,
    samples_per_second: f64,
}

/// Returns the samples that `arguments` ask for, to be predicted by `trained`.
fn request<'a>(arguments: &'a Arguments, trained: &TrainedNetwork, reads_targets: bool) -> SampleRequest<'a> {
    let Arguments { source: options, part, given, .. } = arguments;
    let (default, context, synthetic) = match trained.input() {
        Features::Tokens { len, .. } => ("shakespeare", len, ShapeText::Tokens(len)),
        shape => ("digits", 1, ShapeText::Values(shape)),
    };
    let tokens = trained.tokeniser().map_or(TextTokens::Characters, TextTokens::Of);
    SampleRequest {
        options,
        source: options.data.as_deref().unwrap_or(default),
        text: options.text(tokens, context, context, *part),
        targets: match (reads_targets, given.has("targets")) {
            (false, _) => TargetsNeed::Unread,
            (true, true) => TargetsNeed::Required,
            (true, false) => TargetsNeed::Welcome,
        },
        synthetic,
        seed: trained.seed(),
    }
}

fn run(world: &World, arguments: &Arguments) -> Result<()> {
    let (all, began) = (world.communicator(), Instant::now());
    all.agree(arguments.source.check())?;
    let trained = TrainedNetwork::open_on_all(all, &arguments.network)?;
    let reads_targets = all.agree(trained.build())?.loss != Loss::MeanOfSquares;
    let request = request(arguments, &trained, reads_targets);
    let Arguments { source, given, part, .. } = arguments;
    all.agree(source.check_used(given, request.source, request.synthetic, *part, reads_targets))?;
    let unread = (*part == SamplePart::Train).then_some("--part train reads no samples to test with");
    all.agree(given.refuse("test-data", unread))?;
    all.agree(arguments.machine.check_used(given))?;
    let sets = open_part(world, &request, arguments.part)?;
    let model = all.agree(trained.build_for(&*sets[0]))?;
    let standardise = all.agree(trained.standardise(&*sets[0]))?;
    let shape = PredictionShape::new(&model, &*sets[0]);
    let not_left_out =
        (shape.num_predictions() == 1).then_some("of samples with one prediction, all outputs are written");
    all.agree(given.refuse("logits", not_left_out))?;
    let shape = shape.with_logits(arguments.logits);
    let mut sources: Vec<String> = sets.iter().map(|set| set.source()).collect();
    sources.dedup();
    let data = sources.join(" and ");
    let mut sets = SampleSets::new(sets, &standardise, shape, world.size());
    let samples = sets.num_samples();
    log::info!("{} for {}; {data}: {samples} samples", model.name, model.input);
    let create = |path: &PathBuf| {
        let attributes = [("model", model.name.as_str()), ("parameters_digest", trained.parameters_digest())];
        PredictionFile::create(path, shape, samples, &attributes)
    };
    let file = all.agree_with_root(|| arguments.output.as_ref().map(create).transpose())?.flatten();
    let threads = arguments.threads.map_or_else(|| world.default_threads(), usize::from);
    let rows = rows_at_once(&model);
    let score = match arguments.machine.open(world, threads)? {
        AnyDevice::Cpu(device) => {
            let mut predictor = all.agree(Predictor::new(&device, &trained, &model, rows))?;
            predict(all, &mut predictor, rows, shape, &mut sets, file)
        }
        AnyDevice::Cuda(device) => {
            let mut predictor = all.agree(Predictor::new(&*device, &trained, &model, rows))?;
            predict(all, &mut predictor, rows, shape, &mut sets, file)
        }
    }?;
    if world.is_root() {
        let score = score.summary();
        log(&score);
        let (ranks, model) = (world.size(), model.name);
        let samples_per_second = samples as f64 / began.elapsed().as_secs_f64().max(1e-9);
        let report = Report { program: "predict", ranks, model, data, samples, score, samples_per_second };
        let line = serde_json::to_string(&report);
        app::print_line(&line.map_err(|error| Error::failed("printing the result", error))?)?;
    }
    Ok(())
}

/// Logs a score in words.
fn log(score: &ScoreSummary) {
    let ScoreSummary { loss, accuracy, classes, r2, r2_of_outputs, .. } = score;
    let loss = loss.map_or("no targets to compare with".to_owned(), |loss| format!("loss {loss:.6}"));
    let accuracy = accuracy.map_or(String::new(), |share| format!("  accuracy {:.2} %", 100.0 * share));
    let r2_words = r2.map_or(String::new(), |r2| format!("  R² {r2:.6}"));
    log::info!("{loss}{accuracy}{r2_words}");
    let classes = classes
        .iter()
        .flatten()
        .map(|score| format!("class {}: {:.2} % of {}", score.class, 100.0 * score.accuracy, score.num));
    let outputs = r2_of_outputs.iter().flatten().enumerate().map(|(output, r2)| match r2 {
        Some(r2) => format!("output {output}: R² {r2:.6}"),
        None => format!("output {output}: its target never changes"),
    });
    let lines: Vec<String> = classes.chain(outputs).collect();
    lines.iter().take(MOST_LINES).for_each(|line| log::info!("{line}"));
    if lines.len() > MOST_LINES {
        log::info!("{} more are in the result line", lines.len() - MOST_LINES);
    }
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.common
    }

    fn check_files(&self) -> Result<()> {
        let mut files = self.common.files();
        files.push(FileOption::input("NETWORK", &self.network));
        files.extend(self.source.files());
        files.extend(self.machine.probe.iter().map(|path| FileOption::input("--probe", path)));
        files.extend(self.output.iter().map(|path| FileOption::whole_output("--output", path)));
        check_files(&files)
    }
}

fn main() -> ExitCode {
    app::main(run)
}
