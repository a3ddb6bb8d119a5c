//! [`StateCopy`]: a rank's copy of the parts of the state that it provides.

use std::sync::Arc;

use crate::Result;
use crate::device::Device;
use crate::memory::Memory;
use crate::parallel::data::StateParts;
use crate::train::trainer::Trainer;

/// The size of the smallest pages.
const PAGE: usize = 4096;

/// The copy, bundle by bundle: those of the parameters, then those of each slot of the optimizer. The
/// values of a bundle are in the order of its tensors.
pub(super) struct StateCopy {
    parts: Arc<StateParts>,
    rank: usize,
    /// The values of each bundle, absent while they are sent.
    bundles: Vec<Option<Memory<f32>>>,
}

impl StateCopy {
    /// Allocates memory for what `rank` provides of the parameters and of `num_slots` slots, and
    /// writes to every page of it, which the system assigns only then, so that the first copy takes
    /// no longer than later ones. Not collective.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn new(parts: &Arc<StateParts>, rank: usize, num_slots: usize) -> Result<StateCopy> {
        let mut bundles = Vec::new();
        for _ in 0..=num_slots {
            for bundle in 0..parts.bundles().len() {
                let mut values = Memory::zeroed(parts.len_of(bundle, rank))?;
                values.iter_mut().step_by(PAGE / size_of::<f32>()).for_each(|value| *value = 0.0);
                bundles.push(Some(values));
            }
        }
        Ok(StateCopy { parts: Arc::clone(parts), rank, bundles })
    }

    /// Copies the parts of the state. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub(super) fn fill<D: Device>(&mut self, trainer: &Trainer<'_, D>) -> Result<()> {
        let tensors = self.parts.bundles();
        for (index, values) in self.bundles.iter_mut().enumerate() {
            let Some(values) = values else { continue };
            let (slot, bundle) = ((index / tensors.len()).checked_sub(1), index % tensors.len());
            let mut at = 0;
            for number in tensors[bundle].clone() {
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

    /// Returns the number of bundles of all sections.
    pub(super) fn num_bundles(&self) -> usize {
        self.bundles.len()
    }

    /// Returns the values of a bundle.
    pub(super) fn bundle(&self, index: usize) -> Option<&[f32]> {
        self.bundles[index].as_deref()
    }

    /// Takes the values of a bundle, to be sent.
    pub(super) fn take(&mut self, index: usize) -> Option<Memory<f32>> {
        self.bundles[index].take()
    }

    /// Returns the values of a bundle after they were sent.
    pub(super) fn put(&mut self, index: usize, values: Memory<f32>) {
        self.bundles[index] = Some(values);
    }
}
