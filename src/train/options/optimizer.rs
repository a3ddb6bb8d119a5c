//! The options of the optimizer and of its learning rate.

use clap::Args;

use super::given::Given;
use super::names::name_of;
use super::range::{not_negative, positive, positive_in_steps};
use crate::optim::{DecayScope, LearningRateSchedule, LearningRateScheduleKind, OptimizerSettings, Rule};
use crate::{Error, Result};

/// The options of the optimizer and of its learning rate.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Training")]
pub struct OptimizerOptions {
    /// Rule that updates the parameters
    #[arg(long, value_enum, default_value = "sgd")]
    pub optimizer: Rule,

    /// Learning rate, at the end of the warm-up [default: 0.05 with sgd, 0.001 with adam and adamw,
    /// 0.0001 with lion]
    #[arg(long, allow_negative_numbers = true, value_name = "RATE")]
    pub learning_rate: Option<f64>,

    /// Momentum of sgd, from 0 to below 1
    #[arg(long, allow_negative_numbers = true, value_name = "M", default_value_t = 0.9)]
    pub momentum: f64,

    /// Use Nesterov's momentum in sgd
    #[arg(long)]
    pub nesterov: bool,

    /// Decay rate of the first moment of adam and adamw, or weight of the moment in the update of lion,
    /// from 0 to below 1 [default: 0.9]
    #[arg(long, allow_negative_numbers = true, value_name = "B")]
    pub beta1: Option<f64>,

    /// Decay rate of the second moment of adam and adamw, or of the moment of lion, from 0 to below 1
    /// [default: 0.999, 0.99 with lion]
    #[arg(long, allow_negative_numbers = true, value_name = "B")]
    pub beta2: Option<f64>,

    /// Constant added to the root of the second moment of adam and adamw
    #[arg(long, allow_negative_numbers = true, value_name = "E", default_value_t = 1e-8)]
    pub epsilon: f64,

    /// Weight decay, per unit of learning rate [default: 0, 0.01 with adamw]
    #[arg(long, allow_negative_numbers = true, value_name = "D")]
    pub weight_decay: Option<f64>,

    /// Tensors that decay: all, or matrices, which spares biases and the weights of norms, as is usual
    /// for transformers
    #[arg(long, value_enum, default_value = "all")]
    pub decay: DecayScope,

    /// Schedule of the learning rate after the warm-up
    #[arg(long, value_enum, default_value = "cosine")]
    pub learning_rate_schedule: LearningRateScheduleKind,

    /// Steps over which the learning rate rises from near 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warmup_steps: u64,

    /// Learning rate at the end of the cosine and linear schedules
    #[arg(long, allow_negative_numbers = true, value_name = "RATE", default_value_t = 0.0)]
    pub final_learning_rate: f64,

    /// Steps between two decays of the step schedule
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub decay_interval: u64,

    /// Factor of each decay of the step schedule
    #[arg(long, allow_negative_numbers = true, value_name = "F", default_value_t = 0.1)]
    pub decay_factor: f64,

    /// Largest norm of the gradient; a longer one is scaled down to it [default: no limit]
    #[arg(long, allow_negative_numbers = true, value_name = "NORM")]
    pub clip_norm: Option<f64>,
}

impl OptimizerOptions {
    /// Returns the optimizer's rule and constants.
    pub fn settings(&self) -> OptimizerSettings {
        let default_decay = match self.optimizer {
            Rule::Sgd | Rule::Adam | Rule::Lion => 0.0,
            Rule::AdamW => 0.01,
        };
        let defaults = OptimizerSettings::new(self.optimizer);
        let [beta1, beta2] = defaults.betas;
        OptimizerSettings {
            momentum: self.momentum,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay.unwrap_or(default_decay),
            betas: [self.beta1.unwrap_or(beta1), self.beta2.unwrap_or(beta2)],
            epsilon: self.epsilon,
            decay: self.decay,
            ..defaults
        }
    }

    /// Returns the learning rate of every one of `num_steps` steps.
    pub fn schedule(&self, num_steps: u64) -> LearningRateSchedule {
        let default_rate = match self.optimizer {
            Rule::Sgd => 0.05,
            Rule::Adam | Rule::AdamW => 0.001,
            Rule::Lion => 0.0001,
        };
        LearningRateSchedule {
            kind: self.learning_rate_schedule,
            base: self.learning_rate.unwrap_or(default_rate),
            last: self.final_learning_rate,
            warmup_steps: self.warmup_steps,
            num_steps,
            interval: self.decay_interval,
            decay: self.decay_factor,
        }
    }

    /// Checks the ranges of these options. Not collective.
    ///
    /// # Errors
    /// An option is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        positive_in_steps("--learning-rate", self.schedule(1).base)?;
        positive("--clip-norm", self.clip_norm.unwrap_or(1.0))?;
        positive("--decay-interval", self.decay_interval as f64)?;
        not_negative("--weight-decay", self.weight_decay.unwrap_or_default())?;
        not_negative("--final-learning-rate", self.final_learning_rate)?;
        not_negative("--decay-factor", self.decay_factor)?;
        positive_in_steps("--epsilon", self.epsilon)?;
        let [beta1, beta2] = self.settings().betas;
        for (option, rate) in [("--momentum", self.momentum), ("--beta1", beta1), ("--beta2", beta2)] {
            if !(0.0..1.0).contains(&rate) {
                return Err(Error::input(option, format!("it is {rate}, but must be from 0 to below 1")));
            }
        }
        if self.nesterov && self.momentum == 0.0 {
            return Err(Error::input("--nesterov", "it needs a --momentum above 0"));
        }
        Ok(())
    }

    /// Refuses the options in `given` that have no effect with this optimizer and this schedule.
    pub(super) fn check_used(&self, given: &Given) -> Result<()> {
        let for_sgd = (self.optimizer != Rule::Sgd)
            .then(|| format!("it is for --optimizer sgd, and {} is chosen", name_of(&self.optimizer)));
        let for_moments = (self.optimizer == Rule::Sgd)
            .then_some("it is for --optimizer adam, adamw and lion, and sgd is chosen");
        let for_adam = (!matches!(self.optimizer, Rule::Adam | Rule::AdamW)).then(|| {
            format!("it is for --optimizer adam and adamw, and {} is chosen", name_of(&self.optimizer))
        });
        let without_decay = (self.settings().weight_decay == 0.0).then_some("--weight-decay is 0");
        let for_schedule = |wanted: &[LearningRateScheduleKind], text: &str| {
            let chosen = name_of(&self.learning_rate_schedule);
            (!wanted.contains(&self.learning_rate_schedule))
                .then(|| format!("it is for --learning-rate-schedule {text}, and {chosen} is chosen"))
        };
        let with_end = [LearningRateScheduleKind::Cosine, LearningRateScheduleKind::Linear];
        let for_step = for_schedule(&[LearningRateScheduleKind::Step], "step");
        given.refuse("momentum", for_sgd.as_deref())?;
        given.refuse("nesterov", for_sgd.as_deref())?;
        given.refuse("beta1", for_moments)?;
        given.refuse("beta2", for_moments)?;
        given.refuse("epsilon", for_adam.as_deref())?;
        given.refuse("decay", without_decay)?;
        given.refuse("final-learning-rate", for_schedule(&with_end, "cosine or linear").as_deref())?;
        given.refuse("decay-interval", for_step.as_deref())?;
        given.refuse("decay-factor", for_step.as_deref())
    }
}
