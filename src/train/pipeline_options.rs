//! The options of pipelines: which schedule, which layers in which stage.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;

use super::model_options::SizeList;
use crate::app;
use crate::comm::World;
use crate::nn::Model;
use crate::observe;
use crate::parallel::layout::Plan;
use crate::parallel::schedule::{Schedule, ScheduleKind};
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

/// Options about stages and their schedule.
#[derive(Debug, Clone, Args)]
pub struct PipelineOptions {
    /// In which order micro-batches go through the stages: sequential (one at a time), gpipe, 1f1b, interleaved (several stages
    /// a rank), zero-bubble (ZB-H1), or a CSV file in the notation of PyTorch's pipelining (0F0, 1B2, …), a row for each rank
    #[arg(long, value_name = "NAME|FILE", default_value = "1f1b", help_heading = "Pipeline")]
    pub schedule: ScheduleChoice,

    /// Layers of each stage, such as 3,2,3 [default: so that all stages cost the same]
    #[arg(long, value_name = "SIZES", help_heading = "Pipeline")]
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

    /// Ranks of the schedule that is drawn [default: those of the job]
    #[arg(long, value_name = "N", requires = "show_schedule", help_heading = "Pipeline")]
    pub show_ranks: Option<usize>,
}

impl PipelineOptions {
    /// The name of the schedule.
    fn name(&self) -> String {
        match &self.schedule {
            ScheduleChoice::Named(kind) => kind.name().to_owned(),
            ScheduleChoice::File(path) => path.display().to_string(),
        }
    }

    /// The schedule for `num_ranks` ranks and, unless a file says otherwise, `micro_batches` or two for each rank, checked. Not
    /// collective.
    fn schedule(&self, num_ranks: usize, micro_batches: Option<usize>) -> Result<Schedule> {
        let schedule = match &self.schedule {
            ScheduleChoice::Named(kind) => {
                kind.generate(num_ranks, self.stages_per_rank, micro_batches.unwrap_or(2 * num_ranks))?
            }
            ScheduleChoice::File(path) => {
                let doing = || format!("reading --schedule {}", path.display());
                let text = std::fs::read_to_string(path).map_err(|error| Error::input(doing(), error))?;
                let schedule = Schedule::from_csv(&text, &self.name())?;
                if let Some(wanted) = micro_batches.filter(|wanted| *wanted != schedule.num_micro_batches) {
                    let found = schedule.num_micro_batches;
                    let why = format!("it is for {found} micro-batches, --micro-batches says {wanted}");
                    return Err(Error::input(doing(), why));
                }
                schedule
            }
        };
        schedule.check()?;
        Ok(schedule)
    }

    /// The plan for `model` on `num_ranks` ranks: see [`Plan::pipeline`]. Rank 0 says what it is like. Not collective.
    ///
    /// # Errors
    /// The schedule is not sound, or does not fit the ranks or the model.
    pub fn plan(&self, model: &Model, num_ranks: usize, micro_batches: Option<usize>) -> Result<Plan> {
        let schedule = self.schedule(num_ranks, micro_batches)?;
        let sizes = self.stages.as_ref().map(|sizes| sizes.0.as_slice());
        let plan = Plan { recompute: self.recompute, ..Plan::pipeline(model, schedule, sizes)? };
        let report = plan.schedule.check()?;
        observe::expect_bubble(report.bubble);
        log::info!("{}", plan.schedule.headline(&self.name(), &report));
        let sizes: Vec<String> = plan.layers.iter().map(|layers| layers.len().to_string()).collect();
        log::info!("layers of the stages: {}", sizes.join(", "));
        let num_empty = plan.layers.iter().filter(|layers| layers.is_empty()).count();
        if num_empty > 0 && crate::comm::rank_for_messages() == Some(0) {
            let (num_layers, num_stages) = (model.layers.len(), plan.layers.len());
            log::warn!("{num_layers} layers for {num_stages} stages: {num_empty} of them only pass on what they get");
        }
        Ok(plan)
    }

    /// Does what --show-schedule asks for, on rank 0. Collective.
    ///
    /// # Errors
    /// The schedule is not sound, or the file cannot be written.
    pub fn show(&self, world: &World, file: &str, micro_batches: Option<usize>) -> Result<()> {
        let draw = || {
            let schedule = self.schedule(self.show_ranks.unwrap_or(world.size()), micro_batches)?;
            let report = schedule.check()?;
            let path = Path::new(file);
            match path.extension().and_then(|extension| extension.to_str()) {
                _ if file == "-" => app::print_line(schedule.table(&self.name(), &report).trim_end()),
                Some("svg") => schedule.draw(&self.name(), &report, path),
                Some("csv") => {
                    let written = std::fs::write(path, schedule.to_csv());
                    written.map_err(|error| Error::input(format!("writing {file}"), error))
                }
                _ => Err(Error::input("--show-schedule", format!("{file:?} ends neither in .svg nor in .csv"))),
            }
        };
        world.communicator().agree(if world.is_root() { draw() } else { Ok(()) })
    }
}
