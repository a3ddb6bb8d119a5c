//! The state of a trainer, as checkpoints and checks read and overwrite it.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::{Trainer, diverged};
use crate::device::Device;
use crate::nn::hash_values;
use crate::parallel::data::{StateParts, Visit};
use crate::parallel::replica;
use crate::parallel::watch::BitFold;
use crate::parallel::zero::ZeroStage;
use crate::{Error, Result};

impl<D: Device> Trainer<'_, D> {
    /// Overwrites tensor `number` of the model (`slot` is `None`) or of a slot of the optimizer with
    /// `values`, on the ranks that hold a part of it. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn write_part(&mut self, slot: Option<usize>, number: usize, values: &[f32]) -> Result<()> {
        for (local, (other, shard)) in self.layout.tensors.iter().enumerate() {
            if *other == number {
                let mut block = vec![0.0; shard.num_elements()];
                shard.extract(values, &mut block);
                match slot {
                    None => self.weights.write_parameter(self.device, local, &block)?,
                    Some(slot) => self.weights.write_slot(self.device, slot, local, &block)?,
                }
            }
        }
        Ok(())
    }

    /// Returns the names of the values that the optimizer keeps for each parameter.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.weights.slot_names()
    }

    /// Calls `show` with the part of tensor `number` of the model (`slot` is `None`) or of a slot of
    /// the optimizer that this rank provides: see [`StateParts`]. Not collective.
    ///
    /// # Errors
    /// `show` failed, or the transfer from the device did.
    pub fn read_part(&self, slot: Option<usize>, number: usize, show: &mut Visit<'_>) -> Result<()> {
        let local = self.layout.tensors.iter().position(|(other, _)| *other == number);
        match (local, slot) {
            (None, _) => show(&[]),
            (Some(local), None) => self.weights.read_parameter(self.device, local, show),
            (Some(local), Some(slot)) => self.weights.read_slot(self.device, slot, local, show),
        }
    }

    /// Returns the ranks that provide each tensor.
    pub fn parts(&self) -> &Arc<StateParts> {
        &self.parts
    }

    /// Calls `look` on rank 0 with the number and the values of every whole tensor of the model, in
    /// logical order. Collective.
    ///
    /// # Errors
    /// `look` failed (rank 0 alone), or the transfer from the device did.
    pub fn gather_parameters(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.parts.gather_on_root(self.grid, &|number, show| self.read_part(None, number, show), look)
    }

    /// Calls `look` on rank 0 with the number and the values of every whole tensor of the last
    /// step's gradients, in logical order, which are the sums over the replicas. In stage 0 of ZeRO
    /// only. Collective.
    ///
    /// # Errors
    /// `look` failed (rank 0 alone), or the transfer from the device did.
    pub fn gather_gradients(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let read = |number, show: &mut Visit<'_>| match self
            .layout
            .tensors
            .iter()
            .position(|(other, _)| *other == number)
        {
            Some(local) => self.weights.read_gradient(self.device, local, show),
            None => show(&[]),
        };
        self.parts.gather_on_root(self.grid, &read, look)
    }

    /// Returns a hash of the bits of all parameters of the model, on every rank: see
    /// [`StateParts::digest`]. Collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self) -> Result<u128> {
        self.parts.digest(self.grid, &|number, show| self.read_part(None, number, show))
    }

    /// Frees the memory that only passes need, so that whole tensors can be gathered in it; later
    /// passes allocate it again. Not collective.
    pub fn release(&mut self) {
        self.weights.release();
    }

    /// Checks that all replicas hold the same bits after step `step`: of the parameters and of the
    /// optimizer's slots, as far as every replica keeps all of them. Collective.
    ///
    /// # Errors
    /// The replicas differ: the same error on every rank, which names the replica that differs.
    pub fn check_replicas(&self, step: u64) -> Result<()> {
        let weights = &self.weights;
        if weights.has_parameters_in_parts() {
            return Ok(());
        }
        let mut digest = weights.parameters().digest(self.device)?;
        if weights.stage() == ZeroStage::None {
            let mut hash = Xxh3::new();
            weights.read_slots(self.device, &mut |values| hash_values(&mut hash, values))?;
            digest ^= hash.digest128();
        }
        let (shape, own) = (self.grid.shape, self.grid.shape.coordinates(self.grid.all.rank()));
        let ranks = |replica: usize| shape.rank(replica, own.1, own.2);
        let slots: &[&str] = if weights.stage() == ZeroStage::None { weights.slot_names() } else { &[] };
        let num_tensors = self.layout.tensors.len();
        let fold = |array: usize| {
            let mut fold = BitFold::default();
            let mut add = |values: &[f32]| {
                fold.add(values);
                Ok(())
            };
            let (slot, tensor) = ((array / num_tensors).checked_sub(1), array % num_tensors);
            match slot {
                None => self.device.read(weights.parameters().tensor(self.device, tensor), &mut add)?,
                Some(slot) => weights.read_kept_slot(self.device, slot, tensor, &mut add)?,
            }
            Ok(fold)
        };
        let name = |array: usize| {
            let tensor = &self.layout.tensors[array % num_tensors].1.spec.name;
            match (array / num_tensors).checked_sub(1) {
                None => tensor.clone(),
                Some(slot) => format!("{} of {tensor}", slots[slot]),
            }
        };
        let num_arrays = num_tensors * (1 + slots.len());
        let compared = replica::check(&self.grid.data, digest, step, &ranks, num_arrays, &fold, &name);
        self.grid.all.agree(Error::unless_alone(compared)?)
    }

    /// Checks that all parameters are finite after the last step, number `step`. (For all earlier
    /// steps, the loss of the next step shows it.) Collective.
    ///
    /// # Errors
    /// A parameter is NaN or infinite: the same error on every rank.
    pub fn check_finite(&self, step: u64) -> Result<()> {
        let mut is_finite = true;
        for tensor in 0..self.layout.tensors.len() {
            self.weights.read_parameter(self.device, tensor, &mut |values| {
                is_finite &= values.iter().all(|value| value.is_finite());
                Ok(())
            })?;
        }
        if self.grid.all.all_ranks(is_finite)? {
            Ok(())
        } else {
            Err(diverged(step, "a parameter is NaN or infinite"))
        }
    }
}
