//! [`LayerPart`], what a rank has of a layer.

use super::exchange::Exchange;
use crate::nn::{Layer, LayerInputs, TensorShard};

/// One operation of a pass on a rank.
#[derive(Debug, Clone)]
pub enum Piece {
    /// A layer, or a shard of one.
    Layer(Layer),
    /// An exchange with the other ranks of the tensor axis.
    Exchange(Exchange),
}

/// A rank's shard of one layer of the model.
#[derive(Debug, Clone)]
pub struct LayerPart {
    /// The number of the layer in the model.
    pub number: usize,
    /// The values that the layer reads.
    pub inputs: LayerInputs,
    /// The operations, in order, of which the first reads the layer's input. A layer among them numbers
    /// its tensors from 0.
    pub pieces: Vec<Piece>,
    /// The tensors of the shard, each with its number in the model.
    pub tensors: Vec<(usize, TensorShard)>,
    /// The sum over the ranks of what positions add to the gradients of the tensors, if ranks have some of
    /// the positions each and all have the tensors.
    pub position_sums: Option<Exchange>,
}
