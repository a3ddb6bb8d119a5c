//! The gradients of a rank: whole, or one segment at a time.

use std::ops::Range;

use super::partition::Partition;
use super::stage::ZeroStage;
use crate::Result;
use crate::comm::Front;
use crate::device::{Device, Role};
use crate::nn::{FlatBuffer, Segmentation, TensorShard};
use crate::parallel::batch::BatchDivision;

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
        division: BatchDivision,
    },
}

/// The owned part of a segment.
struct GradientPart<D: Device> {
    /// A stack of sums, of which the first is the sum over the step in the end.
    sums: Vec<D::Buffer>,
    /// The number of sums on the stack.
    num_sums: usize,
}

/// The uses of gradients that decide which memory they need.
#[derive(Debug, Clone, Copy)]
pub struct GradientUse {
    /// The stage of ZeRO.
    pub stage: ZeroStage,
    /// The rows of which replicas and micro-batches add up gradients.
    pub division: BatchDivision,
    /// True if gradients are kept until all are reduced, because a norm or the use of a tensor in two layers
    /// needs them.
    pub waits: bool,
}

impl GradientUse {
    /// Returns true if a segment has memory only while it is open.
    pub fn is_pooled(&self) -> bool {
        let is_single = self.division.num_micro_batches() == 1;
        self.stage.divides_gradients() && (is_single || self.division.reduces_each())
    }

    /// Returns how many of `num_segments` have memory at first: the one that layers write to and one
    /// under way, or, in stage 3, whose gathers take two already, one.
    pub fn num_open(&self, num_segments: usize) -> usize {
        let most = if self.stage == ZeroStage::Parameters { 1 } else { 2 };
        most.min(num_segments)
    }

    /// Returns true if the owned parts have memory of their own.
    pub fn keeps_parts(&self) -> bool {
        self.is_pooled() && (self.waits || self.division.reduces_each())
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
        let division = usage.division;
        let flat = FlatBuffer::without_memory(tensors, segmentation).with_arrays(division.num_arrays());
        if !usage.is_pooled() {
            let flat = flat.allocate(device, Role::Exact)?;
            return Ok(GradientSegments { flat, partition, memory: GradientMemory::Whole });
        }
        let longest = flat.longest_memory();
        let num_buffers = usage.num_open(flat.num_segments());
        let free = (0..num_buffers).map(|_| device.allocate(longest, Role::Exact)).collect::<Result<_>>()?;
        let part = |len| {
            let sum = |_| device.allocate(len, Role::Exact);
            let sums = (0..division.num_sums_kept()).map(sum).collect::<Result<_>>()?;
            Ok(GradientPart { sums, num_sums: 0 })
        };
        let parts = if usage.keeps_parts() {
            partition.lengths().into_iter().map(part).collect::<Result<_>>()?
        } else {
            Vec::new()
        };
        Ok(GradientSegments { flat, partition, memory: GradientMemory::Pooled { free, parts, division } })
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
            parts.iter_mut().for_each(|part| part.num_sums = 0);
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
        let GradientMemory::Pooled { free, .. } = &mut self.memory else { return Ok(()) };
        if self.flat.is_here(segment) {
            return Ok(());
        }
        let buffer = match free.pop() {
            Some(buffer) => buffer,
            None => device.allocate(self.flat.longest_memory(), Role::Exact)?,
        };
        self.flat.put(segment, buffer);
        self.flat.clear_gaps(device, segment);
        Ok(())
    }

    /// Returns true if `segment` is open.
    pub fn is_open(&self, segment: usize) -> bool {
        self.flat.is_here(segment)
    }

    /// Takes an open segment out, to reduce the first `num_sums` of its arrays.
    pub fn take(&mut self, segment: usize, num_sums: usize) -> Front<D::Buffer> {
        Front { len: num_sums * self.flat.segment_len(segment), buffer: self.flat.take(segment) }
    }

    /// Puts a segment back whose reduction is of no use.
    pub fn put_back(&mut self, segment: usize, buffer: D::Buffer) {
        self.flat.put(segment, buffer);
    }

    /// Accepts a segment whose owned part is reduced after `micro_batch`; adds that to the parts of earlier
    /// micro-batches, in the order of the division.
    pub fn reduced(&mut self, device: &D, segment: usize, buffer: D::Buffer, micro_batch: usize) {
        let owned = self.partition.owned(segment);
        match &mut self.memory {
            GradientMemory::Pooled { free, parts, division } if !parts.is_empty() => {
                let GradientPart { sums, num_sums } = &mut parts[segment];
                let (all, from) = (0..owned.len(), device.view(&buffer, owned));
                let num_merges = division.num_merges(micro_batch);
                if num_merges == 0 {
                    device.copy(from, device.view_mut(&mut sums[*num_sums], all));
                    *num_sums += 1;
                } else {
                    device.add(from, device.view_mut(&mut sums[*num_sums - 1], all.clone()));
                    for _ in 1..num_merges {
                        let (left, right) = sums.split_at_mut(*num_sums - 1);
                        let into = left.last_mut().expect("a sum is added to one before it");
                        device.add(device.view(&right[0], all.clone()), device.view_mut(into, all.clone()));
                        *num_sums -= 1;
                    }
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
                device.view(&parts[segment].sums[0], range.start - start..range.end - start)
            }
            _ => device.view(self.flat.segment(segment), range),
        }
    }

    /// Borrows elements `range` of the reduced segment, to write.
    pub fn view_mut(&mut self, device: &D, segment: usize, range: Range<usize>) -> D::ViewMut<'_> {
        match &mut self.memory {
            GradientMemory::Pooled { parts, .. } if !parts.is_empty() => {
                let start = self.partition.owned(segment).start;
                device.view_mut(&mut parts[segment].sums[0], range.start - start..range.end - start)
            }
            _ => device.view_mut(self.flat.segment_mut(segment), range),
        }
    }

    /// Writes the sum of elements `range` of two reduced segments of one length to both.
    pub fn add_both(&mut self, device: &D, [one, other]: [usize; 2], range: Range<usize>) {
        let (mut sum, place) = match &mut self.memory {
            GradientMemory::Pooled { parts, .. } if !parts.is_empty() => {
                let start = self.partition.owned(one).start;
                (parts[one].sums.swap_remove(0), range.start - start..range.end - start)
            }
            _ => (self.flat.take(one), range.clone()),
        };
        device.add(self.view(device, other, range.clone()), device.view_mut(&mut sum, place.clone()));
        device.copy(device.view(&sum, place), self.view_mut(device, other, range));
        match &mut self.memory {
            GradientMemory::Pooled { parts, .. } if !parts.is_empty() => parts[one].sums.insert(0, sum),
            _ => self.flat.put(one, sum),
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
