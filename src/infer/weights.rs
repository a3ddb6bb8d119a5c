//! The weights of a network, as its file has them and as the device reads them.

use super::TrainedNetwork;
use crate::Result;
use crate::device::{Device, Role, WeightLayout};
use crate::nn::{FlatBuffer, LayerKind, Model, Segmentation};
use crate::parallel::tensor::{LayerPart, Piece};

/// A weight that is transposed when it is read: `[outputs, inputs]` in the file, `[inputs, outputs]` on
/// the device.
pub(super) struct TransposedWeight {
    /// The number of the tensor among those of all parts.
    tensor: usize,
    inputs: usize,
    outputs: usize,
}

/// Makes the linear layers of `parts` read their weights as `[inputs, outputs]`, and returns the weights. A
/// product of a single row then goes along the weight's memory, as vectors of outputs. An element of a
/// product has the same bits in either layout. A weight that is shared with an embedding stays as it is.
pub(super) fn transpose_weights(parts: &mut [LayerPart]) -> Vec<TransposedWeight> {
    let (mut transposed, mut first) = (Vec::new(), 0);
    for part in parts {
        for piece in &mut part.pieces {
            let Piece::Layer(layer) = piece else { continue };
            let (tensor, is_tied) = (first + layer.tensors.start, layer.is_tied());
            if let (LayerKind::Linear(linear), false) = (&mut layer.kind, is_tied)
                && linear.layout == WeightLayout::OutputsByInputs
            {
                linear.layout = WeightLayout::InputsByOutputs;
                let (inputs, outputs) = (linear.inputs, linear.outputs);
                transposed.push(TransposedWeight { tensor, inputs, outputs });
            }
        }
        first += part.tensors.len();
    }
    transposed
}

/// Reads the weights of `parts` of `model` from `trained`, those in `transposed` transposed. Not collective.
///
/// # Errors
/// A tensor cannot be read, or the device does not have enough memory.
pub(super) fn read_weights<D: Device>(
    device: &D,
    trained: &TrainedNetwork,
    model: &Model,
    parts: &[LayerPart],
    transposed: &[TransposedWeight],
) -> Result<FlatBuffer<D>> {
    let tensors = parts.iter().flat_map(|part| &part.tensors);
    let (numbers, shards): (Vec<usize>, Vec<_>) = tensors.cloned().unzip();
    let whole = Segmentation::whole(shards.len());
    let mut parameters = FlatBuffer::zeros(device, &shards, &whole, Role::Parameters)?;
    for (local, (number, shard)) in numbers.into_iter().zip(&shards).enumerate() {
        let values = trained.read(&model.tensors[number])?;
        let transposed = transposed.iter().find(|weight| weight.tensor == local);
        device.write(parameters.tensor_mut(device, local), &mut |block| {
            shard.extract(&values, block);
            if let Some(TransposedWeight { inputs, outputs, .. }) = transposed {
                let by_outputs = block.to_vec();
                for (input, row) in block.chunks_exact_mut(*outputs).enumerate() {
                    let column = by_outputs[input..].iter().step_by(*inputs);
                    row.iter_mut().zip(column).for_each(|(value, weight)| *value = *weight);
                }
            }
            Ok(())
        })?;
    }
    Ok(parameters)
}
