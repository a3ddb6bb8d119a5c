//! A run on its device: set-up, loop and result.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::checkpoints::Checkpoints;
use super::identity::Identity;
use super::job::{self, Run};
use super::journal::{Journal, JournalSummary, RunLength};
use super::memory::{self, MemoryPlan, StartNeeds};
use super::metrics::ResultLine;
use super::options::{Resume, name_of};
use super::resume::{RunPosition, Start};
use super::samples::{self, Samples};
use super::stop::StopRequest;
use super::trainer::{Evaluation, RunRequests, Trainer, TrainerSettings, diverged};
use super::tuning::Tuning;
use crate::app;
use crate::comm;
use crate::device::Device;
use crate::parallel::layout::ParallelPlan;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// A run on its device, from set-up to result.
struct Training<'a, D: Device> {
    run: &'a Run<'a>,
    device: &'a D,
    trainer: Trainer<'a, D>,
    /// The tuned products, with --tuned-products.
    tuning: Option<Tuning<'a>>,
    samples: Samples,
    checkpoints: Checkpoints<'a>,
    journal: Journal,
    length: RunLength,
    /// True if some rank reads samples in every step.
    reads_samples: bool,
    /// The number of steps done.
    done: u64,
    /// The number of steps done in earlier starts, if the run was resumed.
    resumed_after: Option<u64>,
    /// The evaluation of the current parameters, if they have been evaluated.
    tested: Option<Evaluation>,
    /// The lowest loss of the evaluations of this run, with its step.
    lowest: Option<(f64, u64)>,
    /// The time of all steps for which this rank has waited for samples.
    waited: Duration,
    /// The time of all steps, with that of checkpoints and log lines.
    seconds: f64,
}

impl Run<'_> {
    /// Trains on `device` and prints the result line; or stops early, when `stop` asks for it.
    /// Returns the exit code of the program. Collective.
    ///
    /// # Errors
    /// Those of [`run`](super::run()).
    pub(super) fn train<D: Device>(
        &self,
        device_name: &str,
        device: &D,
        samples: Samples,
        stop: Option<StopRequest>,
    ) -> Result<ExitCode> {
        let mut training = Training::set_up(self, device, samples, stop)?;
        let outcome = training.train_loop();
        if outcome.as_ref().is_err_and(Error::is_agreed) {
            // the ranks end in good order, so that messages with samples must end too
            training.samples.train.finish();
        }
        match outcome? {
            0 => training.result(device_name),
            num_ranks => training.stop(num_ranks),
        }
    }
}

impl<'a, D: Device> Training<'a, D> {
    /// Sets the trainer up, resumes the run, and opens its files. Collective.
    fn set_up(
        run: &'a Run<'a>,
        device: &'a D,
        mut samples: Samples,
        stop: Option<StopRequest>,
    ) -> Result<Training<'a, D>> {
        let options = run.options;
        let sampler = samples.train.sampler();
        let steps_per_epoch = sampler.steps_per_epoch();
        let num_steps = options.steps.unwrap_or(options.epochs.saturating_mul(steps_per_epoch));
        let batch_size = options.batch_size.min(samples.train.dataset().num_samples());
        let mut identity = Identity::new(options, run.model, &samples, num_steps);
        let find = || {
            let slots = options.optimizer.settings().slot_names();
            Start::find(&options.checkpoints, run.model, slots, &identity)
        };
        let start = run.world.communicator().agree_with_root(find)?;
        let summation = run.summation(start.as_ref(), device.is_on_host())?;
        identity.keep_leaves(summation);
        let plan = &ParallelPlan { summation, ..run.plan.clone() };
        let restores = run.world.communicator().any_rank(start.as_ref().is_some_and(Start::has_file))?;
        let memory = MemoryPlan::check(
            run.world,
            run.grid,
            run.model,
            plan,
            options,
            StartNeeds { batch_size, shared_bytes: samples.shared_bytes, restores },
            device.is_on_host(),
        )?;
        let settings = TrainerSettings {
            batch_size,
            sync: options.sync_settings(),
            gathering: memory.gathering,
            optimizer: options.optimizer.settings(),
            learning_rate: options.optimizer.schedule(num_steps),
            seed: options.seed,
        };
        let all = run.world.communicator();
        let tuned_products = options.tuned_products.as_deref();
        let tuning = tuned_products.map(|path| Tuning::begin(all, device, path)).transpose()?;
        let mut trainer = Trainer::new(device, run.grid, run.model, plan, settings)?;
        if let Some(audits) = options.audit.settings() {
            trainer.audit(plan, settings.sync, batch_size, audits)?;
        }
        let (checkpoints, resumed) = run.resume(&mut trainer, start, identity, steps_per_epoch, stop)?;
        let RunPosition { step: first, loss } = resumed.map_or_else(Default::default, |found| found.position);
        let length = RunLength { first, num_steps, steps_per_epoch };
        run.announce(&samples, length, resumed, &trainer);
        let kept = trainer.keep_samples(&mut samples.train)?;
        if kept > 0 {
            log::info!("{kept} samples stay on the device");
        }
        let reads_samples = all.any_rank(trainer.reads_samples())?;
        let journal = Journal::new(run.world, options, length, loss)?;
        Ok(Training {
            run,
            device,
            trainer,
            tuning,
            samples,
            checkpoints,
            journal,
            length,
            reads_samples,
            done: first,
            resumed_after: resumed.map(|resumed| resumed.position.step),
            tested: None,
            lowest: None,
            waited: Duration::ZERO,
            seconds: 0.0,
        })
    }

    /// Takes all steps and evaluates the network, or stops early when ranks ask for it; returns the number of
    /// ranks that asked. Collective.
    fn train_loop(&mut self) -> Result<usize> {
        if self.resumed_after.is_some_and(|step| step > 0)
            && self.is_test_due()
            && let ControlFlow::Break(num_ranks) = self.evaluate()?
        {
            // the run may have been stopped before this evaluation, or in it
            return Ok(num_ranks);
        }
        let mut paced: Option<Instant> = None;
        while self.done < self.length.num_steps {
            if let (Some(pace), Some(before)) =
                (self.run.options.checkpoints.pace, paced.replace(Instant::now()))
            {
                comm::advance_for(pace.saturating_sub(before.elapsed()));
                paced = Some(Instant::now());
            }
            let start = Instant::now();
            let requests = self.step(start)?;
            self.seconds += start.elapsed().as_secs_f64();
            let len = self.samples.train.sampler().batch_len(self.done - 1);
            if let Some(tuning) = self.tuning.as_mut().filter(|tuning| tuning.is_due(len)) {
                tuning.tune(self.run.world.communicator(), self.device, len)?;
            }
            if requests.stop > 0 && self.done < self.length.num_steps {
                return Ok(requests.stop);
            }
            if self.is_test_due()
                && let ControlFlow::Break(num_ranks) = self.evaluate()?
            {
                return Ok(num_ranks);
            }
        }
        self.samples.train.finish();
        self.checkpoints.save(&self.trainer, self.position())?;
        if self.tested.is_none()
            && let ControlFlow::Break(num_ranks) = self.evaluate()?
        {
            return Ok(num_ranks);
        }
        Ok(0)
    }

    /// Takes one step and everything that is due after it, and returns the requests of the ranks.
    /// The step begins at `start`; on an asynchronous device it stays open, unless its outcome is wanted.
    /// Collective.
    fn step(&mut self, start: Instant) -> Result<RunRequests> {
        let (options, step) = (self.run.options, self.done);
        self.done += 1;
        let done = self.done;
        app::set_step(done);
        let span = trace::work(Name::Step).step(done);
        let mut requests = RunRequests::default();
        let len = self.samples.train.sampler().batch_len(step);
        let is_tuning_due = self.tuning.as_ref().is_some_and(|tuning| tuning.is_due(len));
        let train = &mut self.samples.train;
        let waited_before = train.dataset().waited();
        if self.reads_samples {
            let division = self.trainer.division();
            let rows = |len: usize, replica: usize| division.rows(len, replica);
            train.begin_step(&rows, step, (done < self.length.num_steps).then_some(done))?;
        }
        let previous = self.trainer.step(step, train, || self.checkpoints.requests());
        let previous = previous.map_err(|error| self.checkpoints.with_last_good(error))?;
        self.waited += train.dataset().waited().saturating_sub(waited_before);
        if let Some(outcome) = previous {
            requests = outcome.requests;
            self.journal.record(&outcome);
        }
        let is_wanted = due(done, options.log_every)
            || due(done, options.check_replicas)
            || self.is_test_due()
            || self.checkpoints.is_due_after(done)
            || is_tuning_due
            || done == self.length.num_steps;
        if self.trainer.runs_ahead() && !is_wanted && requests == RunRequests::default() {
            return Ok(requests);
        }
        let flushed = self.trainer.flush(self.checkpoints.requests());
        let Some(outcome) = flushed.map_err(|error| self.checkpoints.with_last_good(error))? else {
            return Ok(requests);
        };
        drop(span);
        requests = requests.and(outcome.requests);
        self.journal.record(&outcome);
        if due(done, options.log_every) {
            let rate = self.journal.rate_since_line(self.seconds + start.elapsed().as_secs_f64());
            let (epoch, words) = (self.length.epoch(done), job::words(outcome.loss, outcome.accuracy));
            log::info!("epoch {epoch:.2}  {words}  {rate:.0} samples/s");
        }
        if due(done, options.check_replicas) {
            self.checkpoints.check_replicas(&self.trainer, done)?;
        }
        self.tested = None;
        self.checkpoints.after_step(&self.trainer, self.position(), requests)?;
        Ok(requests)
    }

    /// Evaluates the network on the test samples, if there are any, or breaks off with the number of ranks
    /// that ask to stop. Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or the loss is NaN or infinite.
    fn evaluate(&mut self) -> Result<ControlFlow<usize>> {
        let Some(test) = &mut self.samples.test else { return Ok(ControlFlow::Continue(())) };
        let span = trace::work(Name::Evaluation);
        let asks_to_stop = || self.checkpoints.requests().stop > 0;
        let tested = match self.trainer.evaluate(test, asks_to_stop)? {
            ControlFlow::Break(num_ranks) => return Ok(ControlFlow::Break(num_ranks)),
            ControlFlow::Continue(tested) => tested,
        };
        drop(span);
        let Evaluation { loss, accuracy } = tested;
        if !loss.is_finite() {
            return Err(diverged(self.done, &format!("the test loss is {loss}")));
        }
        log::info!("test: {}", job::words(loss, accuracy));
        if self.lowest.is_none_or(|(lowest, _)| loss < lowest) {
            self.lowest = Some((loss, self.done));
        }
        self.tested = Some(tested);
        Ok(ControlFlow::Continue(()))
    }

    fn is_test_due(&self) -> bool {
        due(self.done, self.run.options.eval_every.steps(self.length.steps_per_epoch))
    }

    fn position(&self) -> RunPosition {
        RunPosition { step: self.done, loss: self.journal.last_loss() }
    }

    /// Ends the run early because `num_ranks` asked for it. Collective.
    fn stop(mut self, num_ranks: usize) -> Result<ExitCode> {
        let world = self.run.world;
        self.samples.train.finish();
        self.checkpoints.save(&self.trainer, self.position())?;
        self.checkpoints.finish()?;
        let is_auto = self.run.options.checkpoints.resume == Resume::Auto;
        let next = if is_auto { "the same command" } else { "the same command with --resume auto" };
        let who = if num_ranks < world.size() {
            format!(" by {num_ranks} of {} ranks", world.size())
        } else {
            String::new()
        };
        log::info!("stopped after step {}, as asked{who}; {next} resumes from the checkpoint", self.done);
        Ok(ExitCode::from(app::STOPPED))
    }

    /// Makes the last checks, waits for the last checkpoint, and prints the result line. Collective.
    fn result(self, device_name: &str) -> Result<ExitCode> {
        let data_wait = samples::share_of_waiting(self.run.world, self.waited, self.seconds)?;
        let Training { run, mut trainer, mut checkpoints, journal, length, done, tested, .. } = self;
        if let Some((loss, step)) = self.lowest.filter(|(_, step)| *step < done) {
            let since = self.resumed_after.map_or(String::new(), |first| format!(" since step {first}"));
            log::info!("lowest test loss{since}: {loss:.4} after step {step}");
        }
        trainer.check_finite(done)?;
        if run.options.check_replicas > 0 {
            checkpoints.check_replicas(&trainer, done)?;
        }
        trainer.release();
        let digest = trainer.digest()?;
        let JournalSummary { last_loss, num_samples, median_step_ms } = journal.close();
        // the result is printed even if these fail
        let written = Error::unless_alone(checkpoints.finish())?;
        let exported = Error::unless_alone(checkpoints.export(&trainer, done))?;
        memory::log_reached(run.world)?;
        let result = ResultLine {
            program: run.program.to_owned(),
            ranks: run.world.size(),
            threads: run.threads,
            device: device_name.to_owned(),
            precision: name_of(&run.options.machine.precision),
            sequence_parallel: run.shares_positions(),
            model: run.model.name.clone(),
            parameters: run.model.num_parameters(),
            steps: done,
            resumed_after: self.resumed_after,
            epochs: length.epoch(done),
            loss: last_loss,
            test_loss: tested.map(|outcome| outcome.loss),
            accuracy: tested.and_then(|outcome| outcome.accuracy),
            samples_per_second: if self.seconds > 0.0 { num_samples as f64 / self.seconds } else { 0.0 },
            median_step_ms,
            data_wait,
            peak_memory_mb: memory::peak_memory_mb(),
            parameters_digest: format!("{digest:032x}"),
        };
        if run.world.is_root() {
            app::print_line(&result.to_json()?)?;
        }
        written.and(exported).map(|()| ExitCode::SUCCESS)
    }
}

fn due(done: u64, every: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}
