//! Predictions, and the losses of their targets, as rows of numbers.

use crate::dataset::{Dataset, Targets};
use crate::nn::{Loss, Model};
use crate::parallel::stage::Head;
use crate::{Error, Result};

/// The numbers that are kept of a sample: its outputs; the class or token of each prediction; the loss of
/// each prediction; its targets. Outputs of a sequence with a prediction for each position are kept on
/// request.
#[derive(Debug, Clone, Copy)]
pub struct PredictionShape {
    head: Head,
    has_targets: bool,
    keeps_logits: bool,
}

/// The predictions of consecutive samples, each kind of number in an array of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct Predictions {
    pub(super) outputs: Vec<f32>,
    pub(super) classes: Vec<f32>,
    pub(super) losses: Vec<f32>,
    pub(super) targets: Vec<f32>,
}

impl PredictionShape {
    /// Returns the shape of what `model` predicts of `samples`.
    pub fn new(model: &Model, samples: &dyn Dataset) -> PredictionShape {
        let has_targets = samples.targets() != Targets::Nothing;
        PredictionShape { head: Head::new(model), has_targets, keeps_logits: false }
    }

    /// Returns the same shape with the outputs of all positions of a sequence, if they are `wanted`.
    pub fn with_logits(self, wanted: bool) -> PredictionShape {
        PredictionShape { keeps_logits: wanted, ..self }
    }

    /// Returns the loss of a prediction.
    pub fn loss(&self) -> Loss {
        self.head.loss
    }

    /// Returns the number of predictions of a sample.
    pub fn num_predictions(&self) -> usize {
        self.head.predictions
    }

    /// Returns the number of outputs of a prediction.
    pub fn outputs_of_one(&self) -> usize {
        self.head.outputs
    }

    /// Returns the number of outputs of a sample that are kept.
    pub fn num_outputs(&self) -> usize {
        let Head { predictions, outputs, .. } = self.head;
        if predictions == 1 || self.keeps_logits { predictions * outputs } else { 0 }
    }

    /// Returns the number of classes of a sample.
    pub fn num_classes(&self) -> usize {
        if self.head.loss == Loss::CrossEntropy { self.head.predictions } else { 0 }
    }

    /// Returns the number of losses of a sample.
    pub fn num_losses(&self) -> usize {
        let is_known = self.has_targets || self.head.loss == Loss::MeanOfSquares;
        if is_known { self.head.predictions } else { 0 }
    }

    /// Returns the number of all values of a sample that are kept, with its targets.
    pub fn num_values(&self) -> usize {
        self.num_outputs() + self.num_classes() + self.num_losses() + self.num_targets()
    }

    /// Returns the number of targets of a sample.
    pub fn num_targets(&self) -> usize {
        if self.has_targets { self.head.targets_per_row() } else { 0 }
    }
}

impl Predictions {
    /// Allocates the predictions of `num_samples` samples.
    pub(super) fn zeros(shape: PredictionShape, num_samples: usize) -> Predictions {
        let zeros = |width: usize| vec![0.0; num_samples * width];
        Predictions {
            outputs: zeros(shape.num_outputs()),
            classes: zeros(shape.num_classes()),
            losses: zeros(shape.num_losses()),
            targets: zeros(shape.num_targets()),
        }
    }

    /// Returns the arrays.
    pub(super) fn arrays_mut(&mut self) -> [&mut [f32]; 4] {
        let Predictions { outputs, classes, losses, targets } = self;
        [outputs, classes, losses, targets].map(Vec::as_mut_slice)
    }

    /// Appends the predictions of samples, the first of which is number `first`, from the outputs of the
    /// network and the targets.
    ///
    /// # Errors
    /// An output is NaN or infinite, or a target is no class of the network.
    pub(super) fn push(
        &mut self,
        shape: PredictionShape,
        outputs: &[f32],
        targets: &[f32],
        first: usize,
    ) -> Result<()> {
        let Head { loss, predictions, outputs: width, .. } = shape.head;
        if let Some(at) = outputs.iter().position(|output| !output.is_finite()) {
            let why = format!(
                "output {} of sample {} is {}; inspect shows the range of the network's weights",
                at % width,
                first + at / (width * predictions),
                outputs[at]
            );
            return Err(Error::failed("predicting samples", why));
        }
        let targets_width = loss.num_targets(width);
        if shape.num_outputs() > 0 {
            self.outputs.extend_from_slice(outputs);
        }
        self.targets.extend_from_slice(targets);
        let mut targets = targets.chunks_exact(targets_width.max(1));
        for (number, outputs) in outputs.chunks_exact(width).enumerate() {
            let target = targets.next();
            match (loss, target) {
                (Loss::CrossEntropy, target) => {
                    let best = likeliest(outputs);
                    self.classes.push(best as f32);
                    let Some(&[class]) = target else { continue };
                    if class as usize >= width {
                        let why = format!(
                            "the target of sample {} is class {class}, and the network has outputs for \
                             classes 0 to {}; --targets must have the classes that it was trained with",
                            first + number / predictions,
                            width - 1
                        );
                        return Err(Error::input("comparing predictions with targets", why));
                    }
                    self.losses.push(cross_entropy(outputs, best, class as usize) as f32);
                }
                (Loss::MeanSquaredError, Some(target)) => {
                    let differences = outputs.iter().zip(target).map(|(output, target)| output - target);
                    self.losses.push(mean_of_squares(differences, width) as f32);
                }
                (Loss::MeanSquaredError, None) => {}
                (Loss::MeanOfSquares, _) => {
                    self.losses.push(mean_of_squares(outputs.iter().copied(), width) as f32);
                }
            }
        }
        Ok(())
    }
}

/// Returns the first of the largest outputs.
fn likeliest(outputs: &[f32]) -> usize {
    let better = |best: usize, at: usize| if outputs[at] > outputs[best] { at } else { best };
    (0..outputs.len()).fold(0, better)
}

/// Returns the logarithm of the sum of exponentials, of which output `best` has the largest, minus the
/// output of `class`. The exponential of the C library has other bits on other machines.
fn cross_entropy(outputs: &[f32], best: usize, class: usize) -> f64 {
    let above = |at: usize| f64::from(outputs[best]) - f64::from(outputs[at]);
    let sum: f64 = (0..outputs.len()).map(|at| libm::exp(-above(at))).sum();
    libm::log(sum) + above(class)
}

fn mean_of_squares(values: impl Iterator<Item = f32>, len: usize) -> f64 {
    values.map(|value| f64::from(value) * f64::from(value)).sum::<f64>() / len as f64
}
