//! [`MicroBatchSource`], the source of samples, and their loading into the arrays of a stage.

use crate::Result;
use crate::device::Device;
use crate::nn::Draws;
use crate::parallel::stage::{Activations, Stage};
use crate::parallel::tensor::exchange::here_mut;
use crate::sums::Section;

/// The source of the rows of micro-batches.
pub trait MicroBatchSource<D: Device> {
    /// Returns the rows of micro-batch `micro_batch` among those of the batch.
    fn section(&self, micro_batch: usize) -> Section;

    /// Returns the number of rows of micro-batch `micro_batch`.
    fn rows(&self, micro_batch: usize) -> usize {
        self.section(micro_batch).len()
    }

    /// Returns the numbers on which the random draws of a training pass of micro-batch `micro_batch`
    /// depend; none in an evaluation.
    fn draws(&self, micro_batch: usize) -> Option<Draws>;

    /// Begins a step of one micro-batch that is [repeated](crate::device::MemoryOperations::repeat): writes
    /// to `device` what differs between the steps, and returns true if [`load`](MicroBatchSource::load) can
    /// then be recorded.
    ///
    /// # Errors
    /// The device failed.
    fn begin_repeated(&mut self, _device: &D) -> Result<bool> {
        Ok(false)
    }

    /// Writes the inputs and targets of the rows of micro-batch `micro_batch`. Either of them is
    /// left out where its view is empty.
    ///
    /// # Errors
    /// A sample cannot be read.
    fn load(
        &mut self,
        device: &D,
        micro_batch: usize,
        inputs: D::ViewMut<'_>,
        targets: D::ViewMut<'_>,
    ) -> Result<()>;
}

/// Loads the samples of a micro-batch, its inputs in the first stage, its targets in the last, and sets
/// its draws.
pub(in crate::parallel) fn load<D: Device>(
    device: &D,
    stage: &Stage,
    micro_batch: usize,
    rows: usize,
    activations: &mut Activations<D>,
    source: &mut dyn MicroBatchSource<D>,
) -> Result<()> {
    activations.draws = source.draws(micro_batch);
    let inputs = if stage.index == 0 { rows * stage.input_width() } else { 0 };
    let targets = stage.head.as_ref().map_or(0, |head| rows * head.targets_per_row());
    if inputs + targets == 0 {
        return Ok(());
    }
    let (input, target_array) = activations.samples();
    let inputs = device.view_mut(here_mut(input), 0..inputs);
    source.load(device, micro_batch, inputs, device.view_mut(target_array, 0..targets))
}
