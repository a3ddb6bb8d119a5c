//! The learning rate of each step.

use clap::ValueEnum;

/// The shape of a learning-rate schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LearningRateScheduleKind {
    /// A constant learning rate.
    #[value(name = "constant", help = "Constant")]
    Constant,
    /// A decay by a constant factor every `interval` steps, as PyTorch's `StepLR`.
    #[value(name = "step", help = "Multiplied by --decay-factor every --decay-interval steps")]
    Step,
    /// A decay to `last` along half a cosine, as PyTorch's `CosineAnnealingLR` (Loshchilov and
    /// Hutter, 2017, without restarts).
    #[value(name = "cosine", help = "Falls to --final-learning-rate along half a cosine")]
    Cosine,
    /// A linear decay to `last`.
    #[value(name = "linear", help = "Falls to --final-learning-rate along a line")]
    Linear,
}

/// A learning-rate schedule as a pure function of the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRateSchedule {
    /// The shape after the warm-up.
    pub kind: LearningRateScheduleKind,
    /// The rate at the end of the warm-up.
    pub base: f64,
    /// The rate at the end of `Cosine` and `Linear`.
    pub last: f64,
    /// The number of steps over which the rate rises in equal parts to `base`.
    pub warmup_steps: u64,
    /// The length of the whole schedule, warm-up included, in steps.
    pub num_steps: u64,
    /// The number of steps between two decays of `Step`.
    pub interval: u64,
    /// The factor of each decay of `Step`.
    pub decay: f64,
}

impl LearningRateSchedule {
    /// Returns a schedule with the rate `base` at every step.
    pub fn constant(base: f64) -> LearningRateSchedule {
        let kind = LearningRateScheduleKind::Constant;
        LearningRateSchedule { kind, base, last: 0.0, warmup_steps: 0, num_steps: 1, interval: 1, decay: 1.0 }
    }

    /// Returns the rate of step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.base * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let step = step - self.warmup_steps;
        let length = self.num_steps.saturating_sub(self.warmup_steps).max(1);
        let share = (step as f64 / length as f64).min(1.0);
        let between = |part: f64| self.last + (self.base - self.last) * part;
        match self.kind {
            LearningRateScheduleKind::Constant => self.base,
            LearningRateScheduleKind::Step => {
                self.base * libm::pow(self.decay, (step / self.interval.max(1)) as f64)
            }
            LearningRateScheduleKind::Cosine => {
                between(0.5 * (1.0 + libm::cos(std::f64::consts::PI * share)))
            }
            LearningRateScheduleKind::Linear => between(1.0 - share),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_begin_at_the_base_and_end_at_the_last() {
        let constant = LearningRateSchedule::constant(1.0);
        let base = LearningRateSchedule { num_steps: 10, last: 0.1, interval: 4, decay: 0.5, ..constant };
        let rates = |kind| -> Vec<f64> {
            (0..=10).map(|step| LearningRateSchedule { kind, ..base }.at(step)).collect()
        };
        assert!(rates(LearningRateScheduleKind::Constant).iter().all(|rate| *rate == 1.0));
        assert_eq!(rates(LearningRateScheduleKind::Step)[3..=8], [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]);
        for kind in [LearningRateScheduleKind::Cosine, LearningRateScheduleKind::Linear] {
            let rates = rates(kind);
            assert!((rates[0] - 1.0).abs() < 1e-12 && (rates[10] - 0.1).abs() < 1e-12);
            assert!((rates[5] - 0.55).abs() < 1e-12, "{kind:?} {}", rates[5]);
        }
    }

    #[test]
    fn warm_up_rises_in_equal_parts_and_comes_off_the_length() {
        let kind = LearningRateScheduleKind::Linear;
        let constant = LearningRateSchedule::constant(1.0);
        let schedule = LearningRateSchedule { kind, warmup_steps: 4, num_steps: 8, ..constant };
        let rates: Vec<f64> = (0..9).map(|step| schedule.at(step)).collect();
        assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
    }
}
