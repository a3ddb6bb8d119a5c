//! Contract of attention.

use super::dropout::AttentionDropout;
use super::memory::MemoryOperations;

/// Sequences, each of which attends to itself.
///
/// The heads come in groups. The heads of a group have queries of their own, and share keys and values
/// (Ainslie et al., "GQA", 2023); with one query head a group, this is plain attention. A position has for
/// each group the queries of its heads, a key and a value, each of `width` values, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// The number of sequences.
    pub rows: usize,
    /// The length of a sequence.
    pub positions: usize,
    /// The number of groups.
    pub groups: usize,
    /// The number of heads of a group.
    pub heads: usize,
    /// The length of a query, a key or a value.
    pub width: usize,
    /// True if a position attends only to itself and to those before it.
    pub causal: bool,
    /// The dropout of the softmax's values, in training.
    pub dropout: Option<AttentionDropout>,
}

impl AttentionShape {
    /// Returns the number of input values of a group in a position.
    pub fn group_width(&self) -> usize {
        (self.heads + 2) * self.width
    }

    /// Returns the number of input values of a position.
    pub fn input_width(&self) -> usize {
        self.groups * self.group_width()
    }

    /// Returns the number of heads of all groups.
    pub fn num_heads(&self) -> usize {
        self.groups * self.heads
    }

    /// Returns the number of output values of a position.
    pub fn output_width(&self) -> usize {
        self.num_heads() * self.width
    }

    /// Returns 1/√width, the factor of the scores.
    pub fn scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }
}

/// A rotation of queries and keys by their positions (Su et al., "RoFormer", 2021): elements i and
/// i + width/2 of a vector by the angle p · base^(−2i/width), at position p.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// The base of the angles.
    pub base: f32,
    /// The first position of a sequence.
    pub first: usize,
    /// True for the opposite angles, which turn gradients of the outputs into those of the inputs.
    pub inverse: bool,
}

/// Attention, forward and backward. With the queries Q, keys K and values V of a head, the output is
/// softmax(Q · Kᵀ · scale) · V, with a dropout of the softmax's values if there is one. The matrix of scores
/// is never stored: the backward pass computes it again, some rows at a time (Dao et al., "FlashAttention",
/// 2022).
pub trait AttentionOperations: MemoryOperations {
    /// Computes `output`. `saved`, `[rows, heads, positions]`, receives the logarithm of each softmax's
    /// sum of exponentials; a GPU, whose saved values may be rounded, computes it again.
    fn attention_forward(
        &self,
        shape: &AttentionShape,
        input: Self::View<'_>,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Computes the outputs of the queries from position `first` on, `[rows, positions − first, output
    /// width]`, without dropout. An output has the bits that [`AttentionOperations::attention_forward`] gives
    /// it.
    fn attention_next(
        &self,
        shape: &AttentionShape,
        first: usize,
        input: Self::View<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Computes the gradient of the input from that of the output. A CPU reads `saved` and a GPU `output`.
    fn attention_backward(
        &self,
        shape: &AttentionShape,
        input: Self::View<'_>,
        saved: Self::View<'_>,
        output: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Rotates the queries and keys of `from`, or of `values` themselves, the input of attention, as
    /// `rotation` says. The width is even; `shape.rows` is not read.
    fn rotate(
        &self,
        shape: &AttentionShape,
        rotation: Rotation,
        from: Option<Self::View<'_>>,
        values: Self::ViewMut<'_>,
    );
}
