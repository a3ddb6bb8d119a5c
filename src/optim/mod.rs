//! Optimizers over flat slices, and learning-rate schedules.
//!
//! An optimizer is told which elements belong to its rank; it is independent of layers and ranks.

mod learning_rate;

pub use learning_rate::{LearningRateSchedule, LearningRateScheduleKind};

use std::ops::Range;

use clap::ValueEnum;
use smallvec::SmallVec;

use crate::Result;
use crate::device::{AdamStep, Device, LionStep, OptimizerStep, Role, SgdStep, update};

/// The rule that turns gradients into updates. Checkpoints record its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Rule {
    /// Stochastic gradient descent, with momentum.
    ///
    /// `torch.optim.SGD`.
    #[value(name = "sgd")]
    Sgd,
    /// Adam.
    ///
    /// `torch.optim.Adam`: weight decay is added to the gradient.
    #[value(name = "adam")]
    Adam,
    /// Adam with decoupled weight decay.
    ///
    /// `torch.optim.AdamW`: weight decay shrinks the weights directly.
    #[value(name = "adamw")]
    AdamW,
    /// Lion, whose updates all have the same size.
    ///
    /// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, Algorithm
    /// 2), with decoupled weight decay.
    #[value(name = "lion")]
    Lion,
}

/// A rule and its constants, without the learning rate, which a [`LearningRateSchedule`] gives for
/// each step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerSettings {
    /// The rule.
    pub rule: Rule,
    /// Momentum of SGD; 0 for none. Default 0.
    pub momentum: f64,
    /// Nesterov's momentum in SGD. Default off.
    pub nesterov: bool,
    /// Weight decay, per unit of learning rate. Default 0.
    pub weight_decay: f64,
    /// Decay rates of Adam's moments, 0.9 and 0.999 by default; of Lion's interpolation and moment,
    /// 0.9 and 0.99 by default.
    pub betas: [f64; 2],
    /// Constant added to the root of Adam's second moment. Default 10⁻⁸.
    pub epsilon: f64,
    /// The tensors that decay. Default all.
    pub decay: DecayScope,
}

/// The tensors to which weight decay applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DecayScope {
    /// All tensors.
    #[value(name = "all")]
    All,
    /// Tensors of two dimensions or more: weights, but no biases and no weights of norms.
    #[value(name = "matrices")]
    Matrices,
}

impl OptimizerSettings {
    /// Returns `rule` with PyTorch's default constants, but without weight decay.
    pub fn new(rule: Rule) -> OptimizerSettings {
        OptimizerSettings {
            rule,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            betas: if rule == Rule::Lion { [0.9, 0.99] } else { [0.9, 0.999] },
            epsilon: 1e-8,
            decay: DecayScope::All,
        }
    }

    /// Returns true if weight decay applies to a tensor of shape `shape`.
    pub fn decays(&self, shape: &[usize]) -> bool {
        self.decay == DecayScope::All || shape.len() > 1
    }

    /// Returns PyTorch's names of the values that the optimizer keeps for each parameter.
    pub fn slot_names(&self) -> &'static [&'static str] {
        match self.rule {
            Rule::Sgd if self.momentum == 0.0 => &[],
            Rule::Sgd => &["momentum_buffer"],
            Rule::Adam | Rule::AdamW => &["exp_avg", "exp_avg_sq"],
            Rule::Lion => &["exp_avg"],
        }
    }

    /// Returns the number of values that the optimizer keeps for each parameter.
    pub fn num_slots(&self) -> usize {
        self.slot_names().len()
    }

    /// Returns the constants in the form that devices take, for tensors that decay or do not.
    fn device_step(&self, decays: bool) -> OptimizerStep {
        let weight_decay = if decays { self.weight_decay as f32 } else { 0.0 };
        match self.rule {
            Rule::Sgd => {
                let (momentum, nesterov) = (self.momentum as f32, self.nesterov);
                OptimizerStep::Sgd(SgdStep { momentum, nesterov, weight_decay })
            }
            Rule::Adam | Rule::AdamW => OptimizerStep::Adam(AdamStep {
                beta1: self.betas[0],
                beta2: self.betas[1],
                epsilon: self.epsilon as f32,
                weight_decay,
                decoupled: self.rule == Rule::AdamW,
            }),
            Rule::Lion => {
                OptimizerStep::Lion(LionStep { beta1: self.betas[0], beta2: self.betas[1], weight_decay })
            }
        }
    }
}

/// The values that change from one update to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// The number of the update, from 1: Adam's t.
    pub number: u64,
    /// The learning rate.
    pub learning_rate: f64,
    /// Factor of the gradient, for clipping.
    pub gradient_scale: f64,
}

/// An optimizer with its slots, for the parameters that this rank owns, segment by segment.
pub struct Optimizer<D: Device> {
    settings: OptimizerSettings,
    /// `[segment][slot]`
    slots: Vec<Vec<D::Buffer>>,
    /// The [`Update`] in the device's memory, by the indices of [`update`].
    update: D::Buffer,
    /// The values sent to `update`, of which the device may have replaced the factor for clipping since:
    /// steps that clip write it before they read it.
    sent: Option<[f32; update::LEN]>,
}

impl<D: Device> Optimizer<D> {
    /// Allocates slots of zeros for segments of which this rank owns `lengths` elements each. Not
    /// collective.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn new(device: &D, settings: OptimizerSettings, lengths: Vec<usize>) -> Result<Optimizer<D>> {
        let num_slots = settings.slot_names().len();
        let allocate = |len| (0..num_slots).map(|_| device.allocate(len, Role::Exact)).collect();
        let slots = lengths.into_iter().map(allocate).collect::<Result<_>>()?;
        Ok(Optimizer { settings, slots, update: device.allocate(update::LEN, Role::Exact)?, sent: None })
    }

    /// Returns the rule and its constants.
    pub fn settings(&self) -> &OptimizerSettings {
        &self.settings
    }

    /// Borrows elements `range` of the owned part of slot `slot` of a segment.
    pub fn slot(&self, device: &D, segment: usize, slot: usize, range: Range<usize>) -> D::View<'_> {
        device.view(&self.slots[segment][slot], range)
    }

    /// Borrows elements `range` of the owned part of slot `slot` of a segment, to write.
    pub fn slot_mut(
        &mut self,
        device: &D,
        segment: usize,
        slot: usize,
        range: Range<usize>,
    ) -> D::ViewMut<'_> {
        device.view_mut(&mut self.slots[segment][slot], range)
    }

    /// Sends the values that change from update to update to the device, for the calls of
    /// [`Optimizer::step`] that follow, unless it has them.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn begin(&mut self, device: &D, step: &Update) -> Result<()> {
        let Update { number, learning_rate, gradient_scale } = *step;
        let corrects = matches!(self.settings.rule, Rule::Adam | Rule::AdamW);
        let correction =
            |beta: f64| if corrects { (1.0 - libm::pow(beta, number as f64)) as f32 } else { 1.0 };
        let [beta1, beta2] = self.settings.betas;
        let mut values = [0.0; update::LEN];
        values[update::LEARNING_RATE] = learning_rate as f32;
        values[update::GRADIENT_SCALE] = gradient_scale as f32;
        values[update::BIAS_CORRECTION1] = correction(beta1);
        values[update::BIAS_CORRECTION2] = correction(beta2);
        if self.sent == Some(values) {
            return Ok(());
        }
        device.write(device.view_mut(&mut self.update, 0..update::LEN), &mut |memory| {
            memory.copy_from_slice(&values);
            Ok(())
        })?;
        self.sent = Some(values);
        Ok(())
    }

    /// Scales the gradients of the calls of [`Optimizer::step`] that follow, up to the next
    /// [`Optimizer::begin`], to a norm of at most `largest`: see [`OptimizerOperations::clip`].
    ///
    /// [`OptimizerOperations::clip`]: crate::device::OptimizerOperations::clip
    pub fn clip(&mut self, device: &D, squares: D::View<'_>, largest: f64) {
        self.sent = None;
        device.clip(squares, largest, device.view_mut(&mut self.update, 0..update::LEN));
    }

    /// Updates elements `own` of the owned part of one segment in one pass, with weight decay if
    /// `decays`, and adds the squares of the unscaled gradient to `sums` (see
    /// [`crate::device::totals`]).
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    pub fn step(
        &mut self,
        device: &D,
        segment: usize,
        own: Range<usize>,
        decays: bool,
        parameters: D::ViewMut<'_>,
        gradients: D::View<'_>,
        sums: D::ViewMut<'_>,
    ) {
        let mut slots = std::mem::take(&mut self.slots[segment]);
        self.apply(device, own, decays, parameters, gradients, &mut slots, sums);
        self.slots[segment] = slots;
    }

    /// Updates any parameters with elements `own` of `slots` of the caller: see [`Optimizer::step`].
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    pub fn apply(
        &self,
        device: &D,
        own: Range<usize>,
        decays: bool,
        parameters: D::ViewMut<'_>,
        gradients: D::View<'_>,
        slots: &mut [D::Buffer],
        sums: D::ViewMut<'_>,
    ) {
        let update = device.view(&self.update, 0..update::LEN);
        let step = self.settings.device_step(decays);
        let mut slots: SmallVec<[D::ViewMut<'_>; 2]> =
            slots.iter_mut().map(|slot| device.view_mut(slot, own.clone())).collect();
        device.optimizer_step(&step, update, parameters, gradients, &mut slots, sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Cpu, totals};

    /// Follows PyTorch's definitions, element by element in `f64`.
    fn reference(settings: &OptimizerSettings, rates: &[f64], gradients: &[[f64; 3]]) -> [f64; 3] {
        let mut parameters = [0.5, -1.0, 2.0];
        for element in 0..3 {
            let (mut m, mut v) = (0.0, 0.0);
            for (t, (rate, gradient)) in rates.iter().zip(gradients).enumerate() {
                let p = &mut parameters[element];
                let mut g = gradient[element];
                if matches!(settings.rule, Rule::AdamW | Rule::Lion) {
                    *p -= rate * settings.weight_decay * *p;
                } else {
                    g += settings.weight_decay * *p;
                }
                if settings.rule == Rule::Sgd {
                    m = settings.momentum * m + g;
                    *p -= rate * if settings.nesterov { g + settings.momentum * m } else { m };
                    continue;
                }
                let [b1, b2] = settings.betas;
                if settings.rule == Rule::Lion {
                    let interpolation = b1 * m + (1.0 - b1) * g;
                    *p -= if interpolation == 0.0 { 0.0 } else { rate * interpolation.signum() };
                    m = b2 * m + (1.0 - b2) * g;
                    continue;
                }
                m = b1 * m + (1.0 - b1) * g;
                v = b2 * v + (1.0 - b2) * g * g;
                let t = t as i32 + 1;
                let (m_hat, v_hat): (f64, f64) = (m / (1.0 - b1.powi(t)), v / (1.0 - b2.powi(t)));
                *p -= rate * m_hat / (v_hat.sqrt() + settings.epsilon);
            }
        }
        parameters
    }

    #[test]
    fn every_rule_follows_its_definition() {
        for threads in [1, 2] {
            every_rule_on(&Cpu::new(threads).unwrap());
        }
    }

    fn every_rule_on(device: &Cpu) {
        let mut cases: Vec<_> =
            [Rule::Sgd, Rule::Adam, Rule::AdamW, Rule::Lion].map(OptimizerSettings::new).into();
        cases.push(OptimizerSettings { weight_decay: 0.1, ..cases[0] });
        cases.push(OptimizerSettings { momentum: 0.9, weight_decay: 0.1, ..cases[0] });
        cases.push(OptimizerSettings { nesterov: true, ..cases[5] });
        cases.push(OptimizerSettings { weight_decay: 0.1, ..cases[1] });
        cases.push(OptimizerSettings { weight_decay: 0.1, betas: [0.8, 0.99], ..cases[2] });
        cases.push(OptimizerSettings { weight_decay: 0.1, betas: [0.8, 0.9], ..cases[3] });
        let rates = [0.1, 0.05, 0.2, 0.1];
        let gradients = [[0.3, -0.2, 0.0], [0.1, 0.4, -0.5], [-0.6, 0.2, 0.1], [0.0, 1.0, -1.0]];
        for settings in cases {
            let mut optimizer = Optimizer::new(device, settings, vec![3]).unwrap();
            let (mut parameters, mut sums) = ([0.5, -1.0, 2.0], [0.0; totals::LEN]);
            for (t, (&learning_rate, gradient)) in rates.iter().zip(&gradients).enumerate() {
                // half the gradient, doubled by the scale
                let gradient = gradient.map(|g| 0.5 * g as f32);
                let update = Update { number: t as u64 + 1, learning_rate, gradient_scale: 2.0 };
                optimizer.begin(device, &update).unwrap();
                optimizer.step(device, 0, 0..3, true, &mut parameters, &gradient, &mut sums);
            }
            let expected = reference(&settings, &rates, &gradients);
            for (found, expected) in parameters.iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 2e-6, "{settings:?}: {found}, not {expected}");
            }
            let squares: f64 = gradients.iter().flatten().map(|g| 0.25 * g * g).sum();
            assert!((f64::from(sums[totals::GRADIENT_SQUARES]) - squares).abs() < 1e-6);
        }
    }
}
