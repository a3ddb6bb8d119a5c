//! The optimizers' steps: one pass over parameters, gradients and slots, which also forms the
//! squares of the unscaled gradient.

use super::Cpu;
use super::loops::{CHUNK, sum_of_squares};
use crate::device::{
    AdamStep, LionStep, OptimizerOperations, OptimizerStep, SgdStep, clip_factor, totals, update,
};
use crate::sums::ExactSum;

impl OptimizerOperations for Cpu {
    fn optimizer_step(
        &self,
        step: &OptimizerStep,
        update: &[f32],
        parameters: &mut [f32],
        gradients: &[f32],
        slots: &mut [&mut [f32]],
        sums: &mut [f32],
    ) {
        let squares = match (step, slots) {
            (OptimizerStep::Sgd(step), []) if step.momentum == 0.0 => {
                self.sgd(step, update, parameters, gradients)
            }
            (OptimizerStep::Sgd(step), [momentum]) => {
                self.sgd_with_momentum(step, update, parameters, gradients, momentum)
            }
            (OptimizerStep::Adam(step), [first, second]) => {
                self.adam(&AdamScalars::new(step, update), parameters, gradients, first, second)
            }
            (OptimizerStep::Lion(step), [moment]) => self.lion(step, update, parameters, gradients, moment),
            (step, slots) => panic!("{step:?} with {} slots", slots.len()),
        };
        sums[totals::GRADIENT_SQUARES] += squares as f32;
    }

    fn clip(&self, squares: &[f32], largest: f64, update: &mut [f32]) {
        let mut sum = ExactSum::default();
        squares.chunks_exact(self.squares_len()).for_each(|squares| sum += self.exact_squares(squares));
        update[update::GRADIENT_SCALE] = clip_factor(sum.value().sqrt(), largest) as f32;
    }

    fn sum_squares(&self, values: &[f32], squares: &mut [f32]) {
        let mut sum = self.exact_squares(squares);
        sum += self.sum_squares_exactly(values);
        bytemuck::cast_slice_mut(squares).copy_from_slice(bytemuck::bytes_of(&sum));
    }
}

// Each method returns the sum of the squares of the unscaled gradient.
impl Cpu {
    fn sgd(&self, step: &SgdStep, update: &[f32], parameters: &mut [f32], gradients: &[f32]) -> f64 {
        let weight_decay = step.weight_decay;
        let (learning_rate, gradient_scale) = (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]);
        let part = self.part_len(parameters.len());
        let parts = parameters.chunks_mut(part).zip(gradients.chunks(part));
        self.sum_over(parts, |(parameters, gradients)| {
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
        })
    }

    fn sgd_with_momentum(
        &self,
        step: &SgdStep,
        update: &[f32],
        parameters: &mut [f32],
        gradients: &[f32],
        momentum_buffer: &mut [f32],
    ) -> f64 {
        let SgdStep { momentum, nesterov, weight_decay } = *step;
        let (learning_rate, gradient_scale) = (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]);
        let part = self.part_len(parameters.len());
        let parts = parameters.chunks_mut(part).zip(gradients.chunks(part));
        let parts = parts.zip(momentum_buffer.chunks_mut(part));
        self.sum_over(parts, |((parameters, gradients), momentum_buffer)| {
            let mut squares = 0.0;
            self.vectorised(
                #[inline(always)]
                || {
                    let pairs = parameters.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK));
                    for ((parameters, gradients), buffer) in pairs.zip(momentum_buffer.chunks_mut(CHUNK)) {
                        squares += sum_of_squares(gradients);
                        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(buffer) {
                            let g = weight_decay.mul_add(*p, g * gradient_scale);
                            *v = momentum.mul_add(*v, g);
                            *p -= learning_rate * if nesterov { momentum.mul_add(*v, g) } else { *v };
                        }
                    }
                },
            );
            squares
        })
    }

    fn lion(
        &self,
        step: &LionStep,
        update: &[f32],
        parameters: &mut [f32],
        gradients: &[f32],
        moment: &mut [f32],
    ) -> f64 {
        let (learning_rate, gradient_scale) = (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]);
        let (beta1, beta2) = (step.beta1 as f32, step.beta2 as f32);
        // rounded once: 1 − 0.99 in f32 would be off by 10⁻⁶
        let (one_minus_beta1, one_minus_beta2) = ((1.0 - step.beta1) as f32, (1.0 - step.beta2) as f32);
        let decay = 1.0 - learning_rate * step.weight_decay;
        let part = self.part_len(parameters.len());
        let parts = parameters.chunks_mut(part).zip(gradients.chunks(part)).zip(moment.chunks_mut(part));
        self.sum_over(parts, |((parameters, gradients), moment)| {
            let mut squares = 0.0;
            self.vectorised(
                #[inline(always)]
                || {
                    let pairs = parameters.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK));
                    for ((parameters, gradients), moment) in pairs.zip(moment.chunks_mut(CHUNK)) {
                        squares += sum_of_squares(gradients);
                        for ((p, g), m) in parameters.iter_mut().zip(gradients).zip(moment) {
                            let g = g * gradient_scale;
                            let interpolation = beta1.mul_add(*m, one_minus_beta1 * g);
                            // 0 has no sign, and NaN stays
                            let sign = if interpolation == 0.0 { 0.0 } else { interpolation.signum() };
                            *p = decay.mul_add(*p, -learning_rate * sign);
                            *m = beta2.mul_add(*m, one_minus_beta2 * g);
                        }
                    }
                },
            );
            squares
        })
    }

    fn adam(
        &self,
        scalars: &AdamScalars,
        parameters: &mut [f32],
        gradients: &[f32],
        first_moment: &mut [f32],
        second_moment: &mut [f32],
    ) -> f64 {
        let part = self.part_len(parameters.len());
        let moments = first_moment.chunks_mut(part).zip(second_moment.chunks_mut(part));
        let parts = parameters.chunks_mut(part).zip(gradients.chunks(part)).zip(moments);
        self.sum_over(parts, |((parameters, gradients), (first, second))| {
            let AdamScalars { beta1, beta2, one_minus_beta1, one_minus_beta2, epsilon, .. } = *scalars;
            let AdamScalars { step_size, inverse_root_correction2, decay, l2, gradient_scale, .. } = *scalars;
            let mut squares = 0.0;
            self.vectorised(
                #[inline(always)]
                || {
                    let parameters = parameters.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK));
                    let moments = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
                    for ((parameters, gradients), (first, second)) in parameters.zip(moments) {
                        squares += sum_of_squares(gradients);
                        for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(first).zip(second) {
                            let g = l2.mul_add(*p, g * gradient_scale);
                            *m = beta1.mul_add(*m, one_minus_beta1 * g);
                            *v = beta2.mul_add(*v, one_minus_beta2 * g * g);
                            let denominator = v.sqrt().mul_add(inverse_root_correction2, epsilon);
                            *p = decay.mul_add(*p, -step_size * *m / denominator);
                        }
                    }
                },
            );
            squares
        })
    }
}

/// Scalars of a step of Adam that are the same for all elements.
struct AdamScalars {
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    epsilon: f32,
    /// learning rate / (1 − β₁ᵗ)
    step_size: f32,
    /// 1 / √(1 − β₂ᵗ)
    inverse_root_correction2: f32,
    /// Factor of the parameter: decoupled weight decay.
    decay: f32,
    /// Multiple of the parameter that is added to the gradient: weight decay that is not decoupled.
    l2: f32,
    gradient_scale: f32,
}

impl AdamScalars {
    fn new(step: &AdamStep, update: &[f32]) -> AdamScalars {
        let AdamStep { beta1, beta2, epsilon, weight_decay, decoupled } = *step;
        let learning_rate = update[update::LEARNING_RATE];
        let (decay, l2) =
            if decoupled { (1.0 - learning_rate * weight_decay, 0.0) } else { (1.0, weight_decay) };
        AdamScalars {
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            // rounded once: 1 − 0.999 in f32 would be off by 5·10⁻⁵
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            epsilon,
            step_size: learning_rate / update[update::BIAS_CORRECTION1],
            inverse_root_correction2: 1.0 / update[update::BIAS_CORRECTION2].sqrt(),
            decay,
            l2,
            gradient_scale: update[update::GRADIENT_SCALE],
        }
    }
}
