//! The comparison of predictions with targets.
//!
//! A score is formed by one rank, over the samples in their order, so it has the same bits for any number
//! of ranks.

use serde::Serialize;

use super::prediction::{PredictionShape, Predictions};
use crate::nn::Loss;

/// The sums over predictions from which a [`ScoreSummary`] follows.
pub struct Score {
    shape: PredictionShape,
    num_losses: u64,
    loss: f64,
    classes: Vec<ClassCount>,
    values: Vec<ValueMoments>,
}

/// The predictions whose target is a class.
#[derive(Debug, Clone, Copy, Default)]
struct ClassCount {
    num: u64,
    correct: u64,
}

/// The moments of an output's target, and its errors: B. P. Welford, "Note on a method for calculating
/// corrected sums of squares and products", Technometrics 1962.
#[derive(Debug, Clone, Copy, Default)]
struct ValueMoments {
    num: u64,
    mean: f64,
    squares: f64,
    errors: f64,
}

impl ValueMoments {
    fn add(&mut self, output: f32, target: f32) {
        let (output, target) = (f64::from(output), f64::from(target));
        self.num += 1;
        let difference = target - self.mean;
        self.mean += difference / self.num as f64;
        self.squares += difference * (target - self.mean);
        self.errors += (output - target) * (output - target);
    }
}

/// The score of one class or token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassScore {
    /// The number of the class.
    pub class: usize,
    /// The number of predictions whose target it is.
    pub num: u64,
    /// The share of these that is right.
    pub accuracy: f64,
}

/// The score of a network's predictions. Without targets, everything is missing but the loss of a network
/// whose loss reads none.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ScoreSummary {
    /// The mean loss of a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// The share of predictions that is right, if they are classes or tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The classes or tokens that targets are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<ClassScore>>,
    /// The mean over samples and outputs of the squared difference from the target, if targets are real
    /// values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_squared_error: Option<f64>,
    /// The coefficient of determination over all outputs: 1 − the squared errors, summed over samples
    /// and outputs, / the squared differences of the targets from their output's mean, summed likewise.
    /// Missing if no target ever changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r2: Option<f64>,
    /// The coefficient of determination of each output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r2_of_outputs: Option<Vec<Option<f64>>>,
}

impl Score {
    /// Begins with no predictions.
    pub fn new(shape: PredictionShape) -> Score {
        let num = |loss: Loss| {
            let is_known = shape.num_targets() > 0 && shape.loss() == loss;
            if is_known { shape.outputs_of_one() } else { 0 }
        };
        Score {
            shape,
            num_losses: 0,
            loss: 0.0,
            classes: vec![ClassCount::default(); num(Loss::CrossEntropy)],
            values: vec![ValueMoments::default(); num(Loss::MeanSquaredError)],
        }
    }

    /// Adds predictions, which follow those added before.
    pub(super) fn add(&mut self, predictions: &Predictions) {
        let Predictions { outputs, classes, losses, targets } = predictions;
        self.num_losses += losses.len() as u64;
        // one chain over all samples: partial sums of pieces would depend on the number of ranks
        self.loss = losses.iter().fold(self.loss, |sum, loss| sum + f64::from(*loss));
        if !self.classes.is_empty() {
            for (class, target) in classes.iter().zip(targets) {
                let count = &mut self.classes[*target as usize];
                count.num += 1;
                count.correct += u64::from(class == target);
            }
        }
        let width = self.values.len().max(1);
        for (outputs, targets) in outputs.chunks_exact(width).zip(targets.chunks_exact(width)) {
            let each = self.values.iter_mut().zip(outputs.iter().zip(targets));
            each.for_each(|(value, (output, target))| value.add(*output, *target));
        }
    }

    /// Returns the score of all predictions that were added.
    pub fn summary(&self) -> ScoreSummary {
        let mean = |sum: f64, num: u64| (num > 0).then(|| sum / num as f64);
        let loss = mean(self.loss, self.num_losses);
        let mut summary = ScoreSummary { loss, ..ScoreSummary::default() };
        if self.shape.num_targets() == 0 {
            return summary;
        }
        if !self.classes.is_empty() {
            let totals = self.classes.iter().fold(ClassCount::default(), |sum, class| ClassCount {
                num: sum.num + class.num,
                correct: sum.correct + class.correct,
            });
            summary.accuracy = mean(totals.correct as f64, totals.num);
            let of_class = |(class, count): (usize, &ClassCount)| {
                let accuracy = mean(count.correct as f64, count.num)?;
                Some(ClassScore { class, num: count.num, accuracy })
            };
            summary.classes = Some(self.classes.iter().enumerate().filter_map(of_class).collect());
        }
        if !self.values.is_empty() {
            let r2 = |errors: f64, squares: f64| (squares > 0.0).then(|| 1.0 - errors / squares);
            let sum = |of: fn(&ValueMoments) -> f64| self.values.iter().map(of).sum::<f64>();
            let errors = sum(|value| value.errors);
            let num = self.values.iter().map(|value| value.num).sum();
            summary.mean_squared_error = mean(errors, num);
            summary.r2 = r2(errors, sum(|value| value.squares));
            summary.r2_of_outputs =
                Some(self.values.iter().map(|value| r2(value.errors, value.squares)).collect());
        }
        summary
    }
}
