//! Data parallelism: every rank holds the whole model and works on its share of each batch; before the update the
//! gradients are summed over the ranks. (Each rank's gradients are already divided by the number of rows of the *global*
//! batch, so the sum is the mean, whatever the shares.)
//!
//! Gradients travel in buckets, in the order that the backward pass completes them, while it goes on with earlier layers.
//! Two ways lead from a complete bucket to new parameters:
//!
//! * *all-reduce*: the bucket is summed on every rank, and every rank updates all of it;
//! * *reduce-scatter*: rank r gets the sum of part r only, updates that part with the optimizer state that it alone keeps,
//!   and an all-gather brings the new parameters to all. The traffic is the same, the update's work and the optimizer's
//!   memory are divided by the number of ranks (Rajbhandari et al., "ZeRO", SC 2020, stage 1).
//!
//! Invariants: buckets are started and finished in the same order on every rank, reductions and gathers each on a
//! communicator of their own, so that no timing can pair the wrong messages; a bucket's parameters change only after the
//! backward pass has left all its layers; the sums have a fixed order, so every rank gets the same bits in every run.

mod flight;
mod slots;

use clap::ValueEnum;

use self::flight::{Bucket, State};
use super::bucket::buckets;
use super::settle;
use crate::Result;
use crate::comm::{Communicator, Grid, Operation};
use crate::device::{Device, Role, totals};
use crate::nn::{FlatBuffer, Segmentation, TensorShard};
use crate::optim::{Optimizer, OptimizerSettings, Update, clip_factor};
use crate::trace::{self, Name};

/// The way from a bucket of gradients to new parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Reduction {
    /// Sum on every rank, update on every rank.
    #[value(name = "all-reduce")]
    AllReduce,
    /// Sum and update each part on one rank, then gather.
    #[value(name = "reduce-scatter")]
    ReduceScatter,
}

/// How gradients are brought together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyncSettings {
    /// The largest bucket, in bytes.
    pub bucket_bytes: usize,
    /// The way from a bucket to new parameters; `None` for the faster.
    pub reduction: Option<Reduction>,
    /// Communicate while the backward pass goes on.
    pub overlap: bool,
    /// Clip the gradient to this norm.
    pub clip_norm: Option<f64>,
}

/// Below this many parameters a rank, the latency of a message outweighs its bytes, and one operation beats two with the update between
/// them.
const SMALL_PART: usize = 1 << 16;

/// Shards begin on a cache line.
const SHARD_MULTIPLE: usize = 32;

/// The communicators of a [`GradSync`], made before anything that can fail on one rank alone.
pub struct SyncChannels {
    reductions: Communicator,
    gathers: Communicator,
    norms: Communicator,
}

impl SyncChannels {
    /// For the replicas along the data axis of `grid`. Collective over the grid.
    pub fn new(grid: &Grid) -> SyncChannels {
        let Grid { data, all, .. } = grid;
        let own = || data.duplicate();
        SyncChannels { reductions: own(), gathers: own(), norms: all.duplicate() }
    }
}

/// The gradients of this rank's parameters over the data axis, from the backward pass to the update.
pub struct GradSync<D: Device> {
    reductions: Communicator,
    gathers: Communicator,
    norms: Communicator,
    reduction: Reduction,
    overlap: bool,
    clip_norm: Option<f64>,
    optimizer: Optimizer<D>,
    /// In the order in which the backward pass completes them.
    buckets: Vec<Bucket<D>>,
    /// How many buckets have been started, reduced (and updated unless clipping), and gathered.
    started: usize,
    reduced: usize,
    gathered: usize,
    update: Update,
    /// The number in the model of each of this rank's tensors.
    numbers: Vec<usize>,
    /// Sums of squares for clipping, [`totals::LEN`] elements for each of this rank's tensors.
    clip_sums: D::Buffer,
    squares: Vec<f64>,
}

impl<D: Device> GradSync<D> {
    /// Prepares to train `tensors`, this rank's, each with its number in a model of `num_tensors`. Returns also how parameters
    /// and gradients must be segmented. Not collective.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(
        device: &D,
        tensors: &[(usize, TensorShard)],
        num_tensors: usize,
        channels: SyncChannels,
        settings: SyncSettings,
        optimizer: OptimizerSettings,
    ) -> Result<(GradSync<D>, Segmentation)> {
        let SyncChannels { reductions, gathers, norms } = channels;
        let size = reductions.size();
        let lengths: Vec<usize> = tensors.iter().map(|(_, shard)| shard.num_elements()).collect();
        let segments = buckets(&lengths, settings.bucket_bytes / size_of::<f32>());
        let faster = if lengths.iter().sum::<usize>() / size < SMALL_PART {
            Reduction::AllReduce
        } else {
            Reduction::ReduceScatter
        };
        let reduction = settings.reduction.unwrap_or(faster);
        let parts = if reduction == Reduction::ReduceScatter { size } else { 1 };
        let multiple = parts * SHARD_MULTIPLE;

        let mut all = Vec::new();
        for (segment, tensors) in segments.iter().enumerate() {
            let len = Segmentation::padded_len(&lengths[tensors.clone()], multiple);
            let part = len / parts;
            let rank = if parts == 1 { 0 } else { reductions.rank() };
            all.push(Bucket {
                segment,
                first_tensor: tensors.start,
                owned: rank * part..(rank + 1) * part,
                state: State::Idle,
            });
        }
        let owned = all.iter().map(|bucket| bucket.owned.len()).collect();
        all.reverse();
        let sync = GradSync {
            reductions,
            gathers,
            norms,
            reduction,
            overlap: settings.overlap,
            clip_norm: settings.clip_norm,
            optimizer: Optimizer::new(device, optimizer, owned)?,
            buckets: all,
            started: 0,
            reduced: 0,
            gathered: 0,
            update: Update { number: 0, learning_rate: 0.0, gradient_scale: 1.0 },
            numbers: tensors.iter().map(|(number, _)| *number).collect(),
            clip_sums: device.allocate(totals::LEN * tensors.len(), Role::Exact)?,
            squares: vec![0.0; num_tensors],
        };
        Ok((sync, Segmentation { segments, multiple }))
    }

    /// True if a step starts the same operations each time: one rank, and no norm that the host looks at in between.
    pub fn repeats(&self) -> bool {
        self.reductions.size() == 1 && self.clip_norm.is_none()
    }

    /// The way from a bucket to new parameters that was chosen.
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// True if this rank's share of the squares that the optimizer adds up is to be counted: with an all-reduce every rank
    /// sees all gradients, and one must speak for them.
    pub fn counts_squares(&self) -> bool {
        self.reduction == Reduction::ReduceScatter || self.reductions.is_root()
    }

    /// Gives every rank the parameters of rank 0, and sends a step's messages once, all of them at the same time: whatever
    /// memory and connections they ever need are there from now on. Collective.
    ///
    /// # Errors
    /// There is no memory for the messages.
    pub fn start(
        &mut self,
        device: &D,
        parameters: &mut FlatBuffer<D>,
        gradients: &mut FlatBuffer<D>,
    ) -> Result<()> {
        if self.reductions.size() > 1 {
            for segment in 0..parameters.num_segments() {
                let values = self.reductions.start_broadcast(parameters.take(segment), 0)?.wait();
                parameters.put(segment, values);
            }
        }
        self.begin(device, 0, 0.0)?;
        while self.started < self.buckets.len() {
            self.start_next(gradients)?;
        }
        for bucket in &mut self.buckets {
            bucket.put_sum(gradients);
        }
        for index in 0..self.buckets.len() {
            self.start_gather(index, parameters)?;
        }
        while self.gathered < self.buckets.len() {
            self.finish_gather(parameters);
        }
        Ok(())
    }

    /// Begins a step. Not collective.
    ///
    /// # Errors
    /// The pending to the device failed.
    pub fn begin(&mut self, device: &D, number: u64, learning_rate: f64) -> Result<()> {
        self.update = Update { number, learning_rate, gradient_scale: 1.0 };
        (self.started, self.reduced, self.gathered) = (0, 0, 0);
        self.optimizer.begin(device, &self.update)
    }

    /// The gradients of all tensors from `first_tensor` on are complete: sends what can go, lets what is under way move on,
    /// and updates what has arrived. Collective, but without waiting for anyone.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn completed(
        &mut self,
        device: &D,
        first_tensor: usize,
        parameters: &mut FlatBuffer<D>,
        gradients: &mut FlatBuffer<D>,
        sums: &mut D::Buffer,
    ) -> Result<()> {
        if !self.overlap {
            return Ok(());
        }
        while self.started < self.buckets.len() && self.buckets[self.started].first_tensor >= first_tensor {
            self.start_next(gradients)?;
        }
        while self.reduced < self.started && self.buckets[self.reduced].state.test() {
            self.finish_reduction(device, parameters, gradients, sums)?;
        }
        while self.gathered < self.reduced
            && self.clip_norm.is_none()
            && self.buckets[self.gathered].state.test()
        {
            self.finish_gather(parameters);
        }
        Ok(())
    }

    /// Ends a step: waits for every bucket; parameters are new on every rank. Collective.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn finish(
        &mut self,
        device: &D,
        parameters: &mut FlatBuffer<D>,
        gradients: &mut FlatBuffer<D>,
        sums: &mut D::Buffer,
    ) -> Result<()> {
        while self.started < self.buckets.len() {
            self.start_next(gradients)?;
        }
        while self.reduced < self.buckets.len() {
            self.finish_reduction(device, parameters, gradients, sums)?;
        }
        if let Some(largest) = self.clip_norm {
            self.update.gradient_scale = clip_factor(self.norm(device, gradients)?, largest);
            self.optimizer.begin(device, &self.update)?;
            for index in 0..self.buckets.len() {
                self.update_bucket(device, index, parameters, gradients, sums)?;
            }
        }
        while self.gathered < self.buckets.len() {
            self.finish_gather(parameters);
        }
        Ok(())
    }

    fn start_next(&mut self, gradients: &mut FlatBuffer<D>) -> Result<()> {
        let bucket = &mut self.buckets[self.started];
        self.started += 1;
        if self.reductions.size() == 1 {
            return Ok(());
        }
        let values = gradients.take(bucket.segment);
        bucket.state = State::Reducing(match self.reduction {
            Reduction::ReduceScatter => self.reductions.start_reduce_scatter(values, Operation::Sum)?,
            Reduction::AllReduce => self.reductions.start_all_reduce_in_place(values, Operation::Sum)?,
        });
        Ok(())
    }

    fn finish_reduction(
        &mut self,
        device: &D,
        parameters: &mut FlatBuffer<D>,
        gradients: &mut FlatBuffer<D>,
        sums: &mut D::Buffer,
    ) -> Result<()> {
        let index = self.reduced;
        self.reduced += 1;
        self.buckets[index].put_sum(gradients);
        if self.clip_norm.is_none() {
            self.update_bucket(device, index, parameters, gradients, sums)?;
        }
        Ok(())
    }

    /// The optimizer's step on this rank's part of a bucket, and the start of the gather that spreads it.
    fn update_bucket(
        &mut self,
        device: &D,
        index: usize,
        parameters: &mut FlatBuffer<D>,
        gradients: &FlatBuffer<D>,
        sums: &mut D::Buffer,
    ) -> Result<()> {
        let bucket = &mut self.buckets[index];
        let (segment, owned) = (bucket.segment, bucket.owned.clone());
        let values = device.view_mut(parameters.segment_mut(segment), owned.clone());
        let gradient = device.view(gradients.segment(segment), owned);
        let sums = device.view_mut(sums, 0..totals::LEN);
        let span = trace::work(Name::Optimizer);
        self.optimizer.step(device, segment, values, gradient, sums);
        settle(device);
        drop(span);
        self.start_gather(index, parameters)
    }

    fn start_gather(&mut self, index: usize, parameters: &mut FlatBuffer<D>) -> Result<()> {
        if self.reduction == Reduction::ReduceScatter && self.reductions.size() > 1 {
            let bucket = &mut self.buckets[index];
            let values = parameters.take(bucket.segment);
            bucket.state = State::Gathering(self.gathers.start_all_gather_in_place(values)?);
        }
        Ok(())
    }

    fn finish_gather(&mut self, parameters: &mut FlatBuffer<D>) {
        let bucket = &mut self.buckets[self.gathered];
        self.gathered += 1;
        if let State::Gathering(pending) = std::mem::replace(&mut bucket.state, State::Idle) {
            parameters.put(bucket.segment, pending.wait());
        }
    }

    /// The norm of the whole gradient, every logical parameter counted once: tensor by tensor, in logical order, so that it has
    /// the same bits whichever stages the tensors are on. Collective over the grid.
    fn norm(&mut self, device: &D, gradients: &FlatBuffer<D>) -> Result<f64> {
        let len = totals::LEN * self.numbers.len();
        device.fill(device.view_mut(&mut self.clip_sums, 0..len), 0.0);
        for bucket in &self.buckets {
            for (tensor, range) in gradients.tensors_in(bucket.segment) {
                let owned = bucket.owned_of(&range);
                if !owned.is_empty() {
                    let owned = device.view(gradients.segment(bucket.segment), owned);
                    let at = totals::LEN * tensor;
                    device.sum_squares(owned, device.view_mut(&mut self.clip_sums, at..at + totals::LEN));
                }
            }
        }
        self.squares.fill(0.0);
        if self.counts_squares() {
            device.read(device.view(&self.clip_sums, 0..len), &mut |sums| {
                for (number, sums) in self.numbers.iter().zip(sums.chunks_exact(totals::LEN)) {
                    self.squares[*number] = f64::from(sums[totals::GRADIENT_SQUARES]);
                }
                Ok(())
            })?;
        }
        self.norms.all_reduce(&mut self.squares, Operation::Sum)?;
        Ok(self.squares.iter().sum::<f64>().sqrt())
    }
}
