//! Data parallelism (PyTorch's DDP and FSDP): the ranks along the data axis hold equal parameters, of the
//! whole model or of the same part of it, and each works on its leaves of every batch (see
//! [`BatchDivision`]); before the update the gradients are summed over the axis. (Each rank's gradients are
//! already divided by the number of rows of the *global* batch, so the sum is the mean, whatever the
//! division.)
//!
//! Gradients are sent in buckets, in the order in which the backward pass completes them, while it
//! continues with earlier layers. A complete bucket is summed on every rank, which updates all of
//! it, or reduce-scattered, after which every rank updates the part that it owns:
//! [`ZeroStage`] says which, and [`GradientSegments`] and [`ParameterSegments`] keep the memory.
//!
//! Invariants: buckets are started and finished in the same order on every rank, reductions on one
//! communicator and gathers on another, so that messages are matched correctly whatever the timing;
//! a bucket's parameters change only after the backward pass has left all its layers; the sums have
//! the order of [`crate::sums`], so every rank gets the bits of one rank alone.

mod gather;
mod parts;
mod plan;
mod runs;
mod settings;
mod state;
mod ties;
mod update;
mod watch;

use std::collections::VecDeque;
use std::ops::Range;

pub use self::gather::{ReadPart, Visit};
pub use self::parts::{ProvidedPart, StateParts};
pub use self::plan::StatePlan;
pub use self::runs::{UpdateRun, UpdateRuns};
pub use self::settings::{SyncSettings, WeightSettings};
use self::ties::Tie;
use super::batch::BatchDivision;
use super::layout::{Layout, TensorTie};
use super::watch::BlockWatch;
use super::zero::{
    Direction, GradientSegments, GradientUse, ParameterSegments, ParameterSettings, Partition, ZeroStage,
};
use crate::Result;
use crate::comm::{Channels, Communicator, Front, Operation, Pending};
use crate::device::{Device, Role, totals};
use crate::nn::FlatBuffer;
use crate::optim::{Optimizer, Update};
use crate::sums::Subtrees;

/// The parameters of a rank with their gradients, and everything that a step needs to reduce the gradients
/// and to update the parameters.
pub struct Weights<D: Device> {
    parameters: ParameterSegments<D>,
    gradients: GradientSegments<D>,
    /// The sums of the step: see [`totals`].
    sums: D::Buffer,
    /// The sums of elements that do not count.
    uncounted: D::Buffer,
    reductions: Communicator,
    norms: Communicator,
    tied: Communicator,
    /// The tensors that two layers use.
    ties: Vec<Tie<D>>,
    stage: ZeroStage,
    usage: GradientUse,
    overlap: bool,
    clip_norm: Option<f64>,
    optimizer: Optimizer<D>,
    partition: Partition,
    /// The buckets, which are the segments, in logical order.
    buckets: Vec<Bucket>,
    /// The reductions under way, oldest first.
    reducing: VecDeque<Reduction<D>>,
    update: Update,
    /// Sums of squares for clipping, one for each of this rank's tensors.
    squares: D::Buffer,
    /// For each tensor, whether it counts, for it is no copy.
    counts: Vec<bool>,
    runs: UpdateRuns,
    /// The blocks that an audit of the step looks at.
    watch: Option<BlockWatch>,
}

/// A bucket.
struct Bucket {
    tensors: Range<usize>,
    /// True if its reduction has been started since it was opened.
    is_started: bool,
}

/// The reduction of a bucket.
struct Reduction<D: Device> {
    segment: usize,
    micro_batch: usize,
    /// `None` on one rank alone.
    pending: Option<Pending<Front<D::Buffer>>>,
    /// True for the last reduction of the bucket in a step.
    is_last: bool,
}

impl<D: Device> Weights<D> {
    /// Allocates the memory for the tensors of `layout`, and fills the parameters with their initial
    /// values. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn new(
        device: &D,
        layout: &Layout,
        channels: &Channels,
        settings: WeightSettings,
    ) -> Result<Weights<D>> {
        let WeightSettings { sync, optimizer, division, gathering, seed } = settings;
        let Channels { reductions, gathers, norms, tied, .. } = channels.clone();
        let shards = layout.shards();
        let StatePlan { stage, segmentation, lengths, updated, usage, .. } =
            StatePlan::new(layout, sync, division);
        let partition = Partition::new(&lengths, reductions.rank(), reductions.size());
        let runs = UpdateRuns::new(&shards, &segmentation, &optimizer);
        let positions = segmentation.positions(&shards);
        let segment_of = |tensor: usize| positions[tensor].segment;
        let tie = |&TensorTie { tensor, other }: &TensorTie| {
            let segment = segment_of(tensor);
            Tie::new(device, segment, other, updated[segment], segment_of)
        };
        let ties = layout.ties.iter().map(tie).collect::<Result<_>>()?;
        let parameters = ParameterSettings { stage, gathering, seed };
        Ok(Weights {
            parameters: ParameterSegments::new(
                device,
                &shards,
                &segmentation,
                partition.clone(),
                gathers,
                parameters,
            )?,
            gradients: GradientSegments::new(device, &shards, &segmentation, partition.clone(), usage)?,
            sums: device.allocate(totals::LEN, Role::Exact)?,
            uncounted: device.allocate(totals::LEN, Role::Exact)?,
            reductions,
            norms,
            tied,
            ties,
            stage,
            usage,
            overlap: sync.overlap,
            clip_norm: sync.clip_norm,
            optimizer: Optimizer::new(device, optimizer, updated)?,
            partition,
            buckets: segmentation
                .segments
                .into_iter()
                .map(|tensors| Bucket { tensors, is_started: false })
                .collect(),
            reducing: VecDeque::new(),
            update: Update { number: 0, learning_rate: 0.0, gradient_scale: 1.0 },
            squares: device.allocate(device.squares_len() * shards.len(), Role::Exact)?,
            counts: shards.iter().map(|shard| !shard.is_copy).collect(),
            runs,
            watch: None,
        })
    }

    /// Returns true if every step starts the same operations: on one rank, without a norm that ranks add
    /// up in between.
    pub fn repeats(&self) -> bool {
        self.reductions.size() == 1 && (self.clip_norm.is_none() || self.norms.size() == 1)
    }

    /// Returns the stage of ZeRO that was chosen; [`ZeroStage::None`] if there is one replica.
    pub fn stage(&self) -> ZeroStage {
        self.stage
    }

    /// Returns the division of batches among replicas and micro-batches.
    pub fn division(&self) -> BatchDivision {
        self.usage.division
    }

    /// Returns the parameters, of which those that [`Weights::prepare`] was asked for are here.
    pub fn parameters(&self) -> &FlatBuffer<D> {
        self.parameters.flat()
    }

    /// Borrows the parameters to read, and the gradients to write, where [`Weights::prepare`] was
    /// asked for them.
    pub fn parameters_and_gradients(&mut self) -> (&FlatBuffer<D>, &mut FlatBuffer<D>) {
        (self.parameters.flat(), self.gradients.flat_mut())
    }

    /// Returns the gradients, of which in stage 0 all are the last step's sums over the replicas.
    pub fn gradients(&self) -> &FlatBuffer<D> {
        self.gradients.flat()
    }

    /// Returns the sums of the step: see [`totals`].
    pub fn sums_mut(&mut self) -> &mut D::Buffer {
        &mut self.sums
    }

    /// Makes every replica start with the same parameters, and sends all messages of a step once, as
    /// many at a time as a step may, so that MPI allocates all memory and opens all connections that
    /// they need. Collective.
    ///
    /// # Errors
    /// There is no memory for the messages.
    pub fn start(&mut self, device: &D) -> Result<()> {
        self.parameters.start(device)?;
        for segment in (0..self.buckets.len()).rev() {
            while !self.gradients.can_open(segment) && !self.reducing.is_empty() {
                self.discard_reduction();
            }
            self.gradients.open(device, segment)?;
            self.start_reduction(device, segment, self.usage.division.num_micro_batches() - 1, false)?;
        }
        while !self.reducing.is_empty() {
            self.discard_reduction();
        }
        Ok(())
    }

    /// Waits for the oldest reduction, whose sum is not used.
    fn discard_reduction(&mut self) {
        let Some(Reduction { segment, pending, .. }) = self.reducing.pop_front() else { return };
        if let Some(pending) = pending {
            self.gradients.put_back(segment, pending.wait().buffer);
        }
        self.gradients.close(segment);
    }

    /// Begins a step. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn begin(&mut self, device: &D, number: u64, learning_rate: f64) -> Result<()> {
        self.update = Update { number, learning_rate, gradient_scale: 1.0 };
        // nothing sends a bucket's new parameters, so the next layer's pass need not wait for its update
        if self.repeats() && self.clip_norm.is_none() && self.watch.is_none() {
            device.fork_steps();
        }
        self.buckets.iter_mut().for_each(|bucket| bucket.is_started = false);
        self.gradients.begin();
        self.optimizer.begin(device, &self.update)
    }

    /// Waits until the parameters of `tensors`, those of one layer, are here; a pass in `direction`
    /// through `stage`, the tensors of a pipeline stage, needs them. Collective over the replicas.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn prepare(
        &mut self,
        device: &D,
        tensors: &Range<usize>,
        stage: &Range<usize>,
        direction: Direction,
    ) -> Result<()> {
        self.parameters.bring(device, tensors, stage, direction)
    }

    /// Makes room for the gradients of `tensors`, those of one layer. Collective over the replicas.
    ///
    /// # Errors
    /// There is no memory for them or for messages.
    pub fn open(&mut self, device: &D, tensors: &Range<usize>) -> Result<()> {
        if !self.usage.is_pooled() || tensors.is_empty() {
            return Ok(());
        }
        let (segment, _) = self.gradients.flat().place(tensors.start);
        if self.gradients.is_open(segment) {
            return Ok(());
        }
        while !self.gradients.can_open(segment) && !self.reducing.is_empty() {
            self.finish_reduction(device)?;
        }
        self.gradients.open(device, segment)?;
        self.buckets[segment].is_started = false;
        Ok(())
    }

    /// Accepts that `micro_batch` has completed the gradients of `tensors`, the last ones of a
    /// pipeline stage; `is_last` is true if no other micro-batch will add to them. Starts the
    /// buckets that are complete, advances those under way, and updates the parameters of those
    /// that have arrived. Collective over the replicas, but waits for none of them if
    /// communication overlaps.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn completed(
        &mut self,
        device: &D,
        tensors: &Range<usize>,
        micro_batch: usize,
        is_last: bool,
    ) -> Result<()> {
        let division = self.usage.division;
        let is_wanted = is_last || division.reduces_each();
        if !is_wanted || !self.overlap && !self.usage.is_pooled() {
            return Ok(());
        }
        for segment in (0..self.buckets.len()).rev() {
            let Bucket { tensors: own, is_started } = &self.buckets[segment];
            let is_complete = own.start >= tensors.start && own.end <= tensors.end;
            if is_complete && !is_started && self.gradients.is_open(segment) {
                self.start_reduction(device, segment, micro_batch, is_last)?;
            }
        }
        while self.reducing.front_mut().is_some_and(|reduction| !self.overlap || reduction.test()) {
            self.finish_reduction(device)?;
        }
        Ok(())
    }

    /// Ends a step: waits for every bucket, after which every rank has its new parameters.
    /// Collective.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn finish(&mut self, device: &D) -> Result<()> {
        let last = self.usage.division.num_micro_batches() - 1;
        for segment in (0..self.buckets.len()).rev() {
            if !self.buckets[segment].is_started && self.gradients.is_open(segment) {
                self.start_reduction(device, segment, last, true)?;
            }
        }
        while !self.reducing.is_empty() {
            self.finish_reduction(device)?;
        }
        self.add_tied_gradients(device)?;
        match self.clip_norm {
            Some(largest) => self.clip(device, largest)?,
            None => self.update_tied_buckets(device)?,
        }
        device.join_steps();
        self.parameters.finish_updates();
        Ok(())
    }

    /// Frees the memory that only passes need; later passes allocate it again. Not collective.
    pub fn release(&mut self) {
        self.parameters.release();
        self.gradients.release();
    }

    fn start_reduction(
        &mut self,
        device: &D,
        segment: usize,
        micro_batch: usize,
        is_last: bool,
    ) -> Result<()> {
        self.buckets[segment].is_started = true;
        let subtrees = self.usage.division.canonical_subtrees(micro_batch);
        let num_sums = subtrees.map_or(1, Subtrees::most);
        self.watch_terms(device, segment, micro_batch, num_sums)?;
        let reductions =
            subtrees.map_or(self.reductions.clone(), |subtrees| self.reductions.with_subtrees(subtrees));
        let pending = match self.stage {
            _ if self.reductions.size() == 1 => None,
            ZeroStage::None => {
                let values = self.gradients.take(segment, num_sums);
                Some(reductions.start_all_reduce_in_place(values, Operation::Sum)?)
            }
            _ => {
                let values = self.gradients.take(segment, num_sums);
                Some(reductions.start_reduce_scatter(values, Operation::Sum)?)
            }
        };
        self.reducing.push_back(Reduction { segment, micro_batch, pending, is_last });
        Ok(())
    }

    /// Waits for the oldest reduction, and updates the parameters of its bucket unless that has to
    /// wait for the norm.
    fn finish_reduction(&mut self, device: &D) -> Result<()> {
        let Some(Reduction { segment, micro_batch, pending, is_last }) = self.reducing.pop_front() else {
            return Ok(());
        };
        if let Some(pending) = pending {
            let mut buffer = pending.wait().buffer;
            self.watch_sum(device, segment, Some(&mut buffer))?;
            self.gradients.reduced(device, segment, buffer, micro_batch);
        } else {
            self.watch_sum(device, segment, None)?;
        }
        let waits = self.clip_norm.is_some() || self.is_tied(segment);
        if is_last && !waits { self.update_bucket(device, segment) } else { Ok(()) }
    }
}

impl<D: Device> Reduction<D> {
    /// Advances the reduction; returns true when waiting would return at once.
    fn test(&mut self) -> bool {
        self.pending.as_mut().is_none_or(Pending::test)
    }
}
