//! [`StateCopy`]: a rank's copy of the parts of the state that it provides.

use std::sync::Arc;

use crate::Result;
use crate::device::Device;
use crate::memory::Memory;
use crate::parallel::data::StateParts;
use crate::train::trainer::Trainer;

/// The size of the smallest pages.
const PAGE: usize = 4096;

/// The copy, batch by batch: those of the parameters, then those of each slot of the optimizer. The
/// values of a batch are in the order of its tensors.
pub(super) struct StateCopy {
    parts: Arc<StateParts>,
    rank: usize,
    /// The values of each batch, absent while they are sent.
    batches: Vec<Option<Memory<f32>>>,
}

impl StateCopy {
    /// Allocates memory for what `rank` provides of the parameters and of `num_slots` slots, and
    /// writes to every page of it, which the system assigns only then, so that the first copy takes
    /// no longer than later ones. Not collective.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn new(parts: &Arc<StateParts>, rank: usize, num_slots: usize) -> Result<StateCopy> {
        let mut batches = Vec::new();
        for _ in 0..=num_slots {
            for batch in 0..parts.batches().len() {
                let mut values = Memory::zeroed(parts.len_of(batch, rank))?;
                values.iter_mut().step_by(PAGE / size_of::<f32>()).for_each(|value| *value = 0.0);
                batches.push(Some(values));
            }
        }
        Ok(StateCopy { parts: Arc::clone(parts), rank, batches })
    }

    /// Copies the parts of the state. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub(super) fn fill<D: Device>(&mut self, trainer: &Trainer<'_, D>) -> Result<()> {
        let tensors = self.parts.batches();
        for (index, values) in self.batches.iter_mut().enumerate() {
            let Some(values) = values else { continue };
            let (slot, batch) = ((index / tensors.len()).checked_sub(1), index % tensors.len());
            let mut at = 0;
            for number in tensors[batch].clone() {
                if self.parts.part_of(number, self.rank).is_some() {
                    trainer.read_part(slot, number, &mut |part| {
                        values[at..at + part.len()].copy_from_slice(part);
                        at += part.len();
                        Ok(())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Returns the number of batches of all sections.
    pub(super) fn num_batches(&self) -> usize {
        self.batches.len()
    }

    /// Returns the values of a batch.
    pub(super) fn batch(&self, index: usize) -> Option<&[f32]> {
        self.batches[index].as_deref()
    }

    /// Takes the values of a batch, to be sent.
    pub(super) fn take(&mut self, index: usize) -> Option<Memory<f32>> {
        self.batches[index].take()
    }

    /// Returns the values of a batch after they were sent.
    pub(super) fn put(&mut self, index: usize, values: Memory<f32>) {
        self.batches[index] = Some(values);
    }
}
