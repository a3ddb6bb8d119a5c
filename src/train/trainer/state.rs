//! The state of a trainer, as checkpoints and checks read and overwrite it.

use xxhash_rust::xxh3::Xxh3;

use super::{Trainer, diverged};
use crate::Result;
use crate::comm::Operation;
use crate::device::Device;
use crate::nn::hash_values;
use crate::parallel::data::Reduction;
use crate::parallel::gather::Assembly;
use crate::parallel::pipeline::Weights;
use crate::parallel::replica;

impl<D: Device> Trainer<'_, D> {
    /// Overwrites tensor `number` of the model with `values`, on the ranks that hold a part of it.
    /// Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn set_tensor(&mut self, number: usize, values: &[f32]) -> Result<()> {
        for (local, (other, shard)) in self.layout.tensors.iter().enumerate() {
            if *other == number {
                let into = self.weights.parameters.tensor_mut(self.device, local);
                self.device.write(into, &mut |block| {
                    shard.extract(values, block);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Returns the names of the values that the optimizer keeps for each parameter.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.weights.sync.slot_names()
    }

    /// Overwrites tensor `number` of slot `slot` of the optimizer with `values`, on the ranks that
    /// hold a part of it. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn set_slot(&mut self, slot: usize, number: usize, values: &[f32]) -> Result<()> {
        let Weights { parameters, sync, .. } = &mut self.weights;
        for (local, (other, shard)) in self.layout.tensors.iter().enumerate() {
            if *other == number {
                let mut block = vec![0.0; shard.num_elements()];
                shard.extract(values, &mut block);
                sync.write_slot(self.device, parameters, slot, local, &block)?;
            }
        }
        Ok(())
    }

    /// Gathers the whole tensors of the model in `whole`, on rank 0. Collective.
    ///
    /// # Errors
    /// `whole` failed (rank 0 alone), or the transfer from the device did.
    pub fn assemble_parameters(&self, whole: &mut dyn Assembly) -> Result<()> {
        let read = |local, show: &mut dyn FnMut(&[f32]) -> Result<()>| {
            self.device.read(self.weights.parameters.tensor(self.device, local), show)
        };
        self.layout.gather(self.grid, 1, &read, whole)
    }

    /// Gathers the whole tensors of slot `slot` of the optimizer in `whole`, on rank 0. Collective.
    ///
    /// # Errors
    /// `whole` failed (rank 0 alone), or the transfer from the device did.
    pub fn assemble_slot(&self, slot: usize, whole: &mut dyn Assembly) -> Result<()> {
        let Weights { parameters, sync, .. } = &self.weights;
        let read = |local, show: &mut dyn FnMut(&[f32]) -> Result<()>| {
            sync.read_slot(self.device, parameters, slot, local, show)
        };
        self.layout.gather(self.grid, self.grid.shape.data, &read, whole)
    }

    /// Calls `look` on rank 0 with the number and the values of every whole tensor of the model, in
    /// logical order. Collective.
    ///
    /// # Errors
    /// `look` failed (rank 0 alone), or the transfer from the device did.
    pub fn gather_parameters(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.layout.look_at(self.grid, self.device, &self.weights.parameters, look)
    }

    /// Calls `look` on rank 0 with the number and the values of every whole tensor of the last
    /// step's gradients, in logical order; with [`Reduction::AllReduce`] they are the sums over the
    /// replicas. Collective.
    ///
    /// # Errors
    /// `look` failed (rank 0 alone), or the transfer from the device did.
    pub fn gather_gradients(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.layout.look_at(self.grid, self.device, &self.weights.gradients, look)
    }

    /// Returns a hash of the bits of all parameters of the model, on every rank: see
    /// [`Layout::digest`](crate::parallel::layout::Layout::digest). Collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self) -> Result<u128> {
        self.layout.digest(self.grid, self.device, &self.weights.parameters)
    }

    /// Checks that all replicas hold the same bits after step `step`: of the parameters, and of the
    /// optimizer's slots where every replica keeps all of them. Collective.
    ///
    /// # Errors
    /// The replicas differ: the same error on every rank, which names the replica that differs.
    pub fn check_replicas(&self, step: u64) -> Result<()> {
        let Weights { parameters, sync, .. } = &self.weights;
        let mut digest = parameters.digest(self.device)?;
        if sync.reduction() == Reduction::AllReduce {
            let mut hash = Xxh3::new();
            sync.look_at_slots(self.device, parameters, &mut |values| hash_values(&mut hash, values))?;
            digest ^= hash.digest128();
        }
        self.grid.all.agree(replica::check(&self.grid.data, digest, step))
    }

    /// Checks that all parameters are finite after the last step, number `step`. (For all earlier
    /// steps, the loss of the next step shows it.) Collective.
    ///
    /// # Errors
    /// A parameter is NaN or infinite: the same error on every rank.
    pub fn check_finite(&self, step: u64) -> Result<()> {
        let mut all_finite = [1_u8];
        let parameters = &self.weights.parameters;
        for tensor in 0..parameters.num_tensors() {
            self.device.read(parameters.tensor(self.device, tensor), &mut |values| {
                all_finite[0] &= u8::from(values.iter().all(|value| value.is_finite()));
                Ok(())
            })?;
        }
        self.grid.all.all_reduce(&mut all_finite, Operation::Min)?;
        if all_finite[0] == 1 { Ok(()) } else { Err(diverged(step, "a parameter is NaN or infinite")) }
    }
}
