//! The loop that every training program runs.

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use super::TrainOptions;
use super::checkpoint_options::Resume;
use super::checkpoints::Checkpoints;
use super::device_options::AnyDevice;
use super::identity;
use super::journal::Journal;
use super::metrics::{ResultLine, peak_memory_mb};
use super::resume::{self, Resumed, Start};
use super::samples::{self, Samples};
use super::step::{Outcome, Requests};
use super::stop::StopRequest;
use super::trainer::{Trainer, TrainerSettings, diverged};
use crate::app;
use crate::checkpoint::Description;
use crate::comm::{Grid, GridShape, World, library_version};
use crate::device::Device;
use crate::nn::Model;
use crate::parallel::data::Reduction;
use crate::parallel::layout::Plan;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// A program that trains.
#[derive(Debug, Clone, Copy)]
pub struct Strategy {
    /// Its name.
    pub program: &'static str,
    /// It puts ranks on the data axis; else there is one replica on any number of ranks.
    pub has_replicas: bool,
}

/// Trains as `options` say on `grid`, over which `plan` spreads the model, and prints the result line of the program; or stops
/// before the end, as it was asked to, with a checkpoint and exit code [`app::STOPPED`]. Collective.
///
/// # Errors
/// Bad options or data (the same error on every rank), a failure of this rank, or a loss that is not a number.
pub fn run(
    world: &World,
    grid: &Grid,
    strategy: Strategy,
    options: &TrainOptions,
    plan: impl Fn(&Model) -> Result<Plan>,
) -> Result<ExitCode> {
    let (all, began) = (world.communicator(), Instant::now());
    let program = strategy.program;
    all.agree(options.check(grid.data.size()).and_then(|()| options.check_used(strategy.has_replicas)))?;
    // whoever is asked to stop while samples are read does so after the first step
    let stop =
        all.agree(options.checkpoints.checkpoint_dir.as_ref().map(|_| StopRequest::listen()).transpose())?;
    let threads = options.threads.unwrap_or_else(|| world.default_threads());
    let GridShape { data, stage, tensor } = grid.shape;
    log::info!(
        "{program}: ranks {}, nodes {}, threads of a rank {threads}; data {data} × stage {stage} × tensor {tensor}; {}",
        world.size(),
        world.num_nodes(),
        library_version()
    );
    if threads > world.num_cores() && world.is_root() {
        log::warn!("--threads {threads} is more than the {} cores that a rank may use", world.num_cores());
    }
    let samples = samples::open(world, options)?;
    let dataset = samples.train.dataset();
    let model = all.agree(options.build_model(dataset.features(), dataset.targets()))?;
    let num_test = samples.test.as_ref().map_or(0, |test| test.dataset().num_samples());
    log::info!(
        "{} for {}, {} parameters; {}: {} samples to train, {num_test} to test",
        model.name,
        model.input,
        model.num_parameters(),
        dataset.source(),
        dataset.num_samples()
    );
    let plan = all.agree(plan(&model).and_then(|plan| {
        let num_samples = dataset.num_samples();
        let remark = options.check_micro_batches(plan.schedule.num_micro_batches, data, num_samples)?;
        if let (Some(remark), true) = (remark, world.is_root()) {
            log::warn!("{remark}");
        }
        Ok(plan)
    }))?;
    let run = Run { world, grid, program, options, model: &model, plan: &plan, threads, began };
    match options.machine.open(world, threads)? {
        AnyDevice::Cpu(device) => run.train("cpu", &device, samples, stop),
        AnyDevice::Cuda(device) => run.train("cuda", &*device, samples, stop),
    }
}

struct Run<'a> {
    world: &'a World,
    grid: &'a Grid,
    program: &'a str,
    options: &'a TrainOptions,
    model: &'a Model,
    plan: &'a Plan,
    threads: usize,
    began: Instant,
}

impl Run<'_> {
    fn train<D: Device>(
        &self,
        device_name: &str,
        device: &D,
        mut samples: Samples,
        stop: Option<StopRequest>,
    ) -> Result<ExitCode> {
        let options = self.options;
        let steps_per_epoch = samples.train.sampler().steps_per_epoch();
        let num_steps = options.steps.unwrap_or(options.epochs.saturating_mul(steps_per_epoch));
        let settings = TrainerSettings {
            batch_size: options.batch_size.min(samples.train.dataset().num_samples()),
            sync: options.sync_settings(),
            optimizer: options.optimizer_settings(),
            seed: options.seed,
        };
        let mut trainer = Trainer::new(device, self.grid, self.model, self.plan, settings)?;
        let (mut checkpoints, resumed) = self.resume(&mut trainer, &samples, num_steps, stop)?;
        let first = resumed.map_or(0, |resumed| resumed.step);
        let loss_before = resumed.and_then(|resumed| resumed.loss);
        let resumed = resumed.map(|resumed| resumed.step);
        if num_steps < first && self.world.is_root() {
            log::warn!(
                "the checkpoint has {first} steps already, more than the {num_steps} that were asked for"
            );
        }
        self.announce(&samples, num_steps, resumed, &trainer);
        let kept = trainer.keep_samples(&mut samples.train)?;
        if kept > 0 {
            log::info!("{kept} samples stay on the device");
        }
        let mut journal =
            Journal::new(self.world, options, (first, loss_before, num_steps), steps_per_epoch)?;

        let mut tested = None;
        let mut seconds = 0.0;
        let mut behind = None;
        // when the step before was finished, or, with nothing under way, this one began
        let mut lap = Instant::now();
        // the last step, for --pace
        let mut began: Option<Instant> = None;
        for step in first..num_steps {
            if let (Some(pace), Some(before)) = (options.checkpoints.pace, began.replace(Instant::now())) {
                thread::sleep(pace.saturating_sub(before.elapsed()));
                began = Some(Instant::now());
            }
            let done = step + 1;
            app::set_step(done);
            let learning_rate = journal.schedule().at(step);
            let start = Instant::now();
            if behind.is_none() {
                lap = start;
            }
            let span = trace::work(Name::Step).step(done);
            let started = trainer.start_step(step, learning_rate, &mut samples.train)?;
            // what came of the step before, while the device works on this one
            let mut requests = Requests::default();
            if let Some(started) = behind.take() {
                let outcome = trainer.finish_step(started, checkpoints.requests())?;
                requests = outcome.requests;
                journal.record(step, outcome, milliseconds(std::mem::replace(&mut lap, Instant::now())));
            }
            let tests = due(done, options.eval_every.saturating_mul(steps_per_epoch));
            let is_looked_at = due(done, options.log_every) || due(done, options.check_replicas) || tests;
            let may_wait = !is_looked_at && !checkpoints.is_due_after(done) && done < num_steps;
            if trainer.runs_ahead() && may_wait && requests == Requests::default() {
                behind = Some(started);
                drop(span);
                seconds += start.elapsed().as_secs_f64();
                continue;
            }
            let outcome = trainer.finish_step(started, checkpoints.requests())?;
            requests = requests.and(outcome.requests);
            drop(span);
            let elapsed = milliseconds(lap);
            journal.record(done, outcome, elapsed);
            if due(done, options.log_every) {
                let rate = outcome.num_samples as f64 / elapsed * 1e3;
                log::info!("epoch {:.2}  {}  {rate:.0} samples/s", journal.epoch(done), words(&outcome));
            }
            if due(done, options.check_replicas) {
                checkpoints.check_replicas(&trainer, done)?;
            }
            tested = None;
            checkpoints.after_step(&trainer, (done, journal.last_loss()), requests)?;
            seconds += start.elapsed().as_secs_f64();
            if requests.stop > 0 && done < num_steps {
                return self.stop(checkpoints, &trainer, (done, journal.last_loss()), requests.stop);
            }
            if tests {
                tested = self.evaluate(&mut trainer, &mut samples, done)?;
            }
        }
        let num_steps = num_steps.max(first);
        checkpoints.save(&trainer, num_steps, journal.last_loss())?;
        if tested.is_none() {
            tested = self.evaluate(&mut trainer, &mut samples, num_steps)?;
        }
        trainer.check_finite(num_steps)?;
        if options.check_replicas > 0 {
            checkpoints.check_replicas(&trainer, num_steps)?;
        }
        let digest = trainer.digest()?;
        let (loss, num_trained, median_step_ms) = journal.close();
        // the result stands without them
        let written = checkpoints.finish();
        let exported = checkpoints.export(&trainer, num_steps);
        let result = ResultLine {
            program: self.program.to_owned(),
            ranks: self.world.size(),
            threads: self.threads,
            device: device_name.to_owned(),
            precision: options.machine.precision.name().to_owned(),
            model: self.model.name.clone(),
            parameters: self.model.num_parameters(),
            steps: num_steps,
            resumed_after: resumed,
            epochs: num_steps as f64 / steps_per_epoch as f64,
            loss,
            test_loss: tested.map(|outcome| outcome.loss),
            accuracy: tested.and_then(|outcome| outcome.accuracy),
            samples_per_second: if seconds > 0.0 { num_trained as f64 / seconds } else { 0.0 },
            median_step_ms,
            peak_memory_mb: peak_memory_mb(),
            parameters_digest: format!("{digest:032x}"),
        };
        if self.world.is_root() {
            let line = serde_json::to_string(&result)
                .map_err(|error| Error::failed("printing the result", error))?;
            app::print_line(&line)?;
        }
        written.and(exported).map(|()| ExitCode::SUCCESS)
    }

    /// Finds what the run begins with, and gives it to all ranks. Collective.
    fn resume<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        samples: &Samples,
        num_steps: u64,
        stop: Option<StopRequest>,
    ) -> Result<(Checkpoints<'_>, Option<Resumed>)> {
        let (all, options) = (self.world.communicator(), &self.options.checkpoints);
        let slots = trainer.slot_names();
        let compares = self.grid.shape.data > 1 && self.options.check_replicas > 0;
        let description = Description {
            seed: self.options.seed,
            model: self.model.name.clone(),
            config: identity::config(self.options, self.model, samples),
            options: identity::changeable(self.options, num_steps),
            written_by: identity::written_by(self.program, self.world, self.grid, (self.threads, compares)),
            ..Description::default()
        };
        let find =
            || Start::find(options, self.model, slots, (&description.config, &description.options)).map(Some);
        let start = all.agree_with_root(if all.is_root() { find() } else { Ok(None) })?;
        let sampler = samples.train.sampler();
        let span = trace::work(Name::Checkpoint);
        let resumed = resume::restore(all, self.model, start, trainer)?;
        drop(span);
        let what = (self.model, slots, compares);
        let end = (stop, self.began);
        let mut checkpoints = Checkpoints::begin(all, options, what, (description, sampler), resumed, end)?;
        if let Some(Resumed { step, loss, .. }) = resumed {
            checkpoints.save(trainer, step, loss)?;
        }
        Ok((checkpoints, resumed))
    }

    /// Ends the run after `done` steps because `num_ranks` asked for it. Collective.
    fn stop<D: Device>(
        &self,
        mut checkpoints: Checkpoints<'_>,
        trainer: &Trainer<'_, D>,
        (done, loss): (u64, Option<f64>),
        num_ranks: usize,
    ) -> Result<ExitCode> {
        checkpoints.save(trainer, done, loss)?;
        checkpoints.finish()?;
        let is_auto = self.options.checkpoints.resume == Resume::Auto;
        let next = if is_auto { "the same command" } else { "the same command with --resume auto" };
        let who = if num_ranks < self.world.size() {
            format!(" by {num_ranks} of {} ranks", self.world.size())
        } else {
            String::new()
        };
        log::info!("stopped after step {done}, as asked{who}; {next} goes on from the checkpoint");
        Ok(ExitCode::from(app::STOPPED))
    }

    /// Says what is about to happen.
    fn announce<D: Device>(
        &self,
        samples: &Samples,
        num_steps: u64,
        resumed: Option<u64>,
        trainer: &Trainer<'_, D>,
    ) {
        log::debug!("buckets of {:?} parameters", trainer.bucket_lengths());
        log::trace!("{:?}", self.options);
        let reduction = match (self.grid.shape.data, trainer.reduction()) {
            (1, _) => "",
            (_, Reduction::AllReduce) => "; gradients by all-reduce",
            (_, Reduction::ReduceScatter) => "; gradients by reduce-scatter",
        };
        log::info!("{num_steps} steps of {} samples{reduction}", samples.train.sampler().batch_len(0));
        if let Some(step) = resumed {
            let (epoch, within) = samples.train.sampler().locate(step);
            log::info!("going on after step {step}, which is step {within} of epoch {}", epoch + 1);
        }
    }

    fn evaluate<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        samples: &mut Samples,
        step: u64,
    ) -> Result<Option<Outcome>> {
        let Some(test) = &mut samples.test else {
            return Ok(None);
        };
        let span = trace::work(Name::Evaluation);
        let outcome = trainer.evaluate(test)?;
        drop(span);
        if !outcome.loss.is_finite() {
            return Err(diverged(step, &format!("the test loss is {}", outcome.loss)));
        }
        log::info!("test: {}", words(&outcome));
        Ok(Some(outcome))
    }
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

fn due(done: u64, every: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}

fn words(outcome: &Outcome) -> String {
    match outcome.accuracy {
        Some(accuracy) => format!("loss {:.4}  accuracy {:.2} %", outcome.loss, 100.0 * accuracy),
        None => format!("loss {:.6}", outcome.loss),
    }
}
