//! Cross-entropy of logits whose classes are divided among the ranks of the tensor axis: Shoeybi et al.,
//! "Megatron-LM", 2019, §3.
//!
//! A last layer that is split by outputs leaves every rank the logits of its own classes, such as the
//! tokens of a vocabulary. Gathering them would move `[rows, classes]` values; instead the ranks exchange
//! four values of each row, and compute the gradient of their own logits:
//!
//! 1. Each rank finds the largest of its logits, the class of that, and the label's logit if it has it
//!    ([`LossOperations::find_logit_statistics`]). An all-gather gives them to every rank.
//! 2. Each rank adds up the exponentials of the distances to the largest logit of all
//!    ([`LossOperations::sum_exponentials`]). An all-reduce adds the sums of the ranks.
//! 3. Each rank computes the gradient of its logits, and all compute the loss of all rows
//!    ([`LossOperations::finish_cross_entropy`]).
//!
//! Invariants: a maximum has the same bits in any order; of the terms of the label's logit one is not 0;
//! the sum of the exponentials is canonical ([`crate::sums`]): the classes are its terms, cut into leaves
//! where the layer's outputs are, also on a rank that has all of them. So the gradient and the loss have
//! the bits of a whole layer, and all ranks have the same loss.
//!
//! Fewer than [`FEWEST_DIVIDED`] classes are gathered: that moves about as many values, in one message
//! in place of two. Then the sum has one leaf in every layout.
//!
//! [`LossOperations::find_logit_statistics`]: crate::device::LossOperations::find_logit_statistics
//! [`LossOperations::sum_exponentials`]: crate::device::LossOperations::sum_exponentials
//! [`LossOperations::finish_cross_entropy`]: crate::device::LossOperations::finish_cross_entropy

use super::division::FeatureDivision;
use super::exchange::{Exchange, ExchangeKind, Exchanger, here, here_mut};
use crate::Result;
use crate::comm::Front;
use crate::device::{CrossEntropyOperands, Device, LossShape, logit_statistics, totals};
use crate::sums::{Leaves, Section};

/// The fewest classes that are divided.
pub const FEWEST_DIVIDED: usize = 16;

/// The classes of a loss that a rank has the outputs of.
#[derive(Debug, Clone, Copy)]
pub struct ClassShare {
    /// The classes, as terms of the sum of their exponentials.
    pub classes: Section,
    /// The sum over the ranks, if they have some of the classes each.
    pub sum: Option<Exchange>,
}

impl ClassShare {
    /// Returns all of `num` classes, whose sum has one leaf.
    pub fn one_leaf(num: usize) -> ClassShare {
        ClassShare { classes: Section::whole(Leaves { len: num, num: 1 }), sum: None }
    }

    /// Returns all of `num` classes.
    pub fn whole(num: usize, division: FeatureDivision) -> ClassShare {
        match num < FEWEST_DIVIDED {
            true => ClassShare::one_leaf(num),
            false => ClassShare { classes: division.whole(num, 1), sum: None },
        }
    }

    /// Returns the classes of `rank`, of `num`, for rows of `positions` predictions.
    pub fn of_rank(num: usize, positions: usize, rank: usize, division: FeatureDivision) -> ClassShare {
        let num_leaves = division.num_leaves(num, 1);
        let (kind, columns) = (ExchangeKind::SumValues, division.columns(1));
        let sum = Exchange::of_columns(division, rank, kind, [positions, 1], columns, num_leaves);
        ClassShare { classes: division.section(num, 1, rank), sum: Some(sum) }
    }

    /// Returns the number of values of `rows` rows that all ranks have of their logits, and of the sums
    /// of exponentials.
    pub fn message_lens(self, rows: usize, division: FeatureDivision) -> [usize; 2] {
        let len = |sum: Exchange| {
            let predictions = rows.saturating_mul(sum.positions);
            let all = predictions.saturating_mul(division.num_ranks());
            [all.saturating_mul(logit_statistics::LEN), predictions.saturating_mul(sum.num_sums)]
        };
        self.sum.map_or([0; 2], len)
    }
}

/// The arrays of a loss in the passes of a stage.
pub struct LossArrays<'a, D: Device> {
    /// The logits of this rank.
    pub logits: &'a D::Buffer,
    /// The class numbers.
    pub labels: &'a D::Buffer,
    /// The gradient of the logits.
    pub gradient: &'a mut D::Buffer,
    /// The step's totals.
    pub totals: &'a mut D::Buffer,
}

impl<D: Device> Exchanger<'_, D> {
    /// Computes the cross-entropy of `rows` rows of logits, and its gradient, with classes that the ranks
    /// share as `sum` says. Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn cross_entropy(
        &mut self,
        sum: Exchange,
        rows: usize,
        shape: &LossShape,
        arrays: LossArrays<'_, D>,
    ) -> Result<()> {
        let LossArrays { logits, labels, gradient, totals } = arrays;
        let (device, predictions) = (self.device, shape.rows);
        let (part, all) = (logit_statistics::LEN * predictions, 0..predictions * shape.columns);
        let (logits, labels) = (device.view(logits, all.clone()), device.view(labels, 0..predictions));
        let mut statistics = self.statistics.take().expect("one loss at a time");
        let own = self.rank() * part..(self.rank() + 1) * part;
        device.find_logit_statistics(shape, logits, labels, device.view_mut(&mut statistics, own));
        let len = self.size() * part;
        let statistics = self.peers(sum).start_all_gather_in_place(Front { buffer: statistics, len })?.wait();
        let statistics = statistics.buffer;
        let known = device.view(&statistics, 0..len);
        let mut exponentials = self.exponentials.take();
        let subtrees = device.view_mut(here_mut(&mut exponentials), 0..sum.num_own_sums * predictions);
        let kept = device.view_mut(gradient, all.clone());
        device.sum_exponentials(shape, logits, known, kept, subtrees);
        self.forward(sum, 0..rows, &mut exponentials, &mut None)?;
        let operands = CrossEntropyOperands {
            logits,
            labels,
            statistics: known,
            exponentials: device.view(here(&exponentials), 0..predictions),
        };
        let totals = device.view_mut(totals, 0..totals::LEN);
        device.finish_cross_entropy(shape, &operands, device.view_mut(gradient, all), totals);
        (self.statistics, self.exponentials) = (Some(statistics), exponentials);
        Ok(())
    }
}
