//! The training loop that every program runs: its options and samples, its checkpoints, and what it
//! writes down.

mod checkpoints;
mod feed;
mod identity;
mod job;
mod journal;
mod memory;
mod metrics;
mod options;
mod order;
mod resume;
mod run;
mod samples;
mod stop;
mod summation;
mod trainer;
mod training;
mod tuning;

pub use metrics::{MetricsRow, ResultLine};
pub use options::{
    AnyDevice, AuditOptions, CheckpointOptions, DataOptions, DeviceChoice, DeviceOptions, EvaluationInterval,
    Every, Given, GridOptions, ModelName, ModelOptions, OptimizerOptions, OrAuto, PipelineOptions, Resume,
    SamplePart, ScheduleChoice, ShapeText, SizeList, SourceOptions, Standardisation, Switch, TensorOptions,
    TrainOptions, check_files, map_peers, name_of,
};
pub use run::{Strategy, run};
pub use samples::{SampleRequest, TargetsNeed, open_part};
pub use trainer::{Evaluation, RunRequests, StepOutcome, Trainer, TrainerSettings};
