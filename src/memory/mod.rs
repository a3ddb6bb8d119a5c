//! Host memory for large arrays, and the contract between buffers and messages.
//!
//! [`Memory`] is zeroed, begins at a page boundary, and is on huge pages, but for its last part, if it is
//! large and the system has them. The size of a page matters, because a training step streams through
//! gigabytes and MPI copies between processes page by page. [`Buffer`] and [`Arena`] are the interface
//! between messages and device memory, so `comm` and `device` do not depend on each other.

mod arena;
mod buffer;
mod combine;
mod element;
mod host_arena;
mod node;
mod peers;
pub mod scratch;

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Pod;
use memmap2::{Advice, MmapMut};

use crate::{Error, Result};
pub use arena::{Arena, Terms};
pub use buffer::{Buffer, Front, HostBuffer, Loan, Needs};
pub use element::{Element, ElementType, Operation};
pub use host_arena::{HostArena, Places};
pub use node::{check_room, free_bytes, kibibytes, limit_bytes, megabytes, total_bytes};
pub use peers::{MOST_PEERS, MemoryHandle, PeerBuffer, PeerWork, PeerWorkKind};

/// The size of a huge page on the machines that have them.
const HUGE_PAGE: usize = 2 << 20;

/// The number of maps made so far. A step at steady state makes none, which a test checks.
static NUM_MAPS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of memory maps that this process has made here.
#[doc(hidden)]
pub fn num_maps() -> usize {
    NUM_MAPS.load(Ordering::Relaxed)
}

/// The number of bytes in the memory maps made so far.
static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of bytes of all values for which this process has made memory maps here.
#[doc(hidden)]
pub fn num_mapped_bytes() -> usize {
    NUM_BYTES.load(Ordering::Relaxed)
}

/// A fixed number of elements, initially zero. They stay in place when the value is moved, and
/// mapped when it is leaked.
#[derive(Debug)]
pub struct Memory<T> {
    map: MmapMut,
    /// The offset of the elements in the map, in bytes.
    start: usize,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> Memory<T> {
    /// Allocates `len` zeros. Not collective.
    ///
    /// # Errors
    /// The system does not have that much memory.
    pub fn zeroed(len: usize) -> Result<Memory<T>> {
        let fail = |why: &dyn std::fmt::Display| {
            let mebibytes = len as f64 * size_of::<T>() as f64 / f64::from(1 << 20);
            Error::failed(format!("allocating {len} values ({mebibytes:.1} MiB)"), why)
        };
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or_else(|| fail(&"that is more than can be addressed"))?;
        check_room(bytes).map_err(|why| fail(&why))?;
        let is_large = bytes >= HUGE_PAGE;
        let room = if is_large { bytes.saturating_add(HUGE_PAGE) } else { bytes.max(1) };
        NUM_MAPS.fetch_add(1, Ordering::Relaxed);
        NUM_BYTES.fetch_add(bytes, Ordering::Relaxed);
        let map = MmapMut::map_anon(room).map_err(|error| fail(&error))?;
        let mut start = 0;
        if is_large {
            start = map.as_ptr().addr().next_multiple_of(HUGE_PAGE) - map.as_ptr().addr();
            // of the last page, a large array may fill little, and many such arrays would waste it; on a
            // system without huge pages the memory is on small ones
            let whole = bytes / HUGE_PAGE * HUGE_PAGE;
            let _ = map.advise_range(Advice::HugePage, start, whole);
            let _ = map.advise_range(Advice::NoHugePage, start + whole, room - start - whole);
        }
        Ok(Memory { map, start, len, elements: PhantomData })
    }
}

impl<T: Pod> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.map[self.start..][..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.map[self.start..][..self.len * size_of::<T>()])
    }
}

impl<T: Pod> AsRef<[T]> for Memory<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Pod> AsMut<[T]> for Memory<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::{HUGE_PAGE, Memory};

    #[test]
    fn memory_is_zero_and_large_memory_begins_on_a_huge_page() {
        for len in [0, 1, 1000, HUGE_PAGE / 4 - 1, HUGE_PAGE / 4, HUGE_PAGE + 3] {
            let mut memory = Memory::<f32>::zeroed(len).unwrap();
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|value| *value == 0.0));
            memory.fill(1.0);
            assert!(4 * len < HUGE_PAGE || memory.as_ptr().addr().is_multiple_of(HUGE_PAGE));
        }
        assert!(Memory::<f32>::zeroed(usize::MAX / 2).unwrap_err().to_string().contains("allocating"));
    }

    /// Returns the bytes on huge pages of the map around `address`.
    fn huge_around(address: usize) -> Option<usize> {
        let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut lines = maps.lines();
        lines.find(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let number = |text: &str| usize::from_str_radix(text, 16).ok();
            let bounds = range.and_then(|(start, end)| Some(number(start)?..number(end)?));
            bounds.is_some_and(|bounds| bounds.contains(&address))
        })?;
        lines.find_map(|line| crate::memory::kibibytes(line, "AnonHugePages:"))
    }

    #[test]
    fn the_last_page_is_as_large_as_it_has_to_be() {
        let mut memory = Memory::<f32>::zeroed(HUGE_PAGE * 3 / 8).unwrap();
        memory.fill(1.0);
        let last = &raw const memory[memory.len() - 1];
        // a system without huge pages does not count them
        let found = huge_around(last.addr()).unwrap_or(0);
        assert_eq!(found, 0, "half of a huge page is on a whole one");
    }
}
