//! The contract of a kind of layer, and the arrays of its passes.

use std::ops::Range;

use crate::device::{Activation, Device, DropoutMask, ParameterSums, Role, RowSums};
use crate::nn::Features;
use crate::nn::parameters::FlatBuffer;
use crate::sums::Section;

/// The sizes of a kind of layer, and its passes: see the methods of [`Layer`](super::Layer).
pub trait LayerPasses {
    /// Returns the name of the kind.
    fn name(&self) -> &'static str;

    /// Returns the number of input values per row.
    fn input_len(&self) -> usize;

    /// Returns the role of the layer's input: activations, or values that no format may round.
    fn input_role(&self) -> Role {
        Role::Activations
    }

    /// Returns the shape of one row of output.
    fn output(&self) -> Features;

    /// Returns the number of values per row that the forward pass saves for the backward pass.
    fn saved_len(&self) -> usize {
        0
    }

    /// Returns the approximate number of multiplications and additions of one row's forward pass.
    fn operations(&self) -> usize {
        self.input_len()
    }

    /// Returns true for a layer whose backward pass turns the gradient of its output into the gradient
    /// of its input in place.
    fn is_elementwise(&self) -> bool {
        false
    }

    /// Returns the activation that ends the layer, through which
    /// [`LayerPasses::backward_activation`] takes gradients in place.
    fn activation(&self) -> Activation {
        Activation::Identity
    }

    /// Returns true if [`LayerPasses::backward_activation`] changes the gradient.
    fn changes_gradient(&self) -> bool {
        self.activation() != Activation::Identity
    }

    /// Returns the way in which ranks share the layer.
    fn split_rule(&self) -> SplitRule {
        SplitRule::Replicated
    }

    /// Returns what the layer does with some of the positions of a sequence.
    fn position_rule(&self) -> PositionRule {
        PositionRule::Mixed
    }

    /// Returns the layer for the positions `own` of a sequence, at least one, if its rule lets it have some
    /// of them. Tensors with a row for each position have those of `own`.
    fn of_positions(&self, _own: Section) -> Self
    where
        Self: Sized + Clone,
    {
        self.clone()
    }

    /// Runs the forward pass for `rows ≥ 1` rows.
    /// `input` is `[rows, input_len]`, `saved` `[rows, saved_len]`, `output` `[rows, output().len()]`.
    fn forward<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    );

    /// Runs the forward pass of a layer to whose output, before its activation, another value is added: the
    /// second of `inputs`, `[rows, output().len()]`. It depends on no draws.
    fn forward_added<D: Device>(
        &self,
        _device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        _inputs: [D::View<'_>; 2],
        _saved: D::ViewMut<'_>,
        _output: D::ViewMut<'_>,
    ) {
        unreachable!("nothing is added to the output of the {} layer", self.name())
    }

    /// Returns true if the output at a position depends on no later position, and
    /// [`LayerPasses::forward_next`] computes it. A kind in which a position has a meaning, or reads
    /// others, has to implement that.
    fn continues(&self) -> bool {
        false
    }

    /// Runs the forward pass for positions of one sequence, of which earlier ones have been computed. The
    /// layer was built for a single position. Each output has the bits that a pass over all positions
    /// gives it.
    fn forward_next<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        next: NextPositions<'_, D>,
    ) {
        let NextPositions { positions, inputs, saved, outputs, .. } = next;
        self.forward(device, parameters, positions.len(), inputs, saved, outputs);
    }

    /// Turns the gradient of the output into what the other parts of the backward pass read, that of the
    /// values before the activation, unless the loss has: [`Tape::is_through_activation`]. With `sums`, also
    /// adds up the gradient of a bias that [`LayerPasses::backward_weight`] does not.
    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        if let Some((sums, section)) = sums {
            self.add_bias_gradient(device, tape, gradient, sums, section);
        }
    }

    /// Adds up the gradient of the bias that [`LayerPasses::backward_activation`] left out because it had no
    /// sums. The gradient is that of the values before the activation, and stays as it is.
    fn add_bias_gradient<D: Device>(
        &self,
        _device: &D,
        _tape: &Tape<'_, D>,
        _gradient: D::ViewMut<'_>,
        _sums: LayerSums<'_, D>,
        _section: Section,
    ) {
    }

    /// Adds up the gradient of the weight, and of the bias where it is formed together with it.
    fn backward_weight<D: Device>(
        &self,
        _device: &D,
        _micro_batches: &[TapedRows<'_, D>],
        _sums: LayerSums<'_, D>,
    ) {
    }

    /// Returns the number of values of a row that [`LayerPasses::sum_positions`] writes for a layer that
    /// adds up the gradients of its parameters from them, in place of [`LayerPasses::backward_weight`].
    fn position_sums_len(&self) -> usize {
        0
    }

    /// Returns true if [`LayerPasses::backward_fused`] runs the backward pass of `rows` rows on the device.
    fn fuses_backward<D: Device>(&self, _device: &D, _rows: usize) -> bool {
        false
    }

    /// Runs all parts of the backward pass, with the same bits. The gradient of `rows` is that of the output,
    /// or that before the activation if [`Tape::is_through_activation`].
    /// `position_sums` has room for the sums over positions, if the layer has them.
    fn backward_fused<D: Device>(
        &self,
        _device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: &TapedRows<'_, D>,
        _position_sums: Option<&mut D::Buffer>,
        _sums: LayerSums<'_, D>,
        _input_gradient: D::ViewMut<'_>,
    ) {
        unreachable!("the {} layer has a backward pass in parts", self.name())
    }

    /// Writes what the layer's positions, some of all, add to the gradients of all its parameters, for each
    /// row: an array `[tensors, rows, elements]` for each subtree of the sum over positions. Only for layers
    /// whose tensors all positions use, those of a sequence or of an image.
    fn sum_positions<D: Device>(&self, _device: &D, _rows: &TapedRows<'_, D>, _sums: D::ViewMut<'_>) {
        unreachable!("the layer has no parameters that positions share")
    }

    /// Adds up the gradients of all parameters from an array `[tensors, rows, elements]`, the sums of
    /// [`LayerPasses::sum_positions`] over all positions.
    fn add_position_sums<D: Device>(
        &self,
        _device: &D,
        _rows: &TapedRows<'_, D>,
        _position_sums: &mut D::Buffer,
        _sums: LayerSums<'_, D>,
    ) {
        unreachable!("the layer has no parameters that positions share")
    }

    /// Computes the gradient of the input, `[rows, input_len]`, from that of the output,
    /// `[rows, output().len()]`. Never called where that is computed in place, or where the input has no
    /// gradient.
    fn backward_input<D: Device>(
        &self,
        _device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        _tape: &Tape<'_, D>,
        _gradient: D::View<'_>,
        _input_gradient: D::ViewMut<'_>,
    ) {
        unreachable!("the {} layer computes no gradient of its input apart", self.name())
    }
}

/// The way in which the ranks of a tensor axis share a kind of layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitRule {
    /// Every rank has all of the layer, and computes the same bits.
    Replicated,
    /// Every rank has some of the outputs, or, after a layer that is split by outputs, some of the inputs.
    Features,
    /// Every rank has some of the groups of heads. The linear layer before is split by outputs, and that
    /// after by inputs.
    Heads,
    /// Every rank has the rows of some tokens.
    Vocabulary,
}

/// A kind of layer's use of the positions of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PositionRule {
    /// An output depends on several positions, or ranks that share the layer divide something else.
    Mixed,
    /// Each position is treated alike, with all parameters, if there are any.
    Alike,
    /// Each position has a row of the parameters.
    Row,
}

/// The numbers on which a training pass's random draws depend.
#[derive(Debug, Clone, Copy)]
pub struct Draws {
    /// The seed of the run.
    pub seed: u64,
    /// The number of the step.
    pub step: u32,
    /// The number of the first row of the pass among those of the batch.
    pub first_row: usize,
}

impl Draws {
    /// Returns the draws of layer number `number` of the model, for a dropout of `rate`.
    pub(super) fn mask(&self, rate: f32, number: usize) -> DropoutMask {
        DropoutMask { rate, seed: self.seed, step: self.step, module: number as u32 }
    }
}

/// The parameters of a layer.
pub struct LayerTensors<'a, D: Device> {
    pub(super) draws: Option<Draws>,
    pub(super) flat: &'a FlatBuffer<D>,
    pub(super) own: &'a Range<usize>,
}

impl<'a, D: Device> LayerTensors<'a, D> {
    /// Returns tensor number `number` of the layer.
    pub fn get(&self, device: &D, number: usize) -> D::View<'a> {
        self.flat.tensor(device, self.own.start + number)
    }

    /// Returns the elements `part` of tensor number `number` of the layer.
    pub fn get_part(&self, device: &D, number: usize, part: Range<usize>) -> D::View<'a> {
        self.flat.tensor_part(device, self.own.start + number, part)
    }
}

/// Positions of one sequence that follow those already computed, in the arrays of a layer that was built
/// for a single position: a row of an array is a position.
pub struct NextPositions<'a, D: Device> {
    /// The positions to compute.
    pub positions: Range<usize>,
    /// The layer's inputs at all positions up to these, `[positions.end, input_len]`.
    pub all_inputs: D::View<'a>,
    /// The layer's inputs at these positions, `[positions.len(), input_len]`.
    pub inputs: D::View<'a>,
    /// The values that the forward pass saves at these positions, `[positions.len(), saved_len]`.
    pub saved: D::ViewMut<'a>,
    /// The layer's outputs at these positions, `[positions.len(), output().len()]`.
    pub outputs: D::ViewMut<'a>,
}

/// The gradients of a layer's parameters.
pub struct LayerSums<'a, D: Device> {
    pub(super) flat: &'a mut FlatBuffer<D>,
    pub(super) own: &'a Range<usize>,
}

impl<D: Device> LayerSums<'_, D> {
    /// Returns the gradient of tensor number `number` of the layer, in which `rows` are added up.
    pub fn get(&mut self, device: &D, number: usize, rows: Section) -> RowSums<D::ViewMut<'_>> {
        self.flat.row_sums(device, self.own.start + number, rows)
    }

    /// Returns the gradients of the layer's first tensor, its weight, and, if it `has_bias`, of the second.
    pub fn of_weight_and_bias<'s>(
        &'s mut self,
        device: &'s D,
        has_bias: bool,
        rows: Section,
    ) -> WeightAndBias<'s, D> {
        WeightAndBias { device, flat: &mut *self.flat, weight: self.own.start, has_bias, rows }
    }
}

/// The gradients of a weight, tensor number `weight`, and of the bias that follows it.
pub struct WeightAndBias<'a, D: Device> {
    device: &'a D,
    flat: &'a mut FlatBuffer<D>,
    weight: usize,
    has_bias: bool,
    rows: Section,
}

impl<D: Device> ParameterSums<D> for WeightAndBias<'_, D> {
    fn weight<R>(&mut self, add: impl FnOnce(RowSums<D::ViewMut<'_>>) -> R) -> R {
        add(self.flat.row_sums(self.device, self.weight, self.rows))
    }

    fn bias<R>(&mut self, add: impl FnOnce(RowSums<D::ViewMut<'_>>) -> R) -> Option<R> {
        self.has_bias.then(|| add(self.flat.row_sums(self.device, self.weight + 1, self.rows)))
    }
}

/// The arrays of one layer's forward pass that its backward pass reads.
pub struct Tape<'a, D: Device> {
    /// The layer's input, `[rows, input_len]`.
    pub input: D::View<'a>,
    /// The values saved by the forward pass, `[rows, saved_len]`.
    pub saved: D::View<'a>,
    /// The layer's output, `[rows, output_len]`.
    pub output: D::View<'a>,
    /// The draws of the forward pass, unless it was an evaluation.
    pub draws: Option<Draws>,
    /// True if the loss has taken the gradient through the activation that ends the layer.
    pub is_through_activation: bool,
}

impl<'a, D: Device> Tape<'a, D> {
    /// Returns the arrays `input`, `saved` and `output` of a forward pass without draws.
    pub fn new(input: D::View<'a>, saved: D::View<'a>, output: D::View<'a>) -> Tape<'a, D> {
        Tape { input, saved, output, draws: None, is_through_activation: false }
    }

    /// Returns the activation through which the gradient has yet to be taken, of a layer that ends with
    /// `activation`.
    pub(super) fn remaining(&self, activation: Activation) -> Activation {
        if self.is_through_activation { Activation::Identity } else { activation }
    }

    /// Returns the array that the backward pass of `activation`, which ends the layer, reads.
    pub fn of_activation(&self, activation: Activation) -> D::View<'a> {
        if activation.saves() { self.saved } else { self.output }
    }
}

impl<D: Device> Clone for Tape<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Tape<'_, D> {}

/// The rows of a micro-batch, from which gradients of weights are computed.
pub struct TapedRows<'a, D: Device> {
    /// The arrays of the forward pass.
    pub tape: Tape<'a, D>,
    /// The gradient of the values before the activation, as
    /// [`Layer::backward_activation`](super::Layer::backward_activation) leaves it; for
    /// [`Layer::backward_fused`](super::Layer::backward_fused), that of the output, unless a value is added
    /// to it or the loss has taken it through the activation.
    pub gradient: D::View<'a>,
    /// The rows among those of the batch.
    pub section: Section,
}
