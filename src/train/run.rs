//! The entry of every training program: from options to a model on a device.

use std::process::ExitCode;
use std::time::Instant;

use super::job::Run;
use super::options::{AnyDevice, TrainOptions, check_micro_batches};
use super::stop::StopRequest;
use super::{order, samples};
use crate::Result;
use crate::app::{self, Finished};
use crate::comm::{Grid, GridShape, World, library_version};
use crate::nn::{LONGEST_TEXT, Model};
use crate::parallel::layout::ParallelPlan;

/// The strategy of a program that trains.
#[derive(Debug, Clone, Copy)]
pub struct Strategy {
    /// The name of the program.
    pub program: &'static str,
    /// True if the program puts ranks on the data axis; false if it trains one replica on any
    /// number of ranks.
    pub has_replicas: bool,
}

/// Trains as `options` say on `grid`, and prints the result line of the program. `plan` spreads a model over
/// the grid; it is called with the model and the number of samples of a batch. If the run is
/// asked to stop, it writes a checkpoint and ends with the exit code [`STOPPED`](crate::app::STOPPED).
/// Collective.
///
/// # Errors
/// The options or the data are bad (the same error on every rank), this rank fails, or the loss is
/// NaN or infinite.
pub fn run(
    world: &World,
    grid: &Grid,
    strategy: Strategy,
    options: &TrainOptions,
    // not generic, so that the library, and not each program, compiles what is below it
    plan: &dyn Fn(&Model, usize) -> Result<ParallelPlan>,
) -> Result<Finished> {
    let (all, began) = (world.communicator(), Instant::now());
    all.agree(options.check(all.size(), grid.data.size()))?;
    let text = options.model.read_network(all)?;
    // a file need not have targets that the loss does not read
    let reads_targets = options.model.reads_targets(text.as_deref());
    all.agree(options.check_used(strategy.has_replicas, reads_targets))?;
    // a signal that arrives while samples are read takes effect after the first step
    let listen = || options.checkpoints.checkpoint_dir.as_ref().map(|_| StopRequest::listen()).transpose();
    let stop = all.agree(listen())?;
    let threads = options.threads.unwrap_or_else(|| world.default_threads());
    announce_job(world, grid, strategy.program, threads);
    let shuffle = order::choose(all, options)?;
    let samples = samples::open(world, grid, options, shuffle, reads_targets)?;
    let dataset = samples.train.dataset();
    let model = all.agree(options.model.build(dataset.features(), dataset.targets(), text.as_deref()))?;
    if options.model.show_network {
        let table: Vec<String> = model.table().lines().map(|line| format!("// {line}")).collect();
        all.agree_with_root(|| app::print_line(&format!("{}\n{}", model.text, table.join("\n"))))?;
        return Ok(ExitCode::SUCCESS.into());
    }
    if options.checkpoints.writes_networks() && model.text.len() > LONGEST_TEXT && world.is_root() {
        log::warn!(
            "the network as text has {} bytes, and a checkpoint has room for {LONGEST_TEXT}: predict and \
             generate cannot use the files of this run",
            model.text.len()
        );
    }
    let num_test = samples.test.as_ref().map_or(0, |test| test.dataset().num_samples());
    log::info!(
        "{} for {}, {} parameters; {}: {} samples to train, {num_test} to test",
        model.name,
        model.input,
        model.num_parameters(),
        dataset.source(),
        dataset.num_samples()
    );
    let batch = options.batch_size.min(dataset.num_samples());
    if options.given.has("batch-size") && batch < options.batch_size && world.is_root() {
        log::warn!("--batch-size {} is more than the {batch} samples to train with", options.batch_size);
    }
    if options.given.has("eval-every") && num_test == 0 && world.is_root() {
        log::warn!("--eval-every has no effect: there are no samples to test with");
    }
    let share = (batch / grid.shape.data).max(1);
    let plan = all.agree(plan(&model, batch).and_then(|plan| {
        let (recompute, keeps_gradients) = (options.recompute, options.audit.settings().is_some());
        let plan = ParallelPlan { recompute, keeps_gradients, ..plan };
        let remark = check_micro_batches(plan.schedule.num_micro_batches, batch, share)?;
        if let (Some(remark), true) = (remark, world.is_root()) {
            log::warn!("{remark}");
        }
        Ok(plan)
    }))?;
    let program = strategy.program;
    let run = Run { world, grid, program, options, model: &model, plan: &plan, threads, began };
    let exit_code = match options.machine.open(world, threads)? {
        AnyDevice::Cpu(device) => run.train("cpu", &device, samples, stop),
        AnyDevice::Cuda(device) => run.train("cuda", &*device, samples, stop),
    }?;
    Ok(Finished { exit_code, expected_bubble: plan.expected_bubble })
}

/// Logs the ranks, the threads and the grid.
fn announce_job(world: &World, grid: &Grid, program: &str, threads: usize) {
    let GridShape { data, stage, tensor } = grid.shape;
    log::info!(
        "{program}: ranks {}, nodes {}, threads of a rank {threads}; \
         data {data} × stage {stage} × tensor {tensor}; {}",
        world.size(),
        world.num_nodes(),
        library_version()
    );
    if threads > world.num_cores() && world.is_root() {
        log::warn!("--threads {threads} is more than the {} cores that a rank may use", world.num_cores());
    }
}
