//! The state of a rank in training: its part of the model, how it comes there and how it is looked at. [`super::step`] has the steps.

use std::collections::HashMap;

use xxhash_rust::xxh3::Xxh3;

use super::feed::Resident;
use crate::comm::{Grid, Operation};
use crate::device::{Device, Role, totals};
use crate::nn::{FlatBuffer, Model, hash_values};
use crate::optim::OptimizerSettings;
use crate::parallel::data::{GradSync, Reduction, SyncChannels, SyncSettings};
use crate::parallel::layout::{Assembly, Layout, Plan};
use crate::parallel::pipeline::{Pipeline, PipelineChannels, Weights};
use crate::parallel::replica;
use crate::{Error, Result};

/// How a rank trains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainerSettings {
    /// The largest global batch, in samples.
    pub batch_size: usize,
    /// How gradients are brought together.
    pub sync: SyncSettings,
    /// How they become updates.
    pub optimizer: OptimizerSettings,
    /// Seed of the initial parameters.
    pub seed: u64,
}

/// A rank's part of a model in training.
pub struct Trainer<'a, D: Device> {
    pub(super) device: &'a D,
    pub(super) grid: &'a Grid,
    pub(super) model: &'a Model,
    pub(super) layout: Layout,
    pub(super) pipeline: Pipeline<'a, D>,
    pub(super) weights: Weights<D>,
    /// The most rows that a micro-batch has.
    pub(super) capacity: usize,
    /// Training samples that stay on the device.
    pub(super) resident: Option<Resident<D>>,
    /// Steps that the device can start again as one, by the number of samples.
    pub(super) recordings: HashMap<usize, Option<D::Recording>>,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Allocates everything that training needs, and gives every rank the initial parameters of the seed. Collective.
    ///
    /// # Errors
    /// `plan` does not fit the grid or the model, or the device has not enough memory.
    pub fn new(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        plan: &Plan,
        settings: TrainerSettings,
    ) -> Result<Trainer<'a, D>> {
        let channels = (SyncChannels::new(grid), PipelineChannels::new(grid));
        let trainer = Trainer::allocate(device, grid, model, plan, settings, channels);
        let mut trainer = grid.all.agree(trainer)?;
        let Weights { parameters, gradients, sync, .. } = &mut trainer.weights;
        sync.start(device, parameters, gradients)?;
        Ok(trainer)
    }

    fn allocate(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        plan: &Plan,
        settings: TrainerSettings,
        (sync_channels, pipeline_channels): (SyncChannels, PipelineChannels),
    ) -> Result<Trainer<'a, D>> {
        let layout = Layout::new(model, grid.shape, grid.all.rank(), plan)?;
        let (tensors, shards) = (&layout.tensors, layout.shards());
        let (sync, segmentation) = GradSync::new(
            device,
            tensors,
            model.tensors.len(),
            sync_channels,
            settings.sync,
            settings.optimizer,
        )?;
        let share = settings.batch_size.div_ceil(grid.data.size());
        let capacity = share.div_ceil(plan.schedule.num_micro_batches);
        let mut weights = Weights {
            parameters: FlatBuffer::zeros(device, &shards, &segmentation, Role::Parameters)?,
            gradients: FlatBuffer::zeros(device, &shards, &segmentation, Role::Exact)?,
            sync,
            sums: device.allocate(totals::LEN, Role::Exact)?,
        };
        weights.parameters.initialise(device, &shards, settings.seed)?;
        let pipeline =
            Pipeline::new(device, pipeline_channels, &layout, &plan.schedule, capacity, plan.recompute)?;
        let (resident, recordings) = (None, HashMap::new());
        Ok(Trainer { device, grid, model, layout, pipeline, weights, capacity, resident, recordings })
    }

    /// The way from gradients to new parameters that was chosen for this rank's.
    pub fn reduction(&self) -> Reduction {
        self.weights.sync.reduction()
    }

    /// The padded length of every bucket of this rank's gradients, in the order in which they travel.
    pub fn bucket_lengths(&self) -> Vec<usize> {
        let gradients = &self.weights.gradients;
        (0..gradients.num_segments()).rev().map(|segment| gradients.segment_len(segment)).collect()
    }

    /// This rank's parameters.
    pub fn parameters_mut(&mut self) -> &mut FlatBuffer<D> {
        &mut self.weights.parameters
    }

    /// Overwrites tensor `number` of the model, on the ranks that hold some of it, with `values`. Not collective.
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

    /// The names of what the optimizer keeps for each parameter.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.weights.sync.slot_names()
    }

    /// Overwrites tensor `number` of slot `slot` of the optimizer, as [`Trainer::set_tensor`].
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn set_slot(&mut self, slot: usize, number: usize, values: &[f32]) -> Result<()> {
        let Weights { parameters, sync, .. } = &mut self.weights;
        for (local, (other, shard)) in self.layout.tensors.iter().enumerate() {
            if *other == number {
                let mut block = vec![0.0; shard.num_elements()];
                shard.extract(values, &mut block);
                sync.write_slot(self.device, parameters, (slot, local), &block)?;
            }
        }
        Ok(())
    }

    /// Puts the whole tensors of the model together in `whole`, on rank 0. Collective.
    ///
    /// # Errors
    /// What `whole` returns (rank 0 alone).
    pub fn assemble_parameters(&self, whole: &mut dyn Assembly) -> Result<()> {
        let part = |local, show: &mut dyn FnMut(&[f32]) -> Result<()>| {
            self.device.read(self.weights.parameters.tensor(self.device, local), show)
        };
        self.layout.gather(self.grid, 1, &part, whole)
    }

    /// The same for slot `slot` of the optimizer. Collective.
    ///
    /// # Errors
    /// What `whole` returns (rank 0 alone).
    pub fn assemble_slot(&self, slot: usize, whole: &mut dyn Assembly) -> Result<()> {
        let Weights { parameters, sync, .. } = &self.weights;
        let part = |local, show: &mut dyn FnMut(&[f32]) -> Result<()>| {
            sync.read_slot(self.device, parameters, (slot, local), show)
        };
        self.layout.gather(self.grid, self.grid.shape.data, &part, whole)
    }

    /// Shows all whole tensors of the model to `look` on rank 0, in logical order, each with its number. Collective.
    ///
    /// # Errors
    /// What `look` returns (rank 0 alone).
    pub fn gather_parameters(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.layout.look_at(self.grid, self.device, &self.weights.parameters, look)
    }

    /// The same with the gradients of the last step; with [`Reduction::AllReduce`] they are the sums over the replicas.
    /// Collective.
    ///
    /// # Errors
    /// What `look` returns (rank 0 alone).
    pub fn gather_gradients(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.layout.look_at(self.grid, self.device, &self.weights.gradients, look)
    }

    /// A hash of the bits of all parameters of the model, on every rank: see [`Layout::digest`]. Collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self) -> Result<u128> {
        self.layout.digest(self.grid, self.device, &self.weights.parameters)
    }

    /// Checks that all replicas hold the same bits after step `step`: of the parameters, and of what the optimizer keeps where every
    /// replica keeps all of it. Collective.
    ///
    /// # Errors
    /// They do not: the same error on every rank, which names the one that differs.
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

    /// Checks that all parameters are finite after step `step`: the loss of a step says it of the step before. Collective.
    ///
    /// # Errors
    /// They are not: the same error on every rank.
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
        if all_finite[0] == 1 { Ok(()) } else { Err(diverged(step, "a parameter is no finite number")) }
    }
}

/// What every rank says when training has blown up at `step`, from 1.
pub(super) fn diverged(step: u64, what: &str) -> Error {
    let way_out = "try a smaller --learning-rate, --clip-norm 1, --warmup-steps or --standardise features";
    Error::on_every_rank(format!("step {step}"), format!("{what}; {way_out}"))
}
