//! The parameters of a rank: whole, or in parts that are gathered for the layers that need them.

use std::collections::VecDeque;
use std::ops::Range;

use super::partition::{Partition, TensorPart};
use super::stage::ZeroStage;
use crate::Result;
use crate::comm::{Communicator, Front, Pending};
use crate::device::{Device, Role};
use crate::memory::Buffer;
use crate::nn::{FlatBuffer, Segmentation, TensorShard};
use crate::parallel::watch::flip;

/// The direction in which passes go through the segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the first to the last.
    Forward,
    /// From the last to the first.
    Backward,
}

/// The time for which gathered parameters are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gathering {
    /// Until the update: every segment is gathered once a step.
    Step,
    /// Until another segment needs the memory: every segment is gathered for every pass.
    Pass,
}

/// The settings of [`ParameterSegments`].
#[derive(Debug, Clone, Copy)]
pub struct ParameterSettings {
    /// The stage of ZeRO, which is 0 for a replica alone.
    pub stage: ZeroStage,
    /// The time for which gathered parameters are kept in stage 3.
    pub gathering: Gathering,
    /// The seed of the initial values.
    pub seed: u64,
}

impl Gathering {
    /// Returns the lengths of the buffers for gathered segments, where the segments have `lengths`.
    pub fn buffers(self, lengths: &[usize]) -> Vec<usize> {
        match self {
            Gathering::Step => lengths.to_vec(),
            Gathering::Pass => {
                let longest = lengths.iter().copied().max().unwrap_or_default();
                vec![longest; MOST_GATHERED.min(lengths.len())]
            }
        }
    }
}

/// Number of segments that are gathered at a time with [`Gathering::Pass`]: the one that is read and
/// the next one.
const MOST_GATHERED: usize = 2;

/// The parameters of a rank.
pub struct ParameterSegments<D: Device> {
    /// The segments that are here.
    flat: FlatBuffer<D>,
    partition: Partition,
    gathers: Communicator,
    stage: ZeroStage,
    /// The gathers under way, by segment.
    pending: Vec<Option<Pending<Front<D::Buffer>>>>,
    /// In stage 3, the owned parts by segment.
    parts: Vec<D::Buffer>,
    /// In stage 3, the buffers that no segment uses.
    free: Vec<D::Buffer>,
    /// In stage 3, the segments that are here or on their way, longest unused first.
    gathered: VecDeque<usize>,
    /// The lengths of all buffers for gathered segments.
    buffers: Vec<usize>,
}

impl<D: Device> ParameterSegments<D> {
    /// Allocates the memory for the parameters of `tensors` and fills it with their initial values.
    /// `gathers` are the replicas of these tensors. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn new(
        device: &D,
        tensors: &[TensorShard],
        segmentation: &Segmentation,
        partition: Partition,
        gathers: Communicator,
        settings: ParameterSettings,
    ) -> Result<ParameterSegments<D>> {
        let ParameterSettings { stage, gathering, seed } = settings;
        let in_parts = stage.divides_parameters();
        let flat = if in_parts {
            FlatBuffer::without_memory(tensors, segmentation)
        } else {
            FlatBuffer::zeros(device, tensors, segmentation, Role::Parameters)?
        };
        let lengths: Vec<usize> = (0..flat.num_segments()).map(|own| flat.segment_len(own)).collect();
        let buffers = gathering.buffers(&lengths);
        let (mut parts, mut free) = (Vec::new(), Vec::new());
        if in_parts {
            for len in partition.lengths() {
                parts.push(device.allocate(len, Role::Exact)?);
            }
            for len in &buffers {
                free.push(device.allocate(*len, Role::Parameters)?);
            }
        }
        let pending = (0..flat.num_segments()).map(|_| None).collect();
        let gathered = VecDeque::new();
        let mut parameters =
            ParameterSegments { flat, partition, gathers, stage, pending, parts, free, gathered, buffers };
        if !in_parts {
            parameters.flat.initialise(device, tensors, seed)?;
            return Ok(parameters);
        }
        for (number, tensor) in tensors.iter().enumerate() {
            let (segment, place) = parameters.flat.place(number);
            let TensorPart { kept, block } = parameters.partition.of_tensor(segment, &place);
            if !kept.is_empty() {
                let into = device.view_mut(&mut parameters.parts[segment], kept);
                device.write(into, &mut |values| {
                    tensor.initialise(seed, block.clone(), values);
                    Ok(())
                })?;
            }
        }
        Ok(parameters)
    }

    /// Returns true if a replica keeps its part only.
    pub fn is_in_parts(&self) -> bool {
        self.stage.divides_parameters()
    }

    /// Returns the segments, of which layers may read those that are here.
    pub fn flat(&self) -> &FlatBuffer<D> {
        &self.flat
    }

    /// Gives every replica the parameters of the first, unless each keeps its part only, and sends
    /// all messages of a step once, so that MPI allocates all memory and opens all connections that
    /// they need. Collective over the replicas.
    ///
    /// # Errors
    /// There is no memory for the messages.
    pub fn start(&mut self, device: &D) -> Result<()> {
        for segment in 0..self.flat.num_segments() {
            if self.is_in_parts() {
                self.fetch(device, segment, None)?;
                self.drop_gathered(segment);
            } else if self.gathers.size() > 1 {
                let values = self.gathers.start_broadcast(self.flat.take(segment), 0)?.wait();
                self.flat.put(segment, values);
                self.updated(segment)?;
            }
        }
        self.finish_updates();
        Ok(())
    }

    /// Waits until the parameters of `tensors`, which lie in one segment, are here, and starts to
    /// gather those that a pass in `direction` through `stage`, the tensors of a pipeline stage,
    /// reads next. Collective over the replicas.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn bring(
        &mut self,
        device: &D,
        tensors: &Range<usize>,
        stage: &Range<usize>,
        direction: Direction,
    ) -> Result<()> {
        if !self.is_in_parts() || tensors.is_empty() {
            return Ok(());
        }
        let segment = |tensor: usize| self.flat.place(tensor).0;
        let (now, first, last) = (segment(tensors.start), segment(stage.start), segment(stage.end - 1));
        let next = match direction {
            Direction::Forward => Some(now + 1).filter(|next| *next <= last),
            Direction::Backward => now.checked_sub(1).filter(|next| *next >= first),
        };
        self.fetch(device, now, next)
    }

    /// Makes sure that segment `now` is here and that `next` is on its way.
    fn fetch(&mut self, device: &D, now: usize, next: Option<usize>) -> Result<()> {
        self.start_gather(device, now, now)?;
        self.wait(now);
        match next {
            Some(next) => self.start_gather(device, next, now),
            None => Ok(()),
        }
    }

    /// Starts to gather `segment`, unless it is here or on its way. If there is no free memory, the
    /// segment other than `kept` that has been unused longest is dropped for it.
    fn start_gather(&mut self, device: &D, segment: usize, kept: usize) -> Result<()> {
        if let Some(at) = self.gathered.iter().position(|other| *other == segment) {
            self.gathered.remove(at);
            self.gathered.push_back(segment);
            return Ok(());
        }
        if self.gathered.len() == self.buffers.len() {
            let oldest = self.gathered.iter().copied().find(|other| *other != kept);
            self.drop_gathered(oldest.expect("there is memory for two segments"));
        }
        let (owned, len) = (self.partition.owned(segment), self.flat.segment_len(segment));
        // the shortest that is long enough, so that longer segments find theirs
        let fitting = (0..self.free.len()).filter(|at| self.free[*at].len() >= len);
        let mut buffer = match fitting.min_by_key(|at| self.free[*at].len()) {
            Some(at) => self.free.swap_remove(at),
            None => {
                let longer = self.buffers.iter().copied().filter(|other| *other >= len).min();
                device.allocate(longer.unwrap_or(len), Role::Parameters)?
            }
        };
        let part = device.view(&self.parts[segment], 0..owned.len());
        device.copy(part, device.view_mut(&mut buffer, owned));
        self.pending[segment] = Some(self.gathers.start_all_gather_in_place(Front { buffer, len })?);
        self.gathered.push_back(segment);
        Ok(())
    }

    /// Waits until `segment` is here, if it is on its way.
    fn wait(&mut self, segment: usize) {
        if let Some(pending) = self.pending[segment].take() {
            self.flat.put(segment, pending.wait().buffer);
        }
    }

    fn drop_gathered(&mut self, segment: usize) {
        if let Some(at) = self.gathered.iter().position(|other| *other == segment) {
            self.wait(segment);
            self.gathered.remove(at);
            self.free.push(self.flat.take(segment));
        }
    }

    /// Drops all gathered segments and frees their memory; later passes allocate it again.
    pub fn release(&mut self) {
        self.finish_updates();
        self.free.clear();
    }

    /// Borrows `elements` of `segment`, which this rank updates.
    pub fn updatable(&mut self, device: &D, segment: usize, elements: Range<usize>) -> D::ViewMut<'_> {
        if !self.is_in_parts() {
            return device.view_mut(self.flat.segment_mut(segment), elements);
        }
        let start = self.partition.owned(segment).start;
        let own = elements.start - start..elements.end - start;
        device.view_mut(&mut self.parts[segment], own)
    }

    /// Returns elements of `segment` that are here. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn block(&self, device: &D, segment: usize, range: &Range<usize>) -> Result<Vec<f32>> {
        let (buffer, range) = match self.is_in_parts() {
            true => {
                let start = self.partition.owned(segment).start;
                (&self.parts[segment], range.start - start..range.end - start)
            }
            false => (self.flat.segment(segment), range.clone()),
        };
        let mut values = Vec::with_capacity(range.len());
        device.read(device.view(buffer, range), &mut |elements| {
            values.extend_from_slice(elements);
            Ok(())
        })?;
        Ok(values)
    }

    /// Flips a bit of one of the elements `range` of `segment`, to try an audit out.
    ///
    /// # Errors
    /// A transfer from or to the device failed.
    pub fn flip(&mut self, device: &D, segment: usize, range: Range<usize>, choice: u64) -> Result<()> {
        if !self.is_in_parts() {
            return flip(device, self.flat.segment_mut(segment), range.start, range.len(), choice);
        }
        let start = self.partition.owned(segment).start;
        flip(device, &mut self.parts[segment], range.start - start, range.len(), choice)
    }

    /// Accepts that this rank has updated its elements of `segment`, which no pass of the step reads
    /// any more: starts to distribute them, unless replicas keep their parts only. Collective over
    /// the replicas, but waits for none of them.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn updated(&mut self, segment: usize) -> Result<()> {
        if matches!(self.stage, ZeroStage::Slots | ZeroStage::Gradients) {
            let front = Front { len: self.flat.segment_len(segment), buffer: self.flat.take(segment) };
            self.pending[segment] = Some(self.gathers.start_all_gather_in_place(front)?);
        }
        Ok(())
    }

    /// Waits until the updates of all replicas are here, or drops the gathered segments, which are
    /// those from before the update. (Dropping each at its update would let timing decide which
    /// segments are here, and so which are gathered.) Collective over the replicas.
    pub fn finish_updates(&mut self) {
        while let Some(segment) = self.gathered.front() {
            self.drop_gathered(*segment);
        }
        for segment in 0..self.flat.num_segments() {
            self.wait(segment);
        }
    }

    /// Calls `show` with the values of tensor `tensor` that this replica owns. Not collective.
    ///
    /// # Errors
    /// `show` failed, or the transfer from the device did.
    pub fn read(&self, device: &D, tensor: usize, show: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let (segment, place) = self.flat.place(tensor);
        let TensorPart { kept, block } = self.partition.of_tensor(segment, &place);
        if kept.is_empty() {
            return show(&[]);
        }
        if self.is_in_parts() {
            return device.read(device.view(&self.parts[segment], kept), show);
        }
        let owned = place.start + block.start..place.start + block.end;
        device.read(device.view(self.flat.segment(segment), owned), show)
    }

    /// Overwrites tensor `tensor` with `block`, of which a rank that keeps its part only takes
    /// that. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn write(&mut self, device: &D, tensor: usize, block: &[f32]) -> Result<()> {
        let (segment, place) = self.flat.place(tensor);
        let (into, from) = if self.is_in_parts() {
            self.drop_gathered(segment);
            let part = self.partition.of_tensor(segment, &place);
            if part.kept.is_empty() {
                return Ok(());
            }
            (device.view_mut(&mut self.parts[segment], part.kept), &block[part.block])
        } else {
            (self.flat.tensor_mut(device, tensor), block)
        };
        device.write(into, &mut |values| {
            values.copy_from_slice(from);
            Ok(())
        })
    }
}
