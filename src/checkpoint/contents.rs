//! [`Contents`]: what a checkpoint holds, and [`StateSource`], from which its values come.

use std::io;

use super::Description;
use crate::nn::TensorSpec;

/// A tensor of the file.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    /// The group: `model`, or `optimizer/SLOT`.
    pub(super) group: String,
    /// The tensor's name in the model.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
}

/// Returns the group of the model's tensors (`slot` is `None`), or of the optimizer's slot `slot`.
pub fn group_name(slot: Option<&str>) -> String {
    slot.map_or_else(|| "model".to_owned(), |slot| format!("optimizer/{slot}"))
}

/// The attributes and the tensors of a file, without values.
#[derive(Debug, Clone)]
pub struct Contents {
    /// The attributes of the file.
    pub description: Description,
    entries: Vec<TensorEntry>,
}

impl Contents {
    /// Lists `tensors`, then all of them again for each of `slots`.
    pub fn new(tensors: &[TensorSpec], slots: &[&str], description: Description) -> Contents {
        let groups = std::iter::once(None).chain(slots.iter().copied().map(Some)).map(group_name);
        let entry = |group: String, TensorSpec { name, shape, .. }: &TensorSpec| TensorEntry {
            group,
            name: name.clone(),
            shape: shape.clone(),
        };
        let entries = groups.flat_map(|group| tensors.iter().map(move |spec| entry(group.clone(), spec)));
        Contents { description, entries: entries.collect() }
    }

    /// Returns the tensors in the order of the file.
    pub(super) fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }
}

/// The values of a run's state.
pub trait StateSource {
    /// Calls `write` with all values of every tensor of the [`Contents`], tensor by tensor in their
    /// order. May be called again, after an error too. Not collective; does not use MPI.
    ///
    /// # Errors
    /// `write` failed, or the values cannot be had.
    fn read(&mut self, write: &mut dyn FnMut(&[f32]) -> io::Result<()>) -> io::Result<()>;

    /// Accepts that a [`Writer`](super::Writer) has ended with a checkpoint, whole or not, and reads no more.
    fn end(&mut self) {}
}
