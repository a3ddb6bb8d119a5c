//! Where samples come from, and where they go.

use crate::Result;
use crate::device::Device;
use crate::parallel::stage::{Activations, Stage};
use crate::parallel::tensor::exchange::here_mut;

/// Where the rows of micro-batches come from.
pub trait Source<D: Device> {
    /// The number of rows of micro-batch `micro_batch`.
    fn rows(&self, micro_batch: usize) -> usize;

    /// Puts the inputs and targets of these rows in their places; either is left out where it is empty.
    ///
    /// # Errors
    /// They cannot be read.
    fn load(
        &mut self,
        device: &D,
        micro_batch: usize,
        inputs: D::ViewMut<'_>,
        targets: D::ViewMut<'_>,
    ) -> Result<()>;
}

/// Puts the samples of a micro-batch where the first and the last stage want them.
pub(super) fn load<D: Device>(
    device: &D,
    stage: &Stage,
    micro_batch: usize,
    rows: usize,
    activations: &mut Activations<D>,
    source: &mut dyn Source<D>,
) -> Result<()> {
    let inputs = if stage.index == 0 { rows * stage.ends().0 } else { 0 };
    let targets = stage.head.as_ref().map_or(0, |head| rows * head.targets_per_row());
    if inputs + targets == 0 {
        return Ok(());
    }
    let (input, target_array) = activations.samples();
    let inputs = device.view_mut(here_mut(input), 0..inputs);
    source.load(device, micro_batch, inputs, device.view_mut(target_array, 0..targets))
}
