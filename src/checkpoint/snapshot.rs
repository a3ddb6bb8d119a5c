//! The copy of a run's state that is written while the run goes on.

use std::ops::Range;

use super::Description;
use crate::Result;
use crate::memory::Memory;
use crate::nn::TensorSpec;

/// The size of the smallest pages.
const PAGE: usize = 4096;

/// Values that are touched between two signs of life.
const TOLD: usize = 1 << 24;

/// One tensor of the file.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// The group: `model`, or `optimizer/SLOT`.
    pub(super) group: String,
    /// The tensor's name in the model.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Where its values lie in the snapshot.
    pub(super) range: Range<usize>,
}

/// The group of the model's tensors (`slot` is `None`), or of what the optimizer keeps under the name `slot`.
pub fn group_name(slot: Option<&str>) -> String {
    slot.map_or_else(|| "model".to_owned(), |slot| format!("optimizer/{slot}"))
}

/// Whole tensors in the memory of rank 0: first the model's, then those of each slot of the optimizer.
pub struct Snapshot {
    /// What the file will say about itself.
    pub description: Description,
    entries: Vec<Entry>,
    values: Memory<f32>,
    num_tensors: usize,
}

impl Snapshot {
    /// Memory for `tensors`, and for each of them in every one of `slots`. Not collective.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn new(tensors: &[TensorSpec], slots: &[&str]) -> Result<Snapshot> {
        let groups = std::iter::once(None).chain(slots.iter().copied().map(Some)).map(group_name);
        let mut entries = Vec::new();
        let mut end = 0;
        for group in groups {
            for TensorSpec { name, shape, .. } in tensors {
                let start = end;
                end += shape.iter().product::<usize>();
                let (group, name, shape) = (group.clone(), name.clone(), shape.clone());
                entries.push(Entry { group, name, shape, range: start..end });
            }
        }
        let values = Memory::zeroed(end)?;
        Ok(Snapshot { description: Description::default(), entries, values, num_tensors: tensors.len() })
    }

    /// Writes to every page of the memory, so that filling it for the first time takes no longer than later: until then the system has
    /// only promised it. Tells `told` now and then. Not collective.
    pub(super) fn touch(&mut self, told: &mut dyn FnMut()) {
        for block in self.values.chunks_mut(TOLD) {
            block.iter_mut().step_by(PAGE / size_of::<f32>()).for_each(|value| *value = 0.0);
            told();
        }
    }

    /// The values of tensor `number` of the model (`slot` is `None`) or of a slot, to fill in.
    pub fn tensor_mut(&mut self, slot: Option<usize>, number: usize) -> &mut [f32] {
        let section = slot.map_or(0, |slot| slot + 1);
        let range = self.entries[section * self.num_tensors + number].range.clone();
        &mut self.values[range]
    }

    /// The tensors in the order of the file.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The values of a tensor.
    pub(super) fn values(&self, entry: &Entry) -> &[f32] {
        &self.values[entry.range.clone()]
    }
}
