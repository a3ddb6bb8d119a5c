//! All parameters of a model in flat memory, every tensor a named view of it.
//!
//! The *logical order* of a model's elements is the order of its layers, weight before bias, each
//! tensor row-major. Checkpoints, digests and seeds use names and logical order, never the layout
//! of a rank's memory.
//!
//! In memory the elements lie in that order too, cut between tensors into *segments*. A segment of
//! gradients travels as one message (a bucket), so it can be handed over whole while its neighbours
//! are in use. It is padded with zeros to a length that divides evenly among the ranks. A model
//! that is never communicated has a single segment.

use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use super::tensor::TensorShard;
use crate::Result;
use crate::device::{Device, Role, RowSums};
use crate::sums::Section;

/// Every tensor begins at a multiple of this many elements, with zeros before it: on a cache line,
/// and aligned so that the matrix units of a GPU read it at full speed.
const TENSOR_MULTIPLE: usize = 32;

/// The cut of a rank's tensors, in logical order, into segments.
#[derive(Debug, Clone, PartialEq)]
pub struct Segmentation {
    /// The tensors of each segment, in logical order and without gaps.
    pub segments: Vec<Range<usize>>,
    /// The length of every segment is padded to a multiple of this.
    pub multiple: usize,
}

impl Segmentation {
    /// Returns the ranges of tensors of these lengths in a segment, and its length before padding.
    fn places(lengths: impl Iterator<Item = usize>) -> (Vec<Range<usize>>, usize) {
        let mut end = 0_usize;
        let place = |len| {
            let start = end.next_multiple_of(TENSOR_MULTIPLE);
            end = start + len;
            start..end
        };
        (lengths.map(place).collect(), end)
    }

    /// Returns the padded length of every segment of `tensors`.
    pub fn segment_lengths(&self, tensors: &[TensorShard]) -> Vec<usize> {
        let len = |own: &Range<usize>| {
            let lengths = tensors[own.clone()].iter().map(TensorShard::num_elements);
            Segmentation::places(lengths).1.next_multiple_of(self.multiple)
        };
        self.segments.iter().map(len).collect()
    }

    /// Returns the position of every one of `tensors`.
    pub fn positions(&self, tensors: &[TensorShard]) -> Vec<TensorPosition> {
        let mut positions = Vec::new();
        for (segment, own) in self.segments.iter().enumerate() {
            let lengths = tensors[own.clone()].iter().map(TensorShard::num_elements);
            let places = Segmentation::places(lengths).0.into_iter();
            positions.extend(places.map(|range| TensorPosition { segment, range }));
        }
        positions
    }

    /// Returns the segmentation of `num_tensors` tensors into one segment.
    pub fn whole(num_tensors: usize) -> Segmentation {
        Segmentation { segments: vec![0..num_tensors; 1], multiple: 1 }
    }
}

/// Memory for one value per parameter: parameters, gradients, or a slot of an optimizer.
pub struct FlatBuffer<D: Device> {
    segments: Vec<Segment<D>>,
    places: Vec<TensorPosition>,
    /// The number of arrays of each segment, one behind the other; the values of tensors are in the
    /// first.
    num_arrays: usize,
}

struct Segment<D: Device> {
    /// `None` while the segment is elsewhere: in a message, or given up.
    buffer: Option<D::Buffer>,
    len: usize,
}

/// The position of a tensor in a flat buffer.
#[derive(Debug, Clone)]
pub struct TensorPosition {
    /// The segment.
    pub segment: usize,
    /// The elements of the segment.
    pub range: Range<usize>,
}

impl<D: Device> FlatBuffer<D> {
    /// Allocates zeros for `tensors`, cut as `segmentation` says. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn zeros(
        device: &D,
        tensors: &[TensorShard],
        segmentation: &Segmentation,
        role: Role,
    ) -> Result<FlatBuffer<D>> {
        FlatBuffer::without_memory(tensors, segmentation).allocate(device, role)
    }

    /// Allocates zeros for every segment. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn allocate(mut self, device: &D, role: Role) -> Result<FlatBuffer<D>> {
        for segment in &mut self.segments {
            segment.buffer = Some(device.allocate(self.num_arrays * segment.len, role)?);
        }
        Ok(self)
    }

    /// Lays `tensors` out as `segmentation` says, without memory: no segment is here until
    /// [`FlatBuffer::put`]. Not collective.
    pub fn without_memory(tensors: &[TensorShard], segmentation: &Segmentation) -> FlatBuffer<D> {
        let lengths = segmentation.segment_lengths(tensors).into_iter();
        let segments = lengths.map(|len| Segment { buffer: None, len }).collect();
        FlatBuffer { segments, places: segmentation.positions(tensors), num_arrays: 1 }
    }

    /// Gives every segment `num_arrays` arrays, as sums over rows need: see [`FlatBuffer::row_sums`].
    /// No segment has memory yet.
    pub fn with_arrays(self, num_arrays: usize) -> FlatBuffer<D> {
        FlatBuffer { num_arrays, ..self }
    }

    /// Returns the number of segments.
    pub fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// Returns the padded length of a segment.
    pub fn segment_len(&self, segment: usize) -> usize {
        self.segments[segment].len
    }

    /// Returns the length of all arrays of the longest segment.
    pub fn longest_memory(&self) -> usize {
        self.num_arrays * self.segments.iter().map(|segment| segment.len).max().unwrap_or_default()
    }

    /// Returns true if a segment can be viewed.
    pub fn is_here(&self, segment: usize) -> bool {
        self.segments[segment].buffer.is_some()
    }

    /// Returns the number of tensors.
    pub fn num_tensors(&self) -> usize {
        self.places.len()
    }

    /// Takes the memory of a segment; its tensors cannot be viewed until [`FlatBuffer::put`].
    ///
    /// # Panics
    /// The segment is not here.
    pub fn take(&mut self, segment: usize) -> D::Buffer {
        self.segments[segment].buffer.take().expect("a segment is in one place at a time")
    }

    /// Puts a segment back, in memory that is at least as long as its arrays.
    pub fn put(&mut self, segment: usize, buffer: D::Buffer) {
        self.segments[segment].buffer = Some(buffer);
    }

    /// Returns a segment.
    ///
    /// # Panics
    /// The segment is not here.
    pub fn segment(&self, segment: usize) -> &D::Buffer {
        self.segments[segment].buffer.as_ref().expect("a segment that is elsewhere cannot be viewed")
    }

    /// Returns a segment, to write.
    ///
    /// # Panics
    /// The segment is not here.
    pub fn segment_mut(&mut self, segment: usize) -> &mut D::Buffer {
        self.segments[segment].buffer.as_mut().expect("a segment that is elsewhere cannot be viewed")
    }

    /// Returns the indices of the tensors of a segment, each with its range in the segment.
    pub fn tensors_in(&self, segment: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let places = self.places.iter().enumerate().filter(move |(_, place)| place.segment == segment);
        places.map(|(tensor, place)| (tensor, place.range.clone()))
    }

    /// Returns the segment of tensor number `tensor` and the tensor's range in it.
    pub fn place(&self, tensor: usize) -> (usize, Range<usize>) {
        let TensorPosition { segment, range } = self.places[tensor].clone();
        (segment, range)
    }

    /// Returns tensor number `tensor`, in logical order.
    pub fn tensor(&self, device: &D, tensor: usize) -> D::View<'_> {
        let (segment, range) = self.place(tensor);
        device.view(self.segment(segment), range)
    }

    /// Returns the elements `part` of tensor number `tensor`.
    pub fn tensor_part(&self, device: &D, tensor: usize, part: Range<usize>) -> D::View<'_> {
        let (segment, range) = self.place(tensor);
        assert!(part.start <= part.end && part.end <= range.len(), "{part:?} of {} elements", range.len());
        device.view(self.segment(segment), range.start + part.start..range.start + part.end)
    }

    /// Returns tensor number `tensor`, in logical order, to write.
    pub fn tensor_mut(&mut self, device: &D, tensor: usize) -> D::ViewMut<'_> {
        let (segment, range) = self.place(tensor);
        device.view_mut(self.segment_mut(segment), range)
    }

    /// Returns tensor number `tensor` in every array of its segment, in which the `rows` of a pass are
    /// added up.
    pub fn row_sums(&mut self, device: &D, tensor: usize, rows: Section) -> RowSums<D::ViewMut<'_>> {
        let (segment, range) = self.place(tensor);
        let stride = self.segments[segment].len;
        let end = (self.num_arrays - 1) * stride + range.end;
        RowSums { stack: device.view_mut(self.segment_mut(segment), range.start..end), stride, rows }
    }

    /// Fills every tensor with its initial values for `seed`. Not collective: every rank that calls
    /// it gets the same bits.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn initialise(&mut self, device: &D, tensors: &[TensorShard], seed: u64) -> Result<()> {
        for (index, tensor) in tensors.iter().enumerate() {
            let mut fill = |values: &mut [f32]| {
                tensor.initialise(seed, 0..values.len(), values);
                Ok(())
            };
            device.write(self.tensor_mut(device, index), &mut fill)?;
        }
        Ok(())
    }

    /// Sets the elements of a segment that belong to no tensor to 0.
    pub fn clear_gaps(&mut self, device: &D, segment: usize) {
        let FlatBuffer { segments, places, num_arrays } = self;
        let Segment { buffer, len } = &mut segments[segment];
        let buffer = buffer.as_mut().expect("a segment that is elsewhere cannot be viewed");
        let mut clear = |gap: Range<usize>| {
            if !gap.is_empty() {
                for start in (0..*num_arrays).map(|array| array * *len) {
                    device.fill(device.view_mut(buffer, start + gap.start..start + gap.end), 0.0);
                }
            }
        };
        let mut end = 0;
        for place in places.iter().filter(|place| place.segment == segment) {
            clear(end..place.range.start);
            end = place.range.end;
        }
        clear(end..*len);
    }

    /// Returns a hash of all elements' bits in logical order: XXH3 with 128 bits over the
    /// little-endian bytes. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self, device: &D) -> Result<u128> {
        let mut hash = Xxh3::new();
        for tensor in 0..self.num_tensors() {
            device.read(self.tensor(device, tensor), &mut |values| {
                hash_values(&mut hash, values);
                Ok(())
            })?;
        }
        Ok(hash.digest128())
    }
}

/// Adds the little-endian bytes of `values` to `hash`.
pub fn hash_values(hash: &mut Xxh3, values: &[f32]) {
    if cfg!(target_endian = "little") {
        hash.update(bytemuck::cast_slice(values));
    } else {
        values.iter().for_each(|value| hash.update(&value.to_le_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;
    use crate::nn::{Initial, TensorSpec};

    fn tensors() -> Vec<TensorShard> {
        [vec![3, 5], vec![3], vec![2, 2, 2], vec![7]]
            .into_iter()
            .enumerate()
            .map(|(i, shape)| TensorSpec {
                name: format!("t{i}"),
                shape,
                initial: Initial::Uniform { bound: 1.0 },
            })
            .map(|spec| TensorShard::whole(&spec))
            .collect()
    }

    #[test]
    fn the_digest_and_the_values_do_not_depend_on_the_segments() {
        let device = Cpu::new(1).unwrap();
        let mut digests = Vec::new();
        for (segments, multiple) in [(vec![0..4; 1], 1), (vec![0..1, 1..2, 2..4], 6), (vec![0..3, 3..4], 16)]
        {
            let segmentation = Segmentation { segments, multiple };
            let mut flat = FlatBuffer::zeros(&device, &tensors(), &segmentation, Role::Parameters).unwrap();
            flat.initialise(&device, &tensors(), 5).unwrap();
            assert!((0..flat.num_segments()).all(|s| flat.segment_len(s).is_multiple_of(multiple)));
            assert_eq!(flat.tensor(&device, 2).len(), 8);
            digests.push(flat.digest(&device).unwrap());
        }
        assert!(digests.iter().all(|digest| *digest == digests[0]));
    }

    #[test]
    fn one_bit_changes_the_digest() {
        let device = Cpu::new(1).unwrap();
        let mut flat =
            FlatBuffer::zeros(&device, &tensors(), &Segmentation::whole(4), Role::Parameters).unwrap();
        let before = flat.digest(&device).unwrap();
        flat.tensor_mut(&device, 3)[6] = -0.0;
        assert_ne!(flat.digest(&device).unwrap(), before);
    }
}
