//! What every training program does: options, samples, the loop, what is written down.

mod data_options;
mod metrics;
mod model_options;
mod options;
mod pipeline_options;
mod run;
mod trainer;

pub use data_options::DataOptions;
pub use metrics::{MetricsRow, ResultLine};
pub use model_options::{ActivationName, ModelName, SizeList};
pub use options::{DeviceName, OptimizerName, ReductionName, ScheduleName, StandardiseName, Switch, TrainOptions};
pub use pipeline_options::{PipelineOptions, ScheduleChoice};
pub use run::run;
pub use trainer::{Outcome, Trainer, TrainerSettings};
