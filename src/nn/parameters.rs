//! All parameters of a model in flat memory, every tensor a named view of it.
//!
//! The *logical order* of a model's elements is the order of its layers, weight before bias, each tensor row-major.
//! Checkpoints, digests and seeds go by names and logical order, never by a rank's memory.
//!
//! In memory the elements lie in that order too, cut between tensors into *segments*. A segment is what travels as one
//! message (a gradient bucket), so it can be handed over whole while its neighbours are in use, and is padded with zeros
//! to a length that all ranks can share equally. A model that is never communicated has a single segment.

use std::ops::Range;

use super::Initial;
use crate::Result;
use crate::device::Device;

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// PyTorch's name for it, such as `fc1.weight`.
    pub name: String,
    /// Its shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// What its elements are before training.
    pub initial: Initial,
}

impl TensorSpec {
    /// The number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How the tensors of a model, in logical order, are cut into segments: for each the range of tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Segmentation {
    /// The tensors of each segment, in logical order and without gaps.
    pub segments: Vec<Range<usize>>,
    /// Every segment's length is padded to a multiple of this.
    pub multiple: usize,
}

impl Segmentation {
    /// All of `num_tensors` tensors in one segment.
    pub fn whole(num_tensors: usize) -> Segmentation {
        Segmentation { segments: vec![0..num_tensors; 1], multiple: 1 }
    }
}

/// Memory for one value per parameter: parameters, gradients, or a slot of an optimizer.
pub struct FlatBuffer<D: Device> {
    segments: Vec<Segment<D>>,
    places: Vec<Place>,
}

struct Segment<D: Device> {
    /// `None` while the segment is under way in a message.
    buffer: Option<D::Buffer>,
    len: usize,
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
struct Place {
    segment: usize,
    range: Range<usize>,
}

impl<D: Device> FlatBuffer<D> {
    /// Zeros for `tensors`, cut as `segmentation` says. Not collective.
    ///
    /// # Errors
    /// The device has not that much memory.
    pub fn zeros(device: &D, tensors: &[TensorSpec], segmentation: &Segmentation) -> Result<FlatBuffer<D>> {
        let mut flat = FlatBuffer { segments: Vec::new(), places: Vec::new() };
        for (segment, range) in segmentation.segments.iter().enumerate() {
            let mut end = 0;
            for tensor in &tensors[range.clone()] {
                let start = end;
                end += tensor.num_elements();
                flat.places.push(Place { segment, range: start..end });
            }
            let len = end.next_multiple_of(segmentation.multiple);
            flat.segments.push(Segment { buffer: Some(device.allocate(len)?), len });
        }
        Ok(flat)
    }

    /// The number of segments.
    pub fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// The padded length of a segment.
    pub fn segment_len(&self, segment: usize) -> usize {
        self.segments[segment].len
    }

    /// The number of tensors.
    pub fn num_tensors(&self) -> usize {
        self.places.len()
    }

    /// Takes a segment away to send it; its tensors cannot be viewed until [`FlatBuffer::put`].
    ///
    /// # Panics
    /// It is away already.
    pub fn take(&mut self, segment: usize) -> D::Buffer {
        self.segments[segment].buffer.take().expect("a segment travels once at a time")
    }

    /// Puts a segment back.
    pub fn put(&mut self, segment: usize, buffer: D::Buffer) {
        self.segments[segment].buffer = Some(buffer);
    }

    /// A segment that is here.
    ///
    /// # Panics
    /// It is under way in a message.
    pub fn segment(&self, segment: usize) -> &D::Buffer {
        self.segments[segment].buffer.as_ref().expect("a segment is viewed only while it is here")
    }

    /// A segment that is here, to write.
    ///
    /// # Panics
    /// It is under way in a message.
    pub fn segment_mut(&mut self, segment: usize) -> &mut D::Buffer {
        self.segments[segment].buffer.as_mut().expect("a segment is viewed only while it is here")
    }

    /// Tensor number `tensor`, in logical order.
    pub fn tensor(&self, device: &D, tensor: usize) -> D::View<'_> {
        let place = &self.places[tensor];
        device.view(self.segment(place.segment), place.range.clone())
    }

    /// Tensor number `tensor`, in logical order, to write.
    pub fn tensor_mut(&mut self, device: &D, tensor: usize) -> D::ViewMut<'_> {
        let Place { segment, range } = self.places[tensor].clone();
        device.view_mut(self.segment_mut(segment), range)
    }

    /// Sets every element, padding included, to zero.
    pub fn clear(&mut self, device: &D) {
        for index in 0..self.segments.len() {
            let len = self.segment_len(index);
            device.fill(device.view_mut(self.segment_mut(index), 0..len), 0.0);
        }
    }

    /// Fills every tensor with its initial values for `seed`. Not collective: every rank that does it gets the same bits.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn initialise(&mut self, device: &D, tensors: &[TensorSpec], seed: u64) -> Result<()> {
        for (index, tensor) in tensors.iter().enumerate() {
            let mut fill = |values: &mut [f32]| {
                tensor.initial.fill(seed, &tensor.name, 0, values);
                Ok(())
            };
            device.write(self.tensor_mut(device, index), &mut fill)?;
        }
        Ok(())
    }

    /// A hash of all elements' bits in logical order: XXH3 with 128 bits over the little-endian bytes. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self, device: &D) -> Result<u128> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for tensor in 0..self.num_tensors() {
            device.read(self.tensor(device, tensor), &mut |values| {
                if cfg!(target_endian = "little") {
                    hash.update(bytemuck::cast_slice(values));
                } else {
                    values.iter().for_each(|value| hash.update(&value.to_le_bytes()));
                }
                Ok(())
            })?;
        }
        Ok(hash.digest128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;

    fn tensors() -> Vec<TensorSpec> {
        [vec![3, 5], vec![3], vec![2, 2, 2], vec![7]]
            .into_iter()
            .enumerate()
            .map(|(i, shape)| TensorSpec { name: format!("t{i}"), shape, initial: Initial::Uniform { bound: 1.0 } })
            .collect()
    }

    #[test]
    fn the_digest_and_the_values_do_not_depend_on_the_segments() {
        let device = Cpu::new(1).unwrap();
        let mut digests = Vec::new();
        for (segments, multiple) in [(vec![0..4; 1], 1), (vec![0..1, 1..2, 2..4], 6), (vec![0..3, 3..4], 16)] {
            let segmentation = Segmentation { segments, multiple };
            let mut flat = FlatBuffer::zeros(&device, &tensors(), &segmentation).unwrap();
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
        let mut flat = FlatBuffer::zeros(&device, &tensors(), &Segmentation::whole(4)).unwrap();
        let before = flat.digest(&device).unwrap();
        flat.tensor_mut(&device, 3)[6] = -0.0;
        assert_ne!(flat.digest(&device).unwrap(), before);
    }
}
