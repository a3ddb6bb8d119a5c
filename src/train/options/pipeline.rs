//! The options of pipelines: the schedule, and the layers of each stage.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::TrainOptions;
use super::given::Given;
use super::model::SizeList;
use super::names::name_of;
use super::text::read_text;
use crate::app::{self, FileOption};
use crate::comm::{Communicator, Grid, GridShape, World};
use crate::nn::Model;
use crate::parallel::layout::ParallelPlan;
use crate::parallel::schedule::{PipelineScheduleKind, Report, Schedule};
use crate::{Error, Result};

/// The name of a pipeline schedule, or a file with one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleChoice {
    /// A schedule that is generated.
    Named(PipelineScheduleKind),
    /// A CSV file with a schedule.
    File(PathBuf),
}

impl FromStr for ScheduleChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<ScheduleChoice, String> {
        if let Ok(kind) = <PipelineScheduleKind as ValueEnum>::from_str(text, false) {
            return Ok(ScheduleChoice::Named(kind));
        }
        let names: Vec<String> = PipelineScheduleKind::value_variants().iter().map(name_of).collect();
        let names = names.join(", ");
        let is_csv = Path::new(text).extension().is_some_and(|extension| extension == "csv");
        let file = || ScheduleChoice::File(text.into());
        is_csv.then(file).ok_or_else(|| format!("expected {names}, or a file that ends in .csv"))
    }
}

/// Parses the numbers of layers of the stages, separated by commas.
fn parse_stages(text: &str) -> std::result::Result<SizeList, String> {
    let (zero, expected) =
        ("a stage of 0 layers has nothing to do", "the layers of each stage, such as 3,2,3");
    SizeList::parse(text, zero, expected)
}

/// The options of the stages and their schedule.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Pipeline")]
pub struct PipelineOptions {
    #[command(flatten)]
    /// The options given, as the first field.
    pub given: Given,

    /// Order of micro-batches through the stages: sequential (one at a time), gpipe, 1f1b,
    /// interleaved (several stages a rank), zero-bubble (ZB-H1), deferred (gradients of weights last,
    /// those of many micro-batches as one product), or a CSV file in the notation of PyTorch's
    /// pipelining (0F0, 1B2, …), a row for each rank
    #[arg(long, value_name = "NAME|FILE", default_value = "1f1b")]
    pub schedule: ScheduleChoice,

    /// Numbers of layers of the stages, such as 3,2,3: the layers that --show-network numbers, except that
    /// those of a residual count as one together [default: equal costs of the stages]
    #[arg(long, value_name = "SIZES", value_parser = parse_stages)]
    pub stages: Option<SizeList>,

    /// Number of stages of each rank with --schedule interleaved
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub stages_per_rank: usize,

    /// Draw the schedule instead of training: as a table, or into FILE as a picture (.svg) or as
    /// CSV (.csv)
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub show_schedule: Option<String>,

    /// Number of ranks of the schedule that is drawn, unless it is from a file [default: that of
    /// the job]
    #[arg(long, value_name = "N", requires = "show_schedule")]
    pub show_ranks: Option<usize>,
}

impl PipelineOptions {
    /// Returns the files that these options name. Not collective.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        let schedule = match &self.schedule {
            ScheduleChoice::File(path) => Some(FileOption::input("--schedule", path)),
            ScheduleChoice::Named(_) => None,
        };
        let drawn = self.show_schedule.as_deref().filter(|file| *file != "-");
        let drawn = drawn.map(|file| FileOption::output("--show-schedule", Path::new(file)));
        schedule.into_iter().chain(drawn).collect()
    }

    /// Refuses options that have no effect in this run. Not collective.
    fn check_used(&self) -> Result<()> {
        let is_interleaved = self.schedule == ScheduleChoice::Named(PipelineScheduleKind::Interleaved);
        let for_interleaved = (!is_interleaved)
            .then(|| format!("it is for --schedule interleaved, and {} is chosen", self.name()));
        let has_rows = matches!(self.schedule, ScheduleChoice::File(_))
            .then_some("the file of the schedule has a row for each rank");
        self.given.refuse("stages-per-rank", for_interleaved.as_deref())?;
        self.given.refuse("show-ranks", has_rows)?;
        let drawn = self.show_schedule.as_ref().map(|_| "it divides a network, and --show-schedule has none");
        self.given.refuse("stages", drawn)
    }

    /// Returns the name of the schedule.
    fn name(&self) -> String {
        match &self.schedule {
            ScheduleChoice::Named(kind) => name_of(kind),
            ScheduleChoice::File(path) => path.display().to_string(),
        }
    }

    /// Returns the schedule for `num_ranks` ranks and the report of its check. It has `num_micro_batches`,
    /// or as many as the file says. `file` is the text of the file of --schedule, if there is one. Not
    /// collective.
    fn schedule(
        &self,
        num_ranks: usize,
        num_micro_batches: usize,
        train: &TrainOptions,
        file: Option<&str>,
    ) -> Result<(Schedule, Report)> {
        self.check_used()?;
        self.make_schedule(num_ranks, num_micro_batches, train, file).map_err(|error| {
            match (&self.schedule, error) {
                // an unsound schedule from a file is an error of the file
                (ScheduleChoice::File(path), Error::Input(why)) if !why.contains(&self.name()) => {
                    Error::input(format!("reading the schedule {}", path.display()), why)
                }
                (_, error) => error,
            }
        })
    }

    fn make_schedule(
        &self,
        num_ranks: usize,
        num_micro_batches: usize,
        train: &TrainOptions,
        file: Option<&str>,
    ) -> Result<(Schedule, Report)> {
        let schedule = match (&self.schedule, file) {
            (ScheduleChoice::Named(kind), _) => {
                let is_interleaved = *kind == PipelineScheduleKind::Interleaved;
                let stages_per_rank = if is_interleaved { self.stages_per_rank } else { 1 };
                kind.generate(num_ranks, stages_per_rank, num_micro_batches)?
            }
            (ScheduleChoice::File(_), text) => {
                let schedule = Schedule::from_csv(text.unwrap_or_default(), &self.name())?;
                let found = schedule.num_micro_batches;
                if let Some(wanted) = train.micro_batches.filter(|wanted| *wanted != found) {
                    let why = format!("it is for {found} micro-batches, but --micro-batches is {wanted}");
                    return Err(Error::input(format!("reading the schedule {}", self.name()), why));
                }
                schedule
            }
        };
        let report = schedule.check()?;
        Ok((schedule, report))
    }

    /// Returns the text of the file of --schedule, if there is one. Rank 0 reads it for all ranks,
    /// so that all run the same schedule. Collective.
    fn read_file(&self, all: &Communicator) -> Result<Option<String>> {
        match &self.schedule {
            ScheduleChoice::Named(_) => Ok(None),
            ScheduleChoice::File(path) => read_text(all, path, "the schedule").map(Some),
        }
    }

    /// Returns a function that plans how a model is spread over the stage axis of `grid`: see
    /// [`ParallelPlan::pipeline`]. It is called with the model and the number of samples of a batch. The
    /// function logs the schedule. Collective.
    ///
    /// # Errors
    /// The file of the schedule cannot be read: the same error on every rank. The function fails if
    /// the schedule is not sound or does not fit the ranks or the model.
    pub fn planner(
        &self,
        world: &World,
        grid: &Grid,
        train: &TrainOptions,
    ) -> Result<impl Fn(&Model, usize) -> Result<ParallelPlan>> {
        let (file, num_ranks) = (self.read_file(world.communicator())?, grid.shape.stage);
        let num_replicas = grid.shape.data;
        Ok(move |model: &Model, batch| {
            let num_micro_batches = match num_ranks {
                1 => train.micro_batches(model, batch, num_replicas),
                _ => train.pipeline_micro_batches((batch / num_replicas).max(1), num_ranks),
            };
            self.plan(model, num_ranks, num_micro_batches, train, file.as_deref())
        })
    }

    fn plan(
        &self,
        model: &Model,
        num_ranks: usize,
        num_micro_batches: usize,
        train: &TrainOptions,
        file: Option<&str>,
    ) -> Result<ParallelPlan> {
        let (schedule, report) = self.schedule(num_ranks, num_micro_batches, train, file)?;
        if schedule.ranks.len() != num_ranks {
            let (name, found) = (self.name(), schedule.ranks.len());
            let why = format!("{name} is for {found} ranks, but {num_ranks} share the layers");
            return Err(Error::input("--schedule", why));
        }
        let (num_stages, num_layers) = (schedule.num_stages, model.runs().len());
        if num_stages > num_layers {
            let name = &model.name;
            let why = format!(
                "it takes a layer for each of {num_stages} stages, and {name} has {num_layers} (a residual \
                 counts as one)"
            );
            return Err(Error::input("spreading the layers", why));
        }
        let sizes = self.stages.as_ref().map(|sizes| sizes.0.as_slice());
        let plan = ParallelPlan::pipeline(model, schedule, sizes)?;
        if num_stages == 1 && file.is_none() {
            return Ok(plan);
        }
        let plan = ParallelPlan { expected_bubble: Some(report.bubble), ..plan };
        log::info!("{}", plan.schedule.headline(&self.name(), &report));
        // as --stages counts them
        let runs = model.runs();
        let size = |layers: &Range<usize>| runs.iter().filter(|run| layers.contains(&run.start)).count();
        let sizes: Vec<String> = plan.layers.iter().map(|layers| size(layers).to_string()).collect();
        log::info!("layers of the stages: {}", sizes.join(", "));
        Ok(plan)
    }

    /// Draws the schedule as --show-schedule asks, on rank 0, for the grid that `grid` returns for the number
    /// of ranks of --show-ranks, if that is given. Collective.
    ///
    /// # Errors
    /// `grid` failed, the schedule is not sound, or the file cannot be written.
    pub fn show(
        &self,
        world: &World,
        file: &str,
        grid: impl Fn(Option<usize>) -> Result<GridShape>,
        train: &TrainOptions,
    ) -> Result<()> {
        let text = self.read_file(world.communicator())?;
        let draw = || {
            let GridShape { data: num_replicas, stage: num_ranks, .. } = grid(self.show_ranks)?;
            let share = (train.batch_size / num_replicas).max(1);
            let num_micro_batches = train.pipeline_micro_batches(share, num_ranks);
            let (schedule, report) = self.schedule(num_ranks, num_micro_batches, train, text.as_deref())?;
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
        world.communicator().agree_with_root(draw).map(|_| ())
    }
}
