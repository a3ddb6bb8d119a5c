//! Memory that the ranks of a node share (MPI-4.1 §12.2.3).
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;
use std::slice;
use std::sync::atomic::AtomicU64;

use ::mpi::ffi;

use super::{Channel, Handle};

impl Handle {
    /// Allocates `num_words` words that all ranks of the communicator can read and write
    /// (`MPI_Win_allocate_shared`); their values are arbitrary. The ranks must be on one node. The
    /// memory is never freed: `MPI_Win_free` is collective, and a rank that ends because of an error
    /// on it alone must not wait for the others. Collective.
    pub(in crate::comm) fn allocate_shared(&self, num_words: usize) -> &'static [AtomicU64] {
        // rank 0 owns all of it, for the parts of several ranks would not be contiguous everywhere
        let own = if self.rank == 0 { num_words.max(1) * size_of::<AtomicU64>() } else { 0 };
        let unit = size_of::<AtomicU64>() as i32;
        let (mut start, mut window) = (ptr::null_mut::<AtomicU64>(), MaybeUninit::uninit());
        let (mut size, mut found_unit) = (0, 0);
        // SAFETY: MPI writes the pointers, the window and the sizes before the calls return.
        unsafe {
            ffi::MPI_Win_allocate_shared(
                own as ffi::MPI_Aint,
                unit,
                ffi::RSMPI_INFO_NULL,
                self.communicator(Channel::Public),
                (&raw mut start).cast(),
                window.as_mut_ptr(),
            );
            let window = window.assume_init();
            let start_of_first = (&raw mut start).cast();
            ffi::MPI_Win_shared_query(window, 0, &mut size, &mut found_unit, start_of_first);
        }
        assert!(!start.is_null() && start.is_aligned(), "MPI shares memory that is aligned for words");
        assert!(size as usize >= num_words * size_of::<AtomicU64>(), "MPI shares all words of rank 0");
        // SAFETY: the memory is aligned and holds `num_words` words, as was checked. It stays mapped until
        // MPI_Finalize, because the window is never freed, and is not used after the `World`. All values of
        // a word are valid, and every access is atomic.
        unsafe { slice::from_raw_parts(start, num_words) }
    }
}
