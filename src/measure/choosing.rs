//! The choice of an algorithm for a run, and the name of the algorithm that a run used.

use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator, DeviceCommunicator};

/// Calls `run`, whose operations on `all` are done by `choice` if there is one, and returns its
/// result with the algorithm that the last of them used. Collective.
///
/// # Errors
/// Those of `run`.
pub(super) fn on_host<R>(
    all: &Communicator,
    choice: Option<Choice>,
    run: impl FnOnce(&Communicator) -> Result<R>,
) -> Result<(R, Algorithm)> {
    all.set_choice(choice);
    let outcome = run(all);
    let algorithm = all.last_algorithm();
    all.set_choice(None);
    Ok((outcome?, algorithm))
}

/// Does for device buffers what [`on_host`] does for host buffers. Collective.
///
/// # Errors
/// Those of `run`.
pub(super) fn on_device<R>(
    all: &DeviceCommunicator,
    choice: Option<Choice>,
    run: impl FnOnce(&DeviceCommunicator) -> Result<R>,
) -> Result<(R, Algorithm)> {
    all.set_choice(choice);
    let outcome = run(all)?;
    Ok((outcome, all.last_algorithm()))
}

/// Returns the choice of MPI's own call on device buffers. CUDA-aware MPIs may crash in their
/// non-blocking reductions (open-mpi/ompi#9845), so the blocking call can be chosen.
pub fn mpi_on_device(is_blocking: bool) -> Choice {
    Choice::whole(if is_blocking { Algorithm::MpiBlocking } else { Algorithm::Mpi })
}
