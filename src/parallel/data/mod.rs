//! Data parallelism: the ranks along the data axis hold equal parameters, of the whole model or of
//! the same part of it, and each works on its shard of every batch; before the update the gradients
//! are summed over the axis. (Each rank's gradients are already divided by the number of rows of
//! the *global* batch, so the sum is the mean, whatever the shards.)
//!
//! Gradients are sent in buckets, in the order in which the backward pass completes them, while it
//! continues with earlier layers. A complete bucket becomes new parameters in one of two ways:
//!
//! * *all-reduce*: the bucket is summed on every rank, and every rank updates all of it;
//! * *reduce-scatter*: rank r gets the sum of part r only and updates that part with optimizer
//!   slots that it alone keeps, and an all-gather distributes the new parameters. The traffic is
//!   the same; the work of the update and the optimizer's memory are divided by the number of ranks
//!   (Rajbhandari et al., "ZeRO", SC 2020, stage 1).
//!
//! Invariants: buckets are started and finished in the same order on every rank, reductions on one
//! communicator and gathers on another, so that messages are matched correctly whatever the timing;
//! a bucket's parameters change only after the backward pass has left all its layers; the sums have
//! a fixed order, so every rank gets the same bits in every run.

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

/// The method that turns a bucket of gradients into new parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Reduction {
    /// Sum on every rank, update on every rank.
    #[value(name = "all-reduce")]
    AllReduce,
    /// Sum and update each part on one rank, then gather.
    #[value(name = "reduce-scatter")]
    ReduceScatter,
}

/// The settings of a [`GradSync`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyncSettings {
    /// The size of the largest bucket, in bytes.
    pub bucket_bytes: usize,
    /// The method that turns a bucket into new parameters; `None` for the faster one.
    pub reduction: Option<Reduction>,
    /// True to communicate during the backward pass.
    pub overlap: bool,
    /// The norm to which the gradient is clipped; `None` for no clipping.
    pub clip_norm: Option<f64>,
}

/// Below this many parameters per rank the latency of a message outweighs its bytes, and one
/// operation is faster than two with the update in between.
const SMALL_PART: usize = 1 << 16;

/// The length of every shard is a multiple of this many elements, so that shards begin on a cache
/// line.
const SHARD_MULTIPLE: usize = 32;

/// The communicators of a [`GradSync`], created before anything that can fail on one rank alone.
pub struct SyncChannels {
    reductions: Communicator,
    gathers: Communicator,
    norms: Communicator,
}

impl SyncChannels {
    /// Duplicates the communicators of the data axis and of all of `grid`. Collective over the
    /// grid.
    pub fn new(grid: &Grid) -> SyncChannels {
        let Grid { data, all, .. } = grid;
        let own = || data.duplicate();
        SyncChannels { reductions: own(), gathers: own(), norms: all.duplicate() }
    }
}

/// The arrays that a [`GradSync`] reads and writes.
pub struct SyncArrays<'a, D: Device> {
    /// The device of the arrays.
    pub device: &'a D,
    /// This rank's parameters.
    pub parameters: &'a mut FlatBuffer<D>,
    /// The gradients of the parameters.
    pub gradients: &'a mut FlatBuffer<D>,
    /// The sums of the step: see [`totals`].
    pub sums: &'a mut D::Buffer,
}

/// The reduction of this rank's gradients over the data axis, and the update of its parameters.
pub struct GradSync<D: Device> {
    reductions: Communicator,
    gathers: Communicator,
    norms: Communicator,
    reduction: Reduction,
    overlap: bool,
    clip_norm: Option<f64>,
    optimizer: Optimizer<D>,
    /// The buckets in the order in which the backward pass completes them.
    buckets: Vec<Bucket<D>>,
    /// The numbers of buckets that have been started, reduced (and updated unless clipping), and
    /// gathered.
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
    /// Prepares to train this rank's `tensors`, each with its number in a model of `num_tensors`.
    /// Also returns the segmentation of parameters and gradients. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
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

    /// Returns true if every step starts the same operations: on one rank, without a norm that the
    /// host reads in between.
    pub fn repeats(&self) -> bool {
        self.reductions.size() == 1 && self.clip_norm.is_none()
    }

    /// Returns the method that was chosen to turn a bucket into new parameters.
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// Returns true if the squares that this rank's optimizer sums count towards the norm: with an
    /// all-reduce every rank sums all of them, and only one may count.
    pub fn counts_squares(&self) -> bool {
        self.reduction == Reduction::ReduceScatter || self.reductions.is_root()
    }

    /// Gives every rank the parameters of rank 0, and sends all messages of a step once, at the
    /// same time, so that MPI allocates all memory and opens all connections that they need.
    /// Collective.
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
    /// The transfer to the device failed.
    pub fn begin(&mut self, device: &D, number: u64, learning_rate: f64) -> Result<()> {
        self.update = Update { number, learning_rate, gradient_scale: 1.0 };
        (self.started, self.reduced, self.gathered) = (0, 0, 0);
        self.optimizer.begin(device, &self.update)
    }

    /// Marks the gradients of all tensors from `first_tensor` on as complete: starts the buckets
    /// that are complete, advances those under way, and updates the parameters of those that have
    /// arrived. Collective, but waits for no other rank.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn completed(&mut self, first_tensor: usize, arrays: &mut SyncArrays<'_, D>) -> Result<()> {
        if !self.overlap {
            return Ok(());
        }
        while self.started < self.buckets.len() && self.buckets[self.started].first_tensor >= first_tensor {
            self.start_next(arrays.gradients)?;
        }
        while self.reduced < self.started && self.buckets[self.reduced].state.test() {
            self.finish_reduction(arrays)?;
        }
        while self.gathered < self.reduced
            && self.clip_norm.is_none()
            && self.buckets[self.gathered].state.test()
        {
            self.finish_gather(arrays.parameters);
        }
        Ok(())
    }

    /// Ends a step: waits for every bucket, after which every rank has the new parameters.
    /// Collective.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn finish(&mut self, arrays: &mut SyncArrays<'_, D>) -> Result<()> {
        while self.started < self.buckets.len() {
            self.start_next(arrays.gradients)?;
        }
        while self.reduced < self.buckets.len() {
            self.finish_reduction(arrays)?;
        }
        if let Some(largest) = self.clip_norm {
            self.update.gradient_scale = clip_factor(self.norm(arrays.device, arrays.gradients)?, largest);
            self.optimizer.begin(arrays.device, &self.update)?;
            for index in 0..self.buckets.len() {
                self.update_bucket(index, arrays)?;
            }
        }
        while self.gathered < self.buckets.len() {
            self.finish_gather(arrays.parameters);
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

    fn finish_reduction(&mut self, arrays: &mut SyncArrays<'_, D>) -> Result<()> {
        let index = self.reduced;
        self.reduced += 1;
        self.buckets[index].put_sum(arrays.gradients);
        if self.clip_norm.is_none() { self.update_bucket(index, arrays) } else { Ok(()) }
    }

    /// Updates this rank's part of a bucket, and starts the gather that distributes it.
    fn update_bucket(&mut self, index: usize, arrays: &mut SyncArrays<'_, D>) -> Result<()> {
        let SyncArrays { device, parameters, gradients, sums } = arrays;
        let bucket = &mut self.buckets[index];
        let (segment, owned) = (bucket.segment, bucket.owned.clone());
        let values = device.view_mut(parameters.segment_mut(segment), owned.clone());
        let gradient = device.view(gradients.segment(segment), owned);
        let sums = device.view_mut(sums, 0..totals::LEN);
        let span = trace::work(Name::Optimizer);
        self.optimizer.step(device, segment, values, gradient, sums);
        settle(*device);
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

    /// Returns the norm of the whole gradient, every logical parameter counted once: summed tensor
    /// by tensor, in logical order, so that its bits do not depend on the stages of the tensors.
    /// Collective over the grid.
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
