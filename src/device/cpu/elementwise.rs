//! Activations, losses and optimizer steps: each one pass over its arrays, in loops that the compiler vectorises.

use super::math;
use super::{Cpu, totals};
use crate::device::{Activation, AdamStep, LossShape, SgdStep, update};

/// Elements over which a sum stays in `f32` lanes before it goes on in `f64`; threads take whole chunks.
const CHUNK: usize = 4096;

impl Cpu {
    /// `values = activation(values + bias)` for every row, with the derivative in `saved` if the activation saves it.
    pub(super) fn bias_and_activation(
        &self,
        activation: Activation,
        bias: Option<&[f32]>,
        columns: usize,
        values: &mut [f32],
        saved: &mut [f32],
    ) {
        if let Some(bias) = bias {
            self.vectorised(
                #[inline(always)]
                || {
                    for row in values.chunks_exact_mut(columns) {
                        row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
                    }
                },
            );
        }
        self.activate(activation, values, saved);
    }

    /// `values = activation(values)` in place.
    pub(super) fn activate(&self, activation: Activation, values: &mut [f32], saved: &mut [f32]) {
        match activation {
            Activation::Identity => {}
            Activation::Relu => self.map(values, |x| if x > 0.0 || x.is_nan() { x } else { 0.0 }),
            Activation::Tanh => self.map(values, math::tanh),
            Activation::Gelu => self.gelu(values, saved),
        }
    }

    /// `values = gelu(values)` in place, with the derivative in `saved`.
    fn gelu(&self, values: &mut [f32], saved: &mut [f32]) {
        let part = self.part_len(values.len());
        self.for_each(values.chunks_mut(part).zip(saved.chunks_mut(part)), |(values, saved)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (value, saved) in values.iter_mut().zip(saved.iter_mut()) {
                        (*value, *saved) = math::gelu(*value);
                    }
                },
            );
        });
    }

    /// See [`crate::device::Device::backward_activation`].
    pub(super) fn unactivate(
        &self,
        activation: Activation,
        columns: usize,
        saved: &[f32],
        gradient: &mut [f32],
        bias_gradient: Option<&mut [f32]>,
        accumulate: bool,
    ) {
        match activation {
            Activation::Identity => {}
            Activation::Relu => self.zip(gradient, saved, |g, y| if y > 0.0 { g } else { 0.0 }),
            Activation::Tanh => self.zip(gradient, saved, |g, y| g * (1.0 - y * y)),
            Activation::Gelu => self.zip(gradient, saved, |g, derivative| g * derivative),
        }
        if let Some(sums) = bias_gradient {
            if !accumulate {
                sums.fill(0.0);
            }
            self.add_rows(columns, gradient, sums);
        }
    }

    /// `sums += Σ rows`. Short rows are taken several at a time, for the sake of long vectors.
    fn add_rows(&self, columns: usize, rows: &[f32], sums: &mut [f32]) {
        super::with_scratch(|scratch| {
            let wide = &mut scratch.first;
            wide.clear();
            wide.resize(columns * (256 / columns).max(1), 0.0);
            self.vectorised(
                #[inline(always)]
                || {
                    for several in rows.chunks(wide.len()) {
                        wide.iter_mut().zip(several).for_each(|(sum, g)| *sum += g);
                    }
                    for row in wide.chunks_exact(columns) {
                        sums.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                    }
                },
            );
        });
    }

    fn map(&self, values: &mut [f32], function: impl Fn(f32) -> f32 + Sync) {
        self.for_each(values.chunks_mut(self.part_len(values.len())), |values| {
            self.vectorised(
                #[inline(always)]
                || values.iter_mut().for_each(|value| *value = function(*value)),
            );
        });
    }

    fn zip(&self, values: &mut [f32], with: &[f32], function: impl Fn(f32, f32) -> f32 + Sync) {
        let part = self.part_len(values.len());
        self.for_each(values.chunks_mut(part).zip(with.chunks(part)), |(values, with)| {
            self.vectorised(
                #[inline(always)]
                || values.iter_mut().zip(with).for_each(|(value, with)| *value = function(*value, *with)),
            );
        });
    }

    /// See [`crate::device::Device::cross_entropy`].
    pub(super) fn softmax_cross_entropy(
        shape: &LossShape,
        logits: &[f32],
        labels: &[f32],
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let (mut loss, mut correct) = (0.0_f64, 0);
        let rows = logits.chunks_exact(shape.columns).zip(gradient.chunks_exact_mut(shape.columns));
        for ((logits, gradient), &label) in rows.zip(labels) {
            let label = label as usize;
            let mut best = 0;
            for (class, logit) in logits.iter().enumerate() {
                best = if *logit > logits[best] { class } else { best };
            }
            let largest = logits[best];
            let mut sum = 0.0;
            for (g, logit) in gradient.iter_mut().zip(logits) {
                *g = (logit - largest).exp();
                sum += *g;
            }
            loss += f64::from(sum.ln() + (largest - logits[label]));
            correct += usize::from(best == label);
            let factor = shape.scale / sum;
            gradient.iter_mut().for_each(|g| *g *= factor);
            gradient[label] -= shape.scale;
        }
        sums[totals::LOSS] += loss as f32;
        sums[totals::CORRECT] += correct as f32;
    }

    /// See [`crate::device::Device::mean_squared_error`].
    pub(super) fn squared_error(
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

    /// The sum of the squares of `values`.
    pub(super) fn squares(&self, values: &[f32]) -> f64 {
        self.sum_over(values.chunks(self.part_len(values.len())), |values| {
            let mut sum = 0.0;
            self.vectorised(
                #[inline(always)]
                || values.chunks(CHUNK).for_each(|chunk| sum += sum_of_squares(chunk)),
            );
            sum
        })
    }

    /// See [`crate::device::Device::sgd_step`]; returns the sum of the squares of the (unscaled) gradient.
    pub(super) fn sgd(
        &self,
        (step, update): (&SgdStep, &[f32]),
        parameters: &mut [f32],
        gradients: &[f32],
        momentum: &mut [f32],
    ) -> f64 {
        let part = self.part_len(parameters.len());
        let parts = parameters.chunks_mut(part).zip(gradients.chunks(part));
        if step.momentum == 0.0 {
            return self.sum_over(parts, |(parameters, gradients)| {
                self.plain_sgd((step, update), parameters, gradients)
            });
        }
        self.sum_over(parts.zip(momentum.chunks_mut(part)), |((parameters, gradients), momentum)| {
            self.momentum_sgd((step, update), parameters, gradients, momentum)
        })
    }

    fn plain_sgd(
        &self,
        (step, update): (&SgdStep, &[f32]),
        parameters: &mut [f32],
        gradients: &[f32],
    ) -> f64 {
        let weight_decay = step.weight_decay;
        let (learning_rate, gradient_scale) = (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]);
        let mut squares = 0.0;
        self.vectorised(
            #[inline(always)]
            || {
                for (parameters, gradients) in parameters.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK)) {
                    squares += sum_of_squares(gradients);
                    for (p, g) in parameters.iter_mut().zip(gradients) {
                        *p -= learning_rate * weight_decay.mul_add(*p, g * gradient_scale);
                    }
                }
            },
        );
        squares
    }

    fn momentum_sgd(
        &self,
        (step, update): (&SgdStep, &[f32]),
        parameters: &mut [f32],
        gradients: &[f32],
        momentum: &mut [f32],
    ) -> f64 {
        let SgdStep { momentum: decay, nesterov, weight_decay } = *step;
        let (learning_rate, gradient_scale) = (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]);
        let mut squares = 0.0;
        self.vectorised(
            #[inline(always)]
            || {
                let pairs = parameters.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK));
                for ((parameters, gradients), momentum) in pairs.zip(momentum.chunks_mut(CHUNK)) {
                    squares += sum_of_squares(gradients);
                    for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(momentum) {
                        let g = weight_decay.mul_add(*p, g * gradient_scale);
                        *v = decay.mul_add(*v, g);
                        *p -= learning_rate * if nesterov { decay.mul_add(*v, g) } else { *v };
                    }
                }
            },
        );
        squares
    }

    /// See [`crate::device::Device::adam_step`]; returns the sum of the squares of the (unscaled) gradient.
    pub(super) fn adam(
        &self,
        (step, update): (&AdamStep, &[f32]),
        parameters: &mut [f32],
        gradients: &[f32],
        [first, second]: [&mut [f32]; 2],
    ) -> f64 {
        let part = self.part_len(parameters.len());
        let moments = first.chunks_mut(part).zip(second.chunks_mut(part));
        let parts = parameters.chunks_mut(part).zip(gradients.chunks(part)).zip(moments);
        self.sum_over(parts, |((parameters, gradients), moments)| {
            self.adam_part((step, update), parameters, gradients, moments)
        })
    }

    fn adam_part(
        &self,
        (step, update): (&AdamStep, &[f32]),
        parameters: &mut [f32],
        gradients: &[f32],
        (first, second): (&mut [f32], &mut [f32]),
    ) -> f64 {
        let epsilon = step.epsilon;
        let (learning_rate, gradient_scale) = (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]);
        let (beta1, beta2) = (step.beta1 as f32, step.beta2 as f32);
        // 1 − β rounded once: 1 − 0.999 in f32 would be off by 5·10⁻⁵
        let (share1, share2) = ((1.0 - step.beta1) as f32, (1.0 - step.beta2) as f32);
        let step_size = learning_rate / update[update::BIAS_CORRECTION1];
        let root = 1.0 / update[update::BIAS_CORRECTION2].sqrt();
        let (shrink, pull) = if step.decoupled {
            (1.0 - learning_rate * step.weight_decay, 0.0)
        } else {
            (1.0, step.weight_decay)
        };
        let mut squares = 0.0;
        self.vectorised(
            #[inline(always)]
            || {
                let parameters = parameters.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK));
                let moments = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
                for ((parameters, gradients), (first, second)) in parameters.zip(moments) {
                    squares += sum_of_squares(gradients);
                    for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(first).zip(second) {
                        let g = pull.mul_add(*p, g * gradient_scale);
                        *m = beta1.mul_add(*m, share1 * g);
                        *v = beta2.mul_add(*v, share2 * g * g);
                        let denominator = v.sqrt().mul_add(root, epsilon);
                        *p = shrink.mul_add(*p, -step_size * *m / denominator);
                    }
                }
            },
        );
        squares
    }

    /// The length of the parts that an array of `len` is worked on in: one for each thread, in whole chunks.
    fn part_len(&self, len: usize) -> usize {
        if self.threads == 1 {
            len.max(1)
        } else {
            len.div_ceil(self.threads).next_multiple_of(CHUNK).max(CHUNK)
        }
    }

    /// The sum of what `work` returns for each part, added in their order.
    fn sum_over<I: Send>(&self, parts: impl Iterator<Item = I>, work: impl Fn(I) -> f64 + Sync) -> f64 {
        if self.threads == 1 {
            return parts.map(work).sum();
        }
        let parts: Vec<I> = parts.collect();
        let mut sums = vec![0.0; parts.len()];
        self.for_each(parts.into_iter().zip(&mut sums), |(part, sum)| *sum = work(part));
        sums.iter().sum()
    }
}

/// The sum of squares of a piece short enough for `f32`, in lanes, so that it vectorises and has one fixed order.
#[inline(always)]
fn sum_of_squares(values: &[f32]) -> f64 {
    const LANES: usize = 64;
    let mut lanes = [0.0_f32; LANES];
    let pieces = values.chunks_exact(LANES);
    let rest = pieces.remainder();
    for piece in pieces {
        for (lane, value) in lanes.iter_mut().zip(piece) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    let tail: f64 = rest.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>() + tail
}
