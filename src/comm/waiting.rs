//! Waiting for MPI's requests.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use mpi::ffi;

/// Unfinished MPI requests.
pub(super) type Requests = Vec<ffi::MPI_Request>;

/// True when all of `requests` are complete; gives MPI the occasion to move their data along.
pub(super) fn test_all(requests: &mut Requests) -> bool {
    let mut flag = 0;
    // SAFETY: the handles are this process's own, and MPI writes null over those that it completes.
    unsafe {
        ffi::MPI_Testall(
            requests.len() as c_int,
            requests.as_mut_ptr(),
            &mut flag,
            ffi::RSMPI_STATUSES_IGNORE,
        );
    }
    flag != 0
}

/// True where ranks are more than cores, so that one that waits must let the others work: some MPIs only spin.
static YIELDS: AtomicBool = AtomicBool::new(false);

/// Says whether there are more ranks than cores, somewhere in the job: blocking calls are then started and waited for, and the two kinds do not
/// match (MPI-4.1 §6.12). Collective.
pub(super) fn yield_while_waiting(yields: bool) {
    YIELDS.store(yields, Ordering::Relaxed);
}

/// True if waiting ranks yield.
pub(super) fn yields() -> bool {
    YIELDS.load(Ordering::Relaxed)
}

/// Returns when all of `requests` are complete; nothing else moves on meanwhile but MPI's own.
pub(super) fn wait_inside(requests: &mut Requests) {
    // SAFETY: as in `test_all`.
    unsafe {
        ffi::MPI_Waitall(requests.len() as c_int, requests.as_mut_ptr(), ffi::RSMPI_STATUSES_IGNORE);
    }
}

/// Between two looks at what is not done.
pub(super) fn pause() {
    if yields() {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}
