//! What every training program does: options, samples, the loop, what is written down.

mod check;
mod checkpoint_options;
mod checkpoints;
mod data_options;
mod device_options;
mod feed;
mod given;
mod identity;
mod journal;
mod metrics;
mod model_options;
mod options;
mod pipeline_options;
mod resume;
mod run;
mod samples;
mod step;
mod stop;
mod trainer;

pub use check::check_files;
pub use checkpoint_options::{CheckpointOptions, Every, Resume};
pub use data_options::DataOptions;
pub use device_options::{AnyDevice, DeviceName, DeviceOptions, PrecisionName, TransfersName};
pub use given::Given;
pub use metrics::{MetricsRow, ResultLine};
pub use model_options::{ActivationName, ModelName, SizeList};
pub use options::{OptimizerName, ReductionName, ScheduleName, StandardiseName, Switch, TrainOptions};
pub use pipeline_options::{PipelineOptions, ScheduleChoice};
pub use run::{Strategy, run};
pub use step::{Outcome, Requests, Started};
pub use trainer::{Trainer, TrainerSettings};
