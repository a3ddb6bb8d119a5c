//! The options of pipelines: which schedule, which layers in which stage.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;

use super::TrainOptions;
use super::given::Given;
use super::model_options::SizeList;
use crate::app::{self, FileOption};
use crate::comm::{Communicator, World};
use crate::nn::Model;
use crate::parallel::layout::Plan;
use crate::parallel::schedule::{Report, Schedule, ScheduleKind};
use crate::trace;
use crate::{Error, Result};

/// A schedule by name, or a file with one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleChoice {
    /// One of those that are known.
    Named(ScheduleKind),
    /// A CSV file.
    File(PathBuf),
}

impl FromStr for ScheduleChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<ScheduleChoice, String> {
        if let Some(kind) = ScheduleKind::ALL.into_iter().find(|kind| kind.name() == text) {
            return Ok(ScheduleChoice::Named(kind));
        }
        let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
        let is_csv = Path::new(text).extension().is_some_and(|extension| extension == "csv");
        let file = || ScheduleChoice::File(text.into());
        is_csv.then(file).ok_or_else(|| format!("expected {names}, or a file that ends in .csv"))
    }
}

/// Numbers of layers, separated by commas.
fn parse_stages(text: &str) -> std::result::Result<SizeList, String> {
    let size = |part: &str| match part.trim().parse() {
        Ok(0) => Err("a stage of 0 layers has nothing to do".to_owned()),
        Ok(size) => Ok(size),
        Err(_) => {
            Err(format!("{part:?} is no whole number; expected the layers of each stage, such as 3,2,3"))
        }
    };
    text.split(',').map(size).collect::<std::result::Result<_, _>>().map(SizeList)
}

/// Options about stages and their schedule.
#[derive(Debug, Clone, Args)]
pub struct PipelineOptions {
    #[command(flatten)]
    /// What was given; first, see there.
    pub given: Given,

    /// In which order micro-batches go through the stages: sequential (one at a time), gpipe, 1f1b, interleaved (several stages
    /// a rank), zero-bubble (ZB-H1), or a CSV file in the notation of PyTorch's pipelining (0F0, 1B2, …), a row for each rank
    #[arg(long, value_name = "NAME|FILE", default_value = "1f1b", help_heading = "Pipeline")]
    pub schedule: ScheduleChoice,

    /// Layers of each stage, such as 3,2,3 [default: so that all stages cost the same]
    #[arg(long, value_name = "SIZES", value_parser = parse_stages, help_heading = "Pipeline")]
    pub stages: Option<SizeList>,

    /// Stages of each rank with --schedule interleaved
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Pipeline")]
    pub stages_per_rank: usize,

    /// Keep only what comes into a stage and what leaves it, and run its forward pass again in the backward pass
    #[arg(long, help_heading = "Pipeline")]
    pub recompute: bool,

    /// Draw the schedule instead of training: as a table, or into FILE as a picture (.svg) or as CSV (.csv)
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", help_heading = "Pipeline")]
    pub show_schedule: Option<String>,

    /// Ranks of the schedule that is drawn, unless it is from a file [default: those of the job]
    #[arg(long, value_name = "N", requires = "show_schedule", help_heading = "Pipeline")]
    pub show_ranks: Option<usize>,
}

impl PipelineOptions {
    /// The files that these options name. Not collective.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        let schedule = match &self.schedule {
            ScheduleChoice::File(path) => Some(FileOption::input("--schedule", path)),
            ScheduleChoice::Named(_) => None,
        };
        let drawn = self.show_schedule.as_deref().filter(|file| *file != "-");
        let drawn = drawn.map(|file| FileOption::output("--show-schedule", Path::new(file)));
        schedule.into_iter().chain(drawn).collect()
    }

    /// Refuses options that say nothing about this run. Not collective.
    fn check_used(&self) -> Result<()> {
        let is_interleaved = self.schedule == ScheduleChoice::Named(ScheduleKind::Interleaved);
        if self.given.has("stages-per-rank") && !is_interleaved {
            let why = format!(
                "this run has no use for it: it is for --schedule interleaved, and {} is chosen",
                self.name()
            );
            return Err(Error::input("--stages-per-rank", why));
        }
        if self.given.has("show-ranks") && matches!(self.schedule, ScheduleChoice::File(_)) {
            return Err(Error::input(
                "--show-ranks",
                "this run has no use for it: the file of the schedule has a row for each rank",
            ));
        }
        Ok(())
    }

    /// The name of the schedule.
    fn name(&self) -> String {
        match &self.schedule {
            ScheduleChoice::Named(kind) => kind.name().to_owned(),
            ScheduleChoice::File(path) => path.display().to_string(),
        }
    }

    /// The schedule for `num_ranks` ranks, with what its check found: with as many micro-batches as the file or `train` says, else with two to
    /// four for each rank, if the batch divides by that, or fewer. `file` is what is in --schedule, if that is one. Not
    /// collective.
    fn schedule(
        &self,
        num_ranks: usize,
        train: &TrainOptions,
        file: Option<&str>,
    ) -> Result<(Schedule, Report)> {
        self.check_used()?;
        self.make_schedule(num_ranks, train, file).map_err(|error| match (&self.schedule, error) {
            // whatever is wrong with a schedule that was read is wrong with its file
            (ScheduleChoice::File(path), Error::Input(why)) if !why.contains(&self.name()) => {
                Error::input(format!("reading the schedule {}", path.display()), why)
            }
            (_, error) => error,
        })
    }

    fn make_schedule(
        &self,
        num_ranks: usize,
        train: &TrainOptions,
        file: Option<&str>,
    ) -> Result<(Schedule, Report)> {
        let schedule = match (&self.schedule, file) {
            (ScheduleChoice::Named(kind), _) => {
                let usual = || {
                    let fits = |m: &usize| train.batch_size.is_multiple_of(*m);
                    let two = num_ranks.saturating_mul(2).max(1);
                    let more = (two..=two.saturating_mul(2).min(train.batch_size)).find(fits);
                    more.or_else(|| (1..two.min(train.batch_size)).rev().find(fits)).unwrap_or(1)
                };
                let stages_per_rank =
                    if *kind == ScheduleKind::Interleaved { self.stages_per_rank } else { 1 };
                kind.generate(num_ranks, stages_per_rank, train.micro_batches.unwrap_or_else(usual))?
            }
            (ScheduleChoice::File(_), text) => {
                let schedule = Schedule::from_csv(text.unwrap_or_default(), &self.name())?;
                let found = schedule.num_micro_batches;
                if let Some(wanted) = train.micro_batches.filter(|wanted| *wanted != found) {
                    let why = format!("it is for {found} micro-batches, --micro-batches says {wanted}");
                    return Err(Error::input(format!("reading the schedule {}", self.name()), why));
                }
                schedule
            }
        };
        let report = schedule.check()?;
        Ok((schedule, report))
    }

    /// What is in --schedule, if that is a file: as rank 0 reads it, so that all ranks run the same. Collective.
    fn read_file(&self, all: &Communicator) -> Result<Option<String>> {
        let ScheduleChoice::File(path) = &self.schedule else {
            return Ok(None);
        };
        let read = || {
            let doing = || format!("reading the schedule {}", path.display());
            std::fs::read_to_string(path).map_err(|error| Error::input(doing(), error))
        };
        let text = all.agree_with_root(if all.is_root() { read().map(Some) } else { Ok(None) })?;
        let text = all.broadcast_bytes(text.map(String::into_bytes).unwrap_or_default(), 0)?;
        Ok(Some(String::from_utf8_lossy(&text).into_owned()))
    }

    /// The plan of a model for the ranks of `world`, to be made when the model is there: see [`Plan::pipeline`]. Rank 0 says
    /// what it is like, and traces will compare the bubble with that of the schedule. Collective.
    ///
    /// # Errors
    /// The file of the schedule cannot be read: the same error on every rank. The plan itself fails if the schedule is not sound
    /// or does not fit the ranks or the model.
    pub fn planner(&self, world: &World, train: &TrainOptions) -> Result<impl Fn(&Model) -> Result<Plan>> {
        let file = self.read_file(world.communicator())?;
        Ok(move |model: &Model| self.plan(model, world.size(), train, file.as_deref()))
    }

    fn plan(
        &self,
        model: &Model,
        num_ranks: usize,
        train: &TrainOptions,
        file: Option<&str>,
    ) -> Result<Plan> {
        let (schedule, report) = self.schedule(num_ranks, train, file)?;
        if schedule.ranks.len() != num_ranks {
            let (name, found) = (self.name(), schedule.ranks.len());
            let why = format!("{name} is for {found} ranks, but the job has {num_ranks}");
            return Err(Error::input("--schedule", why));
        }
        let (num_stages, num_layers) = (schedule.num_stages, model.layers.len());
        if num_stages > num_layers {
            let name = &model.name;
            let why =
                format!("it takes a layer for each of {num_stages} stages, and {name} has {num_layers}");
            return Err(Error::input("spreading the layers", why));
        }
        let sizes = self.stages.as_ref().map(|sizes| sizes.0.as_slice());
        let plan = Plan { recompute: self.recompute, ..Plan::pipeline(model, schedule, sizes)? };
        trace::expect_bubble(report.bubble);
        log::info!("{}", plan.schedule.headline(&self.name(), &report));
        let sizes: Vec<String> = plan.layers.iter().map(|layers| layers.len().to_string()).collect();
        log::info!("layers of the stages: {}", sizes.join(", "));
        Ok(plan)
    }

    /// Does what --show-schedule asks for, on rank 0. Collective.
    ///
    /// # Errors
    /// The schedule is not sound, or the file cannot be written.
    pub fn show(&self, world: &World, file: &str, train: &TrainOptions) -> Result<()> {
        let text = self.read_file(world.communicator())?;
        let draw = || {
            let num_ranks = self.show_ranks.unwrap_or(world.size());
            let (schedule, report) = self.schedule(num_ranks, train, text.as_deref())?;
            let path = Path::new(file);
            match path.extension().and_then(|extension| extension.to_str()) {
                _ if file == "-" => app::print_line(schedule.table(&self.name(), &report)?.trim_end()),
                Some("svg") => schedule.draw(&self.name(), &report, path),
                Some("csv") => {
                    let written = std::fs::write(path, schedule.to_csv());
                    written.map_err(|error| Error::input(format!("writing {file}"), error))
                }
                _ => {
                    Err(Error::input("--show-schedule", format!("{file:?} ends neither in .svg nor in .csv")))
                }
            }
        };
        let drawn = if world.is_root() { draw().map(Some) } else { Ok(None) };
        world.communicator().agree_with_root(drawn).map(|_| ())
    }
}
