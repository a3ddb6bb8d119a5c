//! [`Snapshot`]: the copy of a run's state that is written while training continues.

use std::ops::Range;

use super::Description;
use crate::Result;
use crate::memory::Memory;
use crate::nn::TensorSpec;

/// The size of the smallest pages.
const PAGE: usize = 4096;

/// The number of values that are touched between two reports of progress.
const REPORTED: usize = 1 << 24;

/// A tensor of the file and its place in the snapshot.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    /// The group: `model`, or `optimizer/SLOT`.
    pub(super) group: String,
    /// The tensor's name in the model.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// The range of its values in the snapshot.
    pub(super) range: Range<usize>,
}

/// Returns the group of the model's tensors (`slot` is `None`), or of the optimizer's slot `slot`.
pub fn group_name(slot: Option<&str>) -> String {
    slot.map_or_else(|| "model".to_owned(), |slot| format!("optimizer/{slot}"))
}

/// Whole tensors in the memory of rank 0: first the model's, then those of each slot of the
/// optimizer.
pub struct Snapshot {
    /// The attributes of the file.
    pub description: Description,
    entries: Vec<TensorEntry>,
    values: Memory<f32>,
    num_tensors: usize,
}

impl Snapshot {
    /// Allocates memory for `tensors`, and for each of them in every one of `slots`. Not
    /// collective.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new(tensors: &[TensorSpec], slots: &[&str]) -> Result<Snapshot> {
        let groups = std::iter::once(None).chain(slots.iter().copied().map(Some)).map(group_name);
        let mut entries = Vec::new();
        let mut end = 0;
        for group in groups {
            for TensorSpec { name, shape, .. } in tensors {
                let start = end;
                end += shape.iter().product::<usize>();
                let (group, name, shape) = (group.clone(), name.clone(), shape.clone());
                entries.push(TensorEntry { group, name, shape, range: start..end });
            }
        }
        let values = Memory::zeroed(end)?;
        Ok(Snapshot { description: Description::default(), entries, values, num_tensors: tensors.len() })
    }

    /// Writes to every page of the memory, which the system assigns only on the first write, so
    /// that the first snapshot takes no longer to fill than later ones. Calls `report` regularly.
    /// Not collective.
    pub(super) fn touch(&mut self, report: &mut dyn FnMut()) {
        for block in self.values.chunks_mut(REPORTED) {
            block.iter_mut().step_by(PAGE / size_of::<f32>()).for_each(|value| *value = 0.0);
            report();
        }
    }

    /// Returns the values of tensor `number` of the model (`slot` is `None`) or of a slot, to fill
    /// in.
    pub fn tensor_mut(&mut self, slot: Option<usize>, number: usize) -> &mut [f32] {
        let section = slot.map_or(0, |slot| slot + 1);
        let range = self.entries[section * self.num_tensors + number].range.clone();
        &mut self.values[range]
    }

    /// Returns the tensors in the order of the file.
    pub(super) fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// Returns the values of a tensor.
    pub(super) fn values(&self, entry: &TensorEntry) -> &[f32] {
        &self.values[entry.range.clone()]
    }
}
