//! The gradients of a rank: whole, or one segment at a time.

use std::ops::Range;

use super::partition::Partition;
use super::stage::{Accumulation, ZeroStage};
use crate::Result;
use crate::comm::Front;
use crate::device::{Device, Role};
use crate::nn::{FlatBuffer, Segmentation, TensorShard};

/// The gradients of a rank's parameters. A segment is *open* while layers may write to it.
pub struct GradientSegments<D: Device> {
    flat: FlatBuffer<D>,
    partition: Partition,
    memory: GradientMemory<D>,
}

/// The memory of the segments.
enum GradientMemory<D: Device> {
    /// Every segment has its own, and is always open unless it is in a message.
    Whole,
    /// A segment is open from the first layer that writes to it until it is reduced.
    Pooled {
        /// Buffers that no segment uses, each as long as the longest segment.
        free: Vec<D::Buffer>,
        /// The owned parts by segment, if they outlast their segments.
        parts: Vec<GradientPart<D>>,
        /// Fill a segment with zeros when it is opened, since not all layers may write to it.
        clears: bool,
    },
}

/// The owned part of a segment.
struct GradientPart<D: Device> {
    values: D::Buffer,
    /// True if there are values of this step.
    is_filled: bool,
}

/// The uses of gradients that decide which memory they need.
#[derive(Debug, Clone, Copy)]
pub struct GradientUse {
    /// The stage of ZeRO.
    pub stage: ZeroStage,
    /// The place where micro-batches are added up.
    pub accumulation: Accumulation,
    /// The number of micro-batches in a step.
    pub num_micro_batches: usize,
    /// True if gradients of biases and of weights are computed in passes of their own, between which
    /// all segments are open.
    pub splits_passes: bool,
    /// True if all gradients are kept until their norm is known.
    pub clips: bool,
}

impl GradientUse {
    /// Returns true if a segment has memory only while it is open.
    pub fn is_pooled(&self) -> bool {
        let is_single = self.num_micro_batches == 1 && !self.splits_passes;
        self.stage >= ZeroStage::Gradients && (is_single || self.reduces_each())
    }

    /// Returns how many of `num_segments` have memory at first: all that may be open at a time, or
    /// the one that layers write to and one under way, or, in stage 3, whose gathers take two
    /// already, one.
    pub fn num_open(&self, num_segments: usize) -> usize {
        let most = if self.stage == ZeroStage::Parameters { 1 } else { 2 };
        if self.splits_passes { num_segments } else { most.min(num_segments) }
    }

    /// Returns true if the owned parts have memory of their own.
    pub fn keeps_parts(&self) -> bool {
        self.is_pooled() && (self.clips || self.reduces_each())
    }

    /// Returns true if every micro-batch is reduced by itself.
    pub fn reduces_each(&self) -> bool {
        let in_parts = self.accumulation == Accumulation::Parts;
        self.stage >= ZeroStage::Gradients && self.num_micro_batches > 1 && in_parts
    }
}

impl<D: Device> GradientSegments<D> {
    /// Allocates the memory for the gradients of `tensors`. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn new(
        device: &D,
        tensors: &[TensorShard],
        segmentation: &Segmentation,
        partition: Partition,
        usage: GradientUse,
    ) -> Result<GradientSegments<D>> {
        if !usage.is_pooled() {
            let flat = FlatBuffer::zeros(device, tensors, segmentation, Role::Exact)?;
            return Ok(GradientSegments { flat, partition, memory: GradientMemory::Whole });
        }
        let flat = FlatBuffer::without_memory(tensors, segmentation);
        let longest = flat.longest_segment();
        let num_buffers = usage.num_open(flat.num_segments());
        let free = (0..num_buffers).map(|_| device.allocate(longest, Role::Exact)).collect::<Result<_>>()?;
        let clears = usage.reduces_each();
        let part = |len| Ok(GradientPart { values: device.allocate(len, Role::Exact)?, is_filled: false });
        let parts = if usage.keeps_parts() {
            partition.lengths().into_iter().map(part).collect::<Result<_>>()?
        } else {
            Vec::new()
        };
        Ok(GradientSegments { flat, partition, memory: GradientMemory::Pooled { free, parts, clears } })
    }

    /// Returns the segments, of which layers may write to those that are open.
    pub fn flat(&self) -> &FlatBuffer<D> {
        &self.flat
    }

    /// Returns the segments, to write to those that are open.
    pub fn flat_mut(&mut self) -> &mut FlatBuffer<D> {
        &mut self.flat
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        if let GradientMemory::Pooled { parts, .. } = &mut self.memory {
            parts.iter_mut().for_each(|part| part.is_filled = false);
        }
    }

    /// Returns true if `segment` can be opened without waiting for another to be closed.
    pub fn can_open(&self, segment: usize) -> bool {
        match &self.memory {
            GradientMemory::Pooled { free, .. } => self.flat.is_here(segment) || !free.is_empty(),
            GradientMemory::Whole => true,
        }
    }

    /// Opens `segment` if it is not open; allocates memory if all is in use. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn open(&mut self, device: &D, segment: usize) -> Result<()> {
        let GradientMemory::Pooled { free, clears, .. } = &mut self.memory else { return Ok(()) };
        if self.flat.is_here(segment) {
            return Ok(());
        }
        let buffer = match free.pop() {
            Some(buffer) => buffer,
            None => device.allocate(self.flat.longest_segment(), Role::Exact)?,
        };
        self.flat.put(segment, buffer);
        if *clears {
            let len = self.flat.segment_len(segment);
            device.fill(device.view_mut(self.flat.segment_mut(segment), 0..len), 0.0);
        } else {
            self.flat.clear_gaps(device, segment);
        }
        Ok(())
    }

    /// Returns true if `segment` is open.
    pub fn is_open(&self, segment: usize) -> bool {
        self.flat.is_here(segment)
    }

    /// Takes an open segment out, to reduce it.
    pub fn take(&mut self, segment: usize) -> Front<D::Buffer> {
        Front { len: self.flat.segment_len(segment), buffer: self.flat.take(segment) }
    }

    /// Accepts a segment whose owned part is reduced; adds that to the parts of earlier
    /// micro-batches.
    pub fn reduced(&mut self, device: &D, segment: usize, buffer: D::Buffer) {
        let owned = self.partition.owned(segment);
        match &mut self.memory {
            GradientMemory::Pooled { free, parts, .. } if !parts.is_empty() => {
                let GradientPart { values, is_filled } = &mut parts[segment];
                let (from, into) =
                    (device.view(&buffer, owned.clone()), device.view_mut(values, 0..owned.len()));
                if std::mem::replace(is_filled, true) {
                    device.add(from, into);
                } else {
                    device.copy(from, into);
                }
                free.push(buffer);
            }
            _ => self.flat.put(segment, buffer),
        }
    }

    /// Borrows elements `range` of the reduced segment. Only owned elements are asked for if
    /// segments are pooled.
    pub fn view(&self, device: &D, segment: usize, range: Range<usize>) -> D::View<'_> {
        match &self.memory {
            GradientMemory::Pooled { parts, .. } if !parts.is_empty() => {
                let start = self.partition.owned(segment).start;
                device.view(&parts[segment].values, range.start - start..range.end - start)
            }
            _ => device.view(self.flat.segment(segment), range),
        }
    }

    /// Gives the memory of `segment` back, whose gradients have been used.
    pub fn close(&mut self, segment: usize) {
        if let GradientMemory::Pooled { free, .. } = &mut self.memory
            && self.flat.is_here(segment)
        {
            free.push(self.flat.take(segment));
        }
    }

    /// Frees the memory of segments that are not open; later steps allocate it again.
    pub fn release(&mut self) {
        if let GradientMemory::Pooled { free, .. } = &mut self.memory {
            free.clear();
        }
    }
}
