//! Collective operations that move values (MPI-4.1 §6.3 to §6.8), each blocking and started. All of
//! them are collective: every rank calls them in the same order, with the same lengths and root.
#![allow(unsafe_code)]

use super::Communicator;
use crate::Result;
use crate::comm::Pending;
use crate::comm::algorithm::{Algorithm, Call, Collective};
use crate::comm::mpi::Values;
use crate::memory::{Buffer, Element, HostBuffer, Operation};
use crate::trace::Name;

/// Returns the values of a host buffer that a [`Pending`] owns.
fn values<B: HostBuffer>(buffer: &mut B) -> Values {
    Values::of_mut(buffer.as_mut())
}

impl Communicator {
    /// Blocks until every rank has called it (`MPI_Barrier`). Collective.
    pub fn barrier(&self) {
        let _span = self.collective_span(Name::Barrier, 0);
        self.block_on(|mpi, mode| mpi.barrier(mode));
    }

    /// Starts a barrier: the wait ends when every rank has started it (`MPI_Ibarrier`). Collective.
    pub fn start_barrier(&self) -> Pending<()> {
        self.start_call(self.collective_flight(Name::Barrier, 0), (), |mpi, mode, ()| mpi.barrier(mode))
    }

    /// Copies the root's `values` to every rank (`MPI_Bcast`; from 2 GiB on, [`Algorithm::Chain`]).
    /// Collective.
    ///
    /// # Errors
    /// `root` is out of range.
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        self.check_root("broadcasting", root)?;
        let _span = self.collective_span(Name::Broadcast, size_of_val(values));
        let collective = Collective::Broadcast { root };
        let choice = self.choice(collective, Call::Blocking, values.len(), T::TYPE);
        if choice.algorithm != Algorithm::Mpi {
            return self.run_in_place(collective, choice, values, Operation::Sum);
        }
        let values = Values::of_mut(values);
        // SAFETY: the slice stays borrowed until the call is complete.
        self.block_on(|mpi, mode| unsafe { mpi.broadcast(mode, values, root) });
        Ok(())
    }

    /// Starts copying `values` of the root to every rank (`MPI_Ibcast`; from 2 GiB on,
    /// [`Algorithm::Chain`]; device memory follows a plan at any length). Collective.
    ///
    /// # Errors
    /// `root` is out of range, or there is no memory for staging.
    pub fn start_broadcast<B: Buffer>(&self, values: B, root: usize) -> Result<Pending<B>> {
        self.check_root("broadcasting", root)?;
        let request = self.in_place(&values, Collective::Broadcast { root }, None);
        self.start(values, request)
    }

    /// Hands part r of the root's `send` to rank r's `receive` (`MPI_Scatter`). `send` is read on
    /// the root only. Collective.
    ///
    /// # Errors
    /// `root` is out of range, or the root's `send` does not hold a part for each rank.
    pub fn scatter<T: Element>(&self, send: &[T], receive: &mut [T], root: usize) -> Result<()> {
        self.check_scatter(send.len(), receive.len(), root)?;
        let _span = self.collective_span(Name::Scatter, size_of_val(receive));
        let (send, receive) = (Values::of(send), Values::of_mut(receive));
        // SAFETY: both slices stay borrowed until the call is complete, and the lengths were
        // checked.
        self.block_on(|mpi, mode| unsafe { mpi.scatter(mode, send, receive, root) });
        Ok(())
    }

    /// Starts handing part r of the root's `send` to rank r's `receive` (`MPI_Iscatter`). `send` is
    /// read on the root only. Collective.
    ///
    /// # Errors
    /// `root` is out of range, or the root's `send` does not hold a part for each rank.
    pub fn start_scatter<B: HostBuffer>(&self, send: B, receive: B, root: usize) -> Result<Pending<(B, B)>> {
        self.check_scatter(send.as_ref().len(), receive.as_ref().len(), root)?;
        let flight = self.collective_flight(Name::Scatter, size_of_val(receive.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.scatter(mode, values(send), values(receive), root) }
        }))
    }

    fn check_scatter(&self, send: usize, receive: usize, root: usize) -> Result<()> {
        self.check_root("scattering", root)?;
        if self.rank() == root { self.check_parts("scattering", send, receive) } else { Ok(()) }
    }

    /// Collects every rank's `send`, in rank order, in the root's `receive` (`MPI_Gather`).
    /// `receive` is written on the root only. Collective.
    ///
    /// # Errors
    /// `root` is out of range, or the root's `receive` does not hold a part for each rank.
    pub fn gather<T: Element>(&self, send: &[T], receive: &mut [T], root: usize) -> Result<()> {
        self.check_gather(send.len(), receive.len(), root)?;
        let _span = self.collective_span(Name::Gather, size_of_val(send));
        let (send, receive) = (Values::of(send), Values::of_mut(receive));
        // SAFETY: both slices stay borrowed until the call is complete, and the lengths were
        // checked.
        self.block_on(|mpi, mode| unsafe { mpi.gather(mode, send, receive, root) });
        Ok(())
    }

    /// Starts collecting every rank's `send` in the root's `receive` (`MPI_Igather`). `receive` is
    /// written on the root only. Collective.
    ///
    /// # Errors
    /// `root` is out of range, or the root's `receive` does not hold a part for each rank.
    pub fn start_gather<B: HostBuffer>(&self, send: B, receive: B, root: usize) -> Result<Pending<(B, B)>> {
        self.check_gather(send.as_ref().len(), receive.as_ref().len(), root)?;
        let flight = self.collective_flight(Name::Gather, size_of_val(send.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.gather(mode, values(send), values(receive), root) }
        }))
    }

    fn check_gather(&self, send: usize, receive: usize, root: usize) -> Result<()> {
        self.check_root("gathering", root)?;
        if self.rank() == root { self.check_parts("gathering", receive, send) } else { Ok(()) }
    }

    /// Collects every rank's `send`, in rank order, in every rank's `receive` (`MPI_Allgather`).
    /// Collective.
    ///
    /// # Errors
    /// `receive` does not hold a part for each rank.
    pub fn all_gather<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        self.check_parts("all-gathering", receive.len(), send.len())?;
        let _span = self.collective_span(Name::AllGather, size_of_val(receive));
        let (send, receive) = (Values::of(send), Values::of_mut(receive));
        // SAFETY: both slices stay borrowed until the call is complete, and the lengths were
        // checked.
        self.block_on(|mpi, mode| unsafe { mpi.all_gather(mode, Some(send), receive) });
        Ok(())
    }

    /// Starts collecting every rank's `send`, in rank order, in every rank's `receive`
    /// (`MPI_Iallgather`). Collective.
    ///
    /// # Errors
    /// `receive` does not hold a part for each rank.
    pub fn start_all_gather<B: HostBuffer>(&self, send: B, receive: B) -> Result<Pending<(B, B)>> {
        self.check_parts("all-gathering", receive.as_ref().len(), send.as_ref().len())?;
        let flight = self.collective_flight(Name::AllGather, size_of_val(receive.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.all_gather(mode, Some(values(send)), values(receive)) }
        }))
    }

    /// Starts an all-gather in place: every rank receives part r of `values` from rank r.
    /// Collective.
    ///
    /// # Errors
    /// The length is not a multiple of the number of ranks, or there is no memory for staging.
    pub fn start_all_gather_in_place<B: Buffer>(&self, values: B) -> Result<Pending<B>> {
        self.check_divisible("all-gathering", values.len())?;
        let request = self.in_place(&values, Collective::AllGather, None);
        self.start(values, request)
    }

    /// Sends part s of `send` to rank s, where it becomes part r of `receive` (`MPI_Alltoall`).
    /// Collective.
    ///
    /// # Errors
    /// The two lengths differ, or are not a multiple of the number of ranks.
    pub fn all_to_all<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        self.check_all_to_all(send.len(), receive.len())?;
        let _span = self.collective_span(Name::AllToAll, size_of_val(send));
        let (send, receive) = (Values::of(send), Values::of_mut(receive));
        // SAFETY: both slices stay borrowed until the call is complete, and the lengths were
        // checked.
        self.block_on(|mpi, mode| unsafe { mpi.all_to_all(mode, send, receive) });
        Ok(())
    }

    /// Starts sending part s of `send` to rank s, where it becomes part r of `receive`
    /// (`MPI_Ialltoall`). Collective.
    ///
    /// # Errors
    /// The two lengths differ, or are not a multiple of the number of ranks.
    pub fn start_all_to_all<B: HostBuffer>(&self, send: B, receive: B) -> Result<Pending<(B, B)>> {
        self.check_all_to_all(send.as_ref().len(), receive.as_ref().len())?;
        let flight = self.collective_flight(Name::AllToAll, size_of_val(send.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.all_to_all(mode, values(send), values(receive)) }
        }))
    }
}
