//! Contract of normalisations, and of scales without one.

use super::memory::MemoryOperations;
use super::row_sums::RowSums;
use crate::sums::Section;

/// Vectors that are each normalised.
#[derive(Debug, Clone, Copy)]
pub struct NormShape {
    /// The number of vectors.
    pub rows: usize,
    /// The length of a vector.
    pub columns: usize,
    /// ε, which is added to the variance.
    pub epsilon: f32,
    /// True if the mean is subtracted; otherwise mean(x) is 0 in all formulas.
    pub is_centred: bool,
    /// For sequences, the positions of a sample that have vectors here, among all: gradients of parameters
    /// are summed over those of a sample first, then over samples. A GPU sums in an order of its own.
    pub positions: Option<Section>,
}

impl NormShape {
    /// The number of values that the forward pass saves for each vector: its mean and 1/σ.
    pub const SAVED: usize = 2;
}

/// Images whose channels are normalised in groups.
#[derive(Debug, Clone, Copy)]
pub struct GroupNormShape {
    /// Images.
    pub rows: usize,
    /// Height times width.
    pub positions: usize,
    /// Channels.
    pub channels: usize,
    /// Groups of consecutive channels, which divide them.
    pub groups: usize,
    /// ε, which is added to the variance.
    pub epsilon: f32,
    /// True if a ReLU follows.
    pub relu: bool,
}

impl GroupNormShape {
    /// The number of tensors: a weight and a bias.
    pub const TENSORS: usize = 2;

    /// Returns the number of elements of one image.
    pub fn image_len(&self) -> usize {
        self.positions * self.channels
    }

    /// Returns the number of channels of a group.
    pub fn group_len(&self) -> usize {
        self.channels / self.groups
    }

    /// Returns the number of values that the forward pass saves for each image: the mean and 1/σ of
    /// each group.
    pub fn saved_len(&self) -> usize {
        NormShape::SAVED * self.groups
    }

    /// Returns the number of terms of one image in the gradients of the weight and the bias.
    pub fn position_sums_len(&self) -> usize {
        GroupNormShape::TENSORS * self.channels
    }
}

/// Normalisations, forward and backward. With x̂ = (x − mean(x)) / √(var(x) + ε), where the variance is
/// that of all values, not an estimate from a sample.
pub trait NormOperations: MemoryOperations {
    /// Computes `output = x̂ · weight + bias` for each vector x, `[rows, columns]`. `saved` receives
    /// [`NormShape::SAVED`] values of each.
    fn layer_norm_forward(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Option<Self::View<'_>>,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Adds up the gradient of the weight, x̂ times `gradient`, over the vectors. The terms of
    /// `weight_gradient` are vectors, or samples if the shape has positions, which are all of them.
    fn layer_norm_backward_weight(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: RowSums<Self::ViewMut<'_>>,
    );

    /// Adds up the gradient of the bias, `gradient`, for a shape with positions as
    /// [`NormOperations::layer_norm_backward_weight`] does.
    fn layer_norm_backward_bias(
        &self,
        shape: &NormShape,
        gradient: Self::View<'_>,
        bias_gradient: RowSums<Self::ViewMut<'_>>,
    );

    /// Writes the terms of each sample in the gradient of the weight, and of the bias if there is one, that
    /// the positions of `shape` have, which are some of all: an array `[tensors, samples, columns]` for each
    /// subtree of the sum over positions, one behind the other. Without positions, zeros.
    fn layer_norm_position_sums(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        has_bias: bool,
        sums: Self::ViewMut<'_>,
    );

    /// Computes the gradient of the inputs: with g = weight · `gradient`,
    /// (g − mean(g) − x̂ · mean(g · x̂)) / √(var(x) + ε).
    fn layer_norm_backward_input(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Computes `output = x̂ · weight + bias + added`, where x are the values of a group of channels at all
    /// positions of an image, and `weight` and `bias` have an element for each channel; then ReLU, if the
    /// shape has one. `added`, if there is any, has the shape of the output. `saved` receives
    /// [`GroupNormShape::saved_len`] values of each image.
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    fn group_norm_forward(
        &self,
        shape: &GroupNormShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        added: Option<Self::View<'_>>,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Writes the terms of each image in the gradients of the weight, x̂ times `gradient` summed over the
    /// positions, and of the bias, `gradient` summed over them: `[tensors, images, channels]`. `gradient`
    /// is that of the values before the ReLU.
    fn group_norm_position_sums(
        &self,
        shape: &GroupNormShape,
        input: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// Computes the gradient of the inputs, by the formula of
    /// [`NormOperations::layer_norm_backward_input`], from that of the values before the ReLU.
    fn group_norm_backward_input(
        &self,
        shape: &GroupNormShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Returns true if the device has [`NormOperations::group_norm_backward`].
    fn fuses_group_norm_backward(&self) -> bool {
        false
    }

    /// Computes the results of [`NormOperations::group_norm_position_sums`] and
    /// [`NormOperations::group_norm_backward_input`], with the same bits, from `gradient`, that of
    /// `output`, which is only read if the shape has a ReLU.
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    fn group_norm_backward(
        &self,
        _shape: &GroupNormShape,
        _input: Self::View<'_>,
        _weight: Self::View<'_>,
        _saved: Self::View<'_>,
        _output: Self::View<'_>,
        _gradient: Self::View<'_>,
        _sums: Self::ViewMut<'_>,
        _input_gradient: Self::ViewMut<'_>,
    ) {
        unreachable!("the device runs the parts of a group norm's backward pass one by one")
    }

    /// Computes `output = input · weight` for each vector, as long as `weight`. With the gradient as `input`,
    /// the output is the gradient of the inputs.
    fn scale_columns(&self, input: Self::View<'_>, weight: Self::View<'_>, output: Self::ViewMut<'_>);

    /// Adds up the gradient of the weight, `input` times `gradient`, over vectors of `columns` values.
    fn scale_columns_backward_weight(
        &self,
        columns: usize,
        input: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: RowSums<Self::ViewMut<'_>>,
    );
}
