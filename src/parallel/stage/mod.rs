//! A stage: the consecutive layers that a rank runs, whole or as shards, and the passes through
//! them.
//!
//! The input of a stage is at *point* 0, the output of piece i at point i + 1; a piece that works
//! in place leaves two points in the same array. A forward pass fills the [`Activations`] of a
//! micro-batch. A backward pass reads them and fills a set of [`Gradients`], an array for each
//! point, so that the gradients of weights can be computed later; if they are computed in the same
//! pass, points share arrays ([`Stage::share_gradients`]). All arrays are allocated once, for the
//! largest number of rows. Between passes, the arrays at both ends may be in messages.
//!
//! Ranks may have some of the positions of sequences each. Values that are whole for one piece alone then lie
//! in an array that all of them share, and are gathered again where a gradient of weights needs them.
//!
//! A piece reads the point before it, or an earlier one, where branches begin. A point that
//! several pieces read has its gradient in parts: the first of the pieces, which a backward pass comes to
//! last, writes its own, and adds the others, which lie in arrays that nothing changes until then.

mod allocate;
mod arrays;
mod backward;
mod groups;
mod next;
mod observe;
mod points;
mod sharing;
mod weights;

#[cfg(test)]
mod test_networks;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use arrays::{Activations, Gradients, Inner, PieceGroup};
pub use backward::{BackwardContext, Pass};
pub use groups::RowWidths;
pub use observe::ObservedArray;
pub use weights::WeightRows;

use self::points::{AddedValue, Point, StageBuilder, StagePiece};
use super::tensor::cross_entropy::{ClassShare, LossArrays};
use super::tensor::division::FeatureDivision;
use super::tensor::exchange::{Exchanger, MessageLengths, here, here_mut};
use super::tensor::{LayerPart, Piece};
use crate::Result;
use crate::device::{Activation, Device, LossOutputs, LossShape, totals};
use crate::nn::{FlatBuffer, Loss, Model, SplitRule};
use crate::parallel::settle;
use crate::trace::{self, Name};

/// The loss after the last stage.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// The loss function.
    pub loss: Loss,
    /// The number of predictions of a row: 1, or one for each position of a sequence.
    pub predictions: usize,
    /// The number of outputs of a prediction that this rank has.
    pub outputs: usize,
    /// The classes that these are the logits of.
    pub share: ClassShare,
}

impl Head {
    /// Returns the loss after all outputs of `model`, whose sum over classes has one leaf.
    pub fn new(model: &Model) -> Head {
        let (predictions, outputs) = (model.num_predictions(), model.outputs_per_prediction());
        Head { loss: model.loss, predictions, outputs, share: ClassShare::one_leaf(outputs) }
    }

    /// Returns the loss after those outputs that a rank has of `share`.
    pub fn with_share(self, share: ClassShare) -> Head {
        Head { outputs: share.classes.len(), share, ..self }
    }

    /// Returns the number of outputs of a row.
    fn row_len(&self) -> usize {
        self.predictions * self.outputs
    }

    /// Returns the number of target values per row.
    pub fn targets_per_row(&self) -> usize {
        self.predictions * self.loss.num_targets(self.outputs)
    }
}

/// The layers of one stage, or this rank's shards of them.
#[derive(Debug, Clone)]
pub struct Stage {
    /// The number of the stage among all stages.
    pub index: usize,
    /// The range of the stage's tensors among the tensors of this rank.
    pub tensors: Range<usize>,
    /// The loss, in the last stage.
    pub head: Option<Head>,
    pieces: Vec<StagePiece>,
    /// The points before, between and after the pieces.
    points: Vec<Point>,
    /// The number of arrays of values.
    num_values: usize,
    /// The number of arrays of gradients.
    num_gradients: usize,
    /// The numbers of the arrays that transient points share: of values and of gradients.
    transient: Option<[usize; 2]>,
    /// The activation that ends the last layer, if the loss takes the gradient through it.
    loss_activation: Option<Activation>,
    /// True if the gradient of a value is gone after the pass of the piece that gives the value.
    shares_gradients: bool,
}

impl Stage {
    /// Creates stage `index` of `parts`, followed by `head` or another stage, with inputs of
    /// `width` values per row, after the pieces of `before`. Its tensors are numbered from
    /// `first_tensor` on.
    pub fn new(
        index: usize,
        before: Option<&LayerPart>,
        parts: &[LayerPart],
        width: usize,
        first_tensor: usize,
        head: Option<Head>,
    ) -> Stage {
        let mut builder = StageBuilder::new(width, parts.first().map_or(0, |part| part.number));
        if let Some(Piece::Exchange(exchange)) = before.and_then(|part| part.pieces.last()) {
            builder.points[0].num_gradient_sums = exchange.num_gradient_sums();
            builder.points[0].num_own_sums[1] = exchange.num_gradient_sums().min(exchange.num_own_sums);
        }
        let mut tensor = first_tensor;
        for part in parts {
            builder.add(part, tensor);
            tensor += part.tensors.len();
        }
        let (tensors, transient) = (first_tensor..tensor, builder.number_transients());
        let StageBuilder { pieces, points, num_values, num_gradients, .. } = builder;
        Stage {
            index,
            tensors,
            head,
            pieces,
            points,
            num_values,
            num_gradients,
            transient,
            loss_activation: None,
            shares_gradients: false,
        }
    }

    /// Lets the loss take the gradient through the activation that ends the last layer, if it can: on a GPU,
    /// that saves a pass over the gradient. The gradient of the outputs is then that before the activation.
    /// Only where no forward pass is repeated, because the loss reads what the
    /// activation saved.
    pub fn join_loss_and_activation(&mut self) {
        let takes = self.head.is_some_and(|head| head.loss.takes_activation() && head.share.sum.is_none());
        self.loss_activation = match self.pieces.last().map(|last| &last.piece) {
            Some(Piece::Layer(layer)) if takes => layer.activation_for_loss(),
            _ => None,
        };
    }

    /// Returns the number of pieces.
    pub fn num_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the numbers of the tensors of piece `at` among those of this rank.
    pub fn tensors_of(&self, at: usize) -> Range<usize> {
        match &self.pieces[at].piece {
            Piece::Layer(layer) => layer.tensors.clone(),
            Piece::Exchange(_) => 0..0,
        }
    }

    /// Returns the number of values of a row of inputs.
    pub fn input_width(&self) -> usize {
        self.points[0].width
    }

    /// Returns the number of values of a row of outputs.
    pub fn output_width(&self) -> usize {
        self.points[self.pieces.len()].width
    }

    /// Returns the most inputs and outputs of a row of a linear layer.
    pub fn widest_product(&self) -> usize {
        let widths = self.pieces.iter().map(|piece| match &piece.piece {
            Piece::Layer(layer) if layer.split_rule() == SplitRule::Features => {
                layer.input_len() + layer.output_len()
            }
            _ => 0,
        });
        widths.max().unwrap_or_default()
    }

    /// Returns the most values in a message of each kind of exchange of `rows` rows, with the division of
    /// features among the ranks.
    pub fn longest_messages(&self, rows: usize, features: FeatureDivision) -> MessageLengths {
        let head = self.head.as_ref().map(|head| head.share.message_lens(rows, features));
        let [statistics, exponentials] = head.unwrap_or_default();
        let of_loss = MessageLengths { statistics, exponentials, ..MessageLengths::default() };
        let lengths = self.pieces.iter().map(|piece| match &piece.piece {
            Piece::Exchange(exchange) => exchange.message_lengths(rows),
            Piece::Layer(_) => {
                let position_sums = piece.position_sums.map_or(0, |sum| sum.sums_len(rows));
                MessageLengths { position_sums, ..MessageLengths::default() }
            }
        });
        lengths.fold(of_loss, MessageLengths::max)
    }

    /// Runs the forward pass of piece `at` for `rows` rows: from the values at point `at` to
    /// those at `at + 1`. Does nothing for 0 rows. Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn forward_piece<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        parameters: &FlatBuffer<D>,
        at: usize,
        rows: usize,
        activations: &mut Activations<D>,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let Activations { values, saved, draws, .. } = activations;
        let StagePiece { piece, layer: number, input, added, .. } = &self.pieces[at];
        let (before, after) = (&self.points[*input], &self.points[at + 1]);
        let (from, into) = (before.value, after.value);
        let (mut input, mut output) = (values[from].take(), values[into].take());
        match piece {
            Piece::Layer(layer) => {
                let _span = trace::work(Name::Layer).layer(*number);
                let device = exchanger.device;
                let saved = device.view_mut(here_mut(&mut saved[at]), 0..rows * layer.saved_len());
                let len = rows * after.width * after.num_value_sums;
                let read = device.view(here(&input), 0..rows * before.width);
                let into = device.view_mut(here_mut(&mut output), 0..len);
                match added {
                    _ if layer.is_idle() => {}
                    None => layer.forward(device, parameters, *draws, rows, read, saved, into),
                    Some(AddedValue { point, .. }) => {
                        let added = here(&values[self.points[*point].value]);
                        let inputs = [read, device.view(added, 0..len)];
                        layer.forward_added(device, parameters, rows, inputs, saved, into);
                    }
                }
                settle(device);
            }
            Piece::Exchange(exchange) => exchanger.forward(*exchange, 0..rows, &mut input, &mut output)?,
        }
        // a piece that works in place has only `input`
        if output.is_some() {
            values[into] = output;
        }
        if input.is_some() {
            values[from] = input;
        }
        Ok(())
    }

    /// Adds the loss of the outputs to `sums`, and writes its gradient, times `scale`, as the
    /// gradient of the outputs, or of the values before their activation: see
    /// [`Stage::join_loss_and_activation`]. Only in the last stage, and for at least one row. Collective
    /// over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn loss<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        rows: usize,
        scale: f32,
        activations: &Activations<D>,
        gradients: &mut Gradients<D>,
        sums: &mut D::Buffer,
    ) -> Result<()> {
        let head = self.head.as_ref().expect("the loss is evaluated in the last stage");
        let (num_predictions, scale) = (rows * head.predictions, scale / head.predictions as f32);
        let classes = head.share.classes;
        let shape = LossShape { rows: num_predictions, columns: head.outputs, scale, classes };
        let logits = here(&activations.values[activations.output]);
        let (labels, gradient) = (&activations.targets, here_mut(gradients.output()));
        if let Some(sum) = head.share.sum {
            let arrays = LossArrays { logits, labels, gradient, totals: sums };
            return exchanger.cross_entropy(sum, rows, &shape, arrays);
        }
        let device = exchanger.device;
        let values = device.view(logits, 0..rows * head.row_len());
        // nobody reads the gradient of an evaluation
        let activation = self.loss_activation.filter(|_| scale != 0.0).map(|activation| {
            let tape = self.tape(device, self.pieces.len() - 1, 0..rows, activations);
            (activation, tape.of_activation(activation))
        });
        let outputs = LossOutputs { values, activation };
        let targets = device.view(labels, 0..rows * head.targets_per_row());
        let gradient = device.view_mut(gradient, 0..rows * head.row_len());
        let sums = device.view_mut(sums, 0..totals::LEN);
        head.loss.evaluate_through(device, &shape, outputs, targets, gradient, sums);
        Ok(())
    }
}
