//! [`Requests`] and waiting for them, the [`Mode`] of a call, and yielding the core while waiting.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::c_int;
use std::mem::{self, MaybeUninit};
use std::sync::atomic::{AtomicBool, Ordering};

use ::mpi::ffi;

use super::count::num_elements;
use crate::memory::ElementType;

thread_local! {
    /// Memory for requests, kept for reuse.
    static UNUSED: RefCell<Vec<Vec<ffi::MPI_Request>>> = const { RefCell::new(Vec::new()) };
}

/// Requests of MPI that are not known to be complete.
pub(in crate::comm) struct Requests(Vec<ffi::MPI_Request>);

impl Requests {
    /// Makes room for `capacity` requests.
    pub(in crate::comm) fn with_capacity(capacity: usize) -> Requests {
        let mut requests = UNUSED.with_borrow_mut(Vec::pop).unwrap_or_default();
        requests.reserve(capacity);
        Requests(requests)
    }

    /// Adds a request that a call has written.
    pub(super) fn push(&mut self, request: ffi::MPI_Request) {
        self.0.push(request);
    }

    /// Runs a call that writes a request handle, and keeps the handle.
    ///
    /// # Safety
    /// `start` writes the handle, and the memory that it names stays valid until the requests are
    /// complete.
    pub(super) unsafe fn post(&mut self, start: impl FnOnce(*mut ffi::MPI_Request) -> c_int) {
        let mut handle = MaybeUninit::uninit();
        start(handle.as_mut_ptr());
        // SAFETY: `start` has written it.
        self.0.push(unsafe { handle.assume_init() });
    }

    /// Returns true when all requests are complete; lets MPI make progress.
    pub(in crate::comm) fn test(&mut self) -> bool {
        if !self.0.is_empty() {
            let (len, mut flag) = (self.0.len() as c_int, 0);
            // SAFETY: the handles are this process's own, and MPI writes null over those that it
            // completes.
            unsafe { ffi::MPI_Testall(len, self.0.as_mut_ptr(), &mut flag, ffi::RSMPI_STATUSES_IGNORE) };
            if flag != 0 {
                self.0.clear();
            }
        }
        self.0.is_empty()
    }

    /// Returns the number of elements that have arrived once the only request, a receive, is complete; lets
    /// MPI make progress.
    ///
    /// # Panics
    /// The message does not hold a whole number of elements.
    pub(in crate::comm) fn test_receive(&mut self, element: ElementType) -> Option<usize> {
        let [request] = &mut self.0[..] else { unreachable!("one request receives a message") };
        let (mut flag, mut status) = (0, MaybeUninit::uninit());
        // SAFETY: the handle is this process's own. MPI writes null over it, and fills the status, when it
        // reports that the request is complete.
        let status = unsafe {
            ffi::MPI_Test(request, &mut flag, status.as_mut_ptr());
            (flag != 0).then(|| status.assume_init())
        }?;
        self.0.clear();
        let Some(len) = num_elements(&status, element) else {
            panic!("a message does not hold a whole number of elements of type {element:?}");
        };
        Some(len)
    }

    /// Blocks until all requests are complete; only MPI itself makes progress meanwhile.
    pub(in crate::comm) fn wait(&mut self) {
        // SAFETY: the handles are this process's own, and MPI writes null over those that it
        // completes.
        unsafe {
            ffi::MPI_Waitall(self.0.len() as c_int, self.0.as_mut_ptr(), ffi::RSMPI_STATUSES_IGNORE);
        }
        self.0.clear();
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        let mut unused = mem::take(&mut self.0);
        unused.clear();
        // at the end of the thread the memory is freed instead
        let _ = UNUSED.try_with(|all| all.borrow_mut().push(unused));
    }
}

/// The way in which an MPI operation is called.
pub(in crate::comm) enum Mode<'a> {
    /// The call returns when the operation is complete on this rank.
    Blocking,
    /// The call returns at once and adds its requests here.
    Started(&'a mut Requests),
}

impl Mode<'_> {
    /// Makes one of the two calls of an operation.
    ///
    /// # Safety
    /// Both are sound to call; `started` writes the request handle, and the memory that it names
    /// stays valid until the request is complete.
    pub(super) unsafe fn call(
        &mut self,
        blocking: impl FnOnce() -> c_int,
        started: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) {
        match self {
            Mode::Blocking => {
                blocking();
            }
            // SAFETY: the caller guarantees that `started` writes the request handle, and that the
            // memory it names stays valid until the request is complete.
            Mode::Started(requests) => unsafe { requests.post(started) },
        }
    }
}

/// True if there are more ranks than cores, so that a waiting rank must yield its core: some MPIs
/// only spin.
static YIELDS: AtomicBool = AtomicBool::new(false);

/// Sets whether there are more ranks than cores somewhere in the job. If so, blocking calls are
/// started and waited for. The value must be equal on all ranks, because blocking and non-blocking
/// calls do not match each other (MPI-4.1 §6.12). Collective.
pub(in crate::comm) fn yield_while_waiting(yields: bool) {
    YIELDS.store(yields, Ordering::Relaxed);
}

/// Returns true if waiting ranks yield their core.
pub(in crate::comm) fn yields() -> bool {
    YIELDS.load(Ordering::Relaxed)
}

/// Pauses between polls.
pub(in crate::comm) fn pause() {
    if yields() {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}
