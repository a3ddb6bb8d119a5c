//! Losses with their gradients.

use super::{Cpu, math};
use crate::device::{LossOperations, LossShape, totals};

impl LossOperations for Cpu {
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: &[f32],
        labels: &[f32],
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let (mut loss, mut correct) = (0.0_f64, 0);
        self.vectorised(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact(shape.columns).zip(gradient.chunks_exact_mut(shape.columns));
                for ((logits, gradient), &label) in rows.zip(labels) {
                    let label = label as usize;
                    let mut best = 0;
                    for (class, logit) in logits.iter().enumerate() {
                        best = if *logit > logits[best] { class } else { best };
                    }
                    let largest = logits[best];
                    gradient.iter_mut().zip(logits).for_each(|(g, logit)| *g = math::exp(logit - largest));
                    let sum = gradient.iter().sum::<f32>();
                    // the logarithm of the C library has other bits on other machines
                    loss += f64::from(libm::logf(sum) + (largest - logits[label]));
                    correct += usize::from(best == label);
                    let factor = shape.scale / sum;
                    gradient.iter_mut().for_each(|g| *g *= factor);
                    gradient[label] -= shape.scale;
                }
            },
        );
        sums[totals::LOSS] += loss as f32;
        sums[totals::CORRECT] += correct as f32;
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: &[f32],
        targets: Option<&[f32]>,
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let factor = 2.0 * shape.scale / shape.columns as f32;
        match targets {
            Some(targets) => gradient.iter_mut().zip(output).zip(targets).for_each(|((g, o), t)| *g = o - t),
            None => gradient.copy_from_slice(output),
        }
        sums[totals::LOSS] += (self.squares(gradient) / shape.columns as f64) as f32;
        self.map(gradient, |difference| difference * factor);
    }
}
