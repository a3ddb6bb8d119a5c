//! Contract of losses, which are computed together with their gradients.
//!
//! The softmax of a row of logits takes their maximum, then the sum of the exponentials of their
//! distances to it. Ranks may have some of the classes each: then the three steps between which they
//! exchange a few values of each row are operations of their own, with the bits of
//! [`cross_entropy`](LossOperations::cross_entropy).

use super::activation::Activation;
use super::memory::MemoryOperations;
use crate::sums::{Leaves, Section};

/// A batch of outputs and the scale of its gradient.
#[derive(Debug, Clone, Copy)]
pub struct LossShape {
    /// Rows of the batch, at least one.
    pub rows: usize,
    /// Classes, or outputs; of cross-entropy those of this rank.
    pub columns: usize,
    /// Factor of each row's gradient: 1 / the number of rows of the global batch, so that the sum
    /// over micro-batches and ranks is the gradient of the mean.
    pub scale: f32,
    /// The classes of cross-entropy as terms of the canonical sum of their exponentials, of which
    /// there may be more on other ranks. A GPU sums in orders of its own.
    pub classes: Section,
}

impl LossShape {
    /// Returns the shape of a loss of whole rows, whose sums over columns have one leaf.
    pub fn whole(rows: usize, columns: usize, scale: f32) -> LossShape {
        LossShape { rows, columns, scale, classes: Section::whole(Leaves { len: columns, num: 1 }) }
    }
}

/// The outputs of a network, `[rows, columns]`, for a loss.
#[derive(Debug, Clone, Copy)]
pub struct LossOutputs<V> {
    /// The outputs.
    pub values: V,
    /// If the gradient is to be that of the values before the activation that gives the outputs: the
    /// activation, and what its forward pass saved if [`Activation::saves`], otherwise the outputs.
    pub activation: Option<(Activation, V)>,
}

impl<V> From<V> for LossOutputs<V> {
    fn from(values: V) -> LossOutputs<V> {
        LossOutputs { values, activation: None }
    }
}

/// Indices into what is known of the logits of some consecutive classes: an array `[LEN, rows]`.
pub mod logit_statistics {
    /// The largest logit.
    pub const LARGEST: usize = 0;
    /// The number of its class, the first if several logits are the largest.
    pub const BEST: usize = 1;
    /// The logit of the label; 0 if that is not among these classes.
    pub const OF_LABEL: usize = 2;
    /// Number of values of a row.
    pub const LEN: usize = 3;
}

/// Losses with their gradients. Each adds its sums to a step's [`totals`](super::totals).
pub trait LossOperations: MemoryOperations {
    /// Computes softmax and cross-entropy of `logits`, `[rows, columns]`, with the class numbers in
    /// `labels`, `[rows]`: `gradient = scale · (softmax − one-hot)`. Adds the rows' losses and the
    /// number of correct predictions to `sums`.
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: Self::View<'_>,
        labels: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// Finds the [`logit_statistics`] of the classes of this rank, which may be none.
    fn find_logit_statistics(
        &self,
        shape: &LossShape,
        logits: Self::View<'_>,
        labels: Self::View<'_>,
        statistics: Self::ViewMut<'_>,
    );

    /// Adds up the exponentials of the distances of this rank's logits to the largest of all.
    /// `statistics` are those of all ranks, in the order of their classes, `[ranks, LEN, rows]`.
    /// `exponentials` gets the sums of whole subtrees of the classes, `[subtrees, rows]`. `gradient` may
    /// keep values for [`finish_cross_entropy`](LossOperations::finish_cross_entropy).
    fn sum_exponentials(
        &self,
        shape: &LossShape,
        logits: Self::View<'_>,
        statistics: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        exponentials: Self::ViewMut<'_>,
    );

    /// Computes the gradient of this rank's logits, after
    /// [`sum_exponentials`](LossOperations::sum_exponentials), from the `exponentials` summed over all
    /// classes, `[rows]`. Adds the rows' losses and the number of correct predictions, over all
    /// classes, to `sums`.
    fn finish_cross_entropy(
        &self,
        shape: &LossShape,
        operands: &CrossEntropyOperands<Self::View<'_>>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// Computes the mean over columns of `(output − target)²` for each row, and its gradient times
    /// `scale`, taken through the activation if there is one; without targets, the mean of squares. Adds the
    /// rows' losses to `sums`.
    fn mean_squared_error(
        &self,
        shape: &LossShape,
        outputs: LossOutputs<Self::View<'_>>,
        targets: Option<Self::View<'_>>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );
}

/// The arrays from which [`LossOperations::finish_cross_entropy`] computes.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyOperands<V> {
    /// This rank's logits, `[rows, columns]`.
    pub logits: V,
    /// The class numbers, `[rows]`.
    pub labels: V,
    /// The statistics of all ranks' logits, `[ranks, LEN, rows]`.
    pub statistics: V,
    /// The exponentials summed over all classes, `[rows]`.
    pub exponentials: V,
}
