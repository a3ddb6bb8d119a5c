//! Reductions (MPI-4.1 §6.9), each blocking and started, and the layout of every operation in place
//! as a plan. All of them are collective.
//!
//! Started sums in place and long blocking sums follow a plan, whose order depends on the number of
//! ranks, their subtrees and the length, and in [`Algorithm::TwoLevel`] on their nodes. Long sums are
//! formed chunk by chunk: chunks stay in the caches, and their memory does not grow with the buffer.
//! Short blocking all-reduces call `MPI_Allreduce`.
#![allow(unsafe_code)]

use super::Communicator;
use crate::comm::Pending;
use crate::comm::algorithm::{Algorithm, Call, Choice, Collective, Cut};
use crate::comm::engine::{self, Ground, Request, Rounds, Task};
use crate::comm::mpi::{Mode, Values};
use crate::memory::{Buffer, Element, ElementType, HostArena, HostBuffer, Operation, Places};
use crate::sums::Subtrees;
use crate::trace::Name;
use crate::{Error, Result};

impl Communicator {
    /// Combines every rank's `send` in the root's `receive` (`MPI_Reduce`). `receive` is written on
    /// the root only. Collective.
    ///
    /// # Errors
    /// `root` is out of range, or the lengths differ on the root.
    pub fn reduce<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        operation: Operation,
        root: usize,
    ) -> Result<()> {
        self.check_reduce(send.len(), receive.len(), root)?;
        let _span = self.collective_span(Name::Reduce, size_of_val(send));
        let (send, receive) = (Values::of(send), Values::of_mut(receive));
        // SAFETY: both slices stay borrowed until the call is complete, and the lengths were
        // checked.
        self.block_on(|mpi, mode| unsafe { mpi.reduce(mode, send, receive, operation, root) });
        Ok(())
    }

    /// Starts combining every rank's `send` in the root's `receive` (`MPI_Ireduce`). `receive` is
    /// written on the root only. Collective.
    ///
    /// # Errors
    /// `root` is out of range, or the lengths differ on the root.
    pub fn start_reduce<B: HostBuffer>(
        &self,
        send: B,
        receive: B,
        operation: Operation,
        root: usize,
    ) -> Result<Pending<(B, B)>> {
        self.check_reduce(send.as_ref().len(), receive.as_ref().len(), root)?;
        let flight = self.collective_flight(Name::Reduce, size_of_val(send.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            let (send, receive) = (Values::of_mut(send.as_mut()), Values::of_mut(receive.as_mut()));
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.reduce(mode, send, receive, operation, root) }
        }))
    }

    fn check_reduce(&self, send: usize, receive: usize, root: usize) -> Result<()> {
        self.check_root("reducing", root)?;
        if self.rank() == root { self.check_equal("reducing", send, receive) } else { Ok(()) }
    }

    /// Replaces `values` by their combination over all ranks, the same bits on each. Long ones are combined
    /// chunk by chunk, which was faster on 2 to 4 ranks: by [`Algorithm::TwoLevel`] on up to 64 nodes of
    /// equally many ranks, a power of two up to 64, or else by [`Algorithm::Pairwise`] on up to 64 ranks; the
    /// limits of 64 are estimated. `MPI_Allreduce` does the rest. Collective.
    ///
    /// The minimum and the maximum of floats are unspecified where a term is NaN, and so is the sign of one
    /// that is 0, because MPI leaves both open.
    ///
    /// # Errors
    /// There is no memory for values that arrive.
    pub fn all_reduce<T: Element>(&self, values: &mut [T], operation: Operation) -> Result<()> {
        let _span = self.collective_span(Name::AllReduce, size_of_val(values));
        let choice = self.choice(Collective::AllReduce, Call::Blocking, values.len(), T::TYPE);
        if choice.algorithm != Algorithm::Mpi {
            return self.run_in_place(Collective::AllReduce, choice, values, operation);
        }
        let values = Values::of_mut(values);
        // SAFETY: the slice stays borrowed until the call is complete.
        self.block_on(|mpi, mode| unsafe { mpi.all_reduce(mode, None, values, operation) });
        Ok(())
    }

    /// Starts combining every rank's `send` in every rank's `receive` (`MPI_Iallreduce`).
    /// Collective.
    ///
    /// # Errors
    /// The lengths differ.
    pub fn start_all_reduce<B: HostBuffer>(
        &self,
        send: B,
        receive: B,
        operation: Operation,
    ) -> Result<Pending<(B, B)>> {
        self.check_equal("all-reducing", send.as_ref().len(), receive.as_ref().len())?;
        let flight = self.collective_flight(Name::AllReduce, size_of_val(send.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            let (send, receive) = (Values::of_mut(send.as_mut()), Values::of_mut(receive.as_mut()));
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.all_reduce(mode, Some(send), receive, operation) }
        }))
    }

    /// Starts an all-reduce in place: afterwards `values` holds the combination over all ranks, the
    /// same bits on each and in every run. On up to 64 ranks, and on any number
    /// [with subtrees](Communicator::with_subtrees), it sums in the order of
    /// [`Subtrees`](crate::sums::Subtrees), with the result of
    /// [`Communicator::start_reduce_scatter`]: short buffers are sent to every rank at once
    /// ([`Algorithm::Direct`]), long ones part by part ([`Algorithm::Pairwise`]), between nodes first
    /// within each ([`Algorithm::TwoLevel`]) if that keeps the order. More ranks without subtrees, unless
    /// they go in two levels, use [`Algorithm::Doubling`] and [`Algorithm::Halving`], whose orders are fixed
    /// too. Collective.
    ///
    /// # Errors
    /// There is no memory for values that arrive, the buffer does not hold whole arrays of each
    /// subtree, or it is a device's and `operation` is not a sum or there are several arrays.
    pub fn start_all_reduce_in_place<B: Buffer>(
        &self,
        values: B,
        operation: Operation,
    ) -> Result<Pending<B>> {
        self.check_sums("all-reducing", &values, 1)?;
        let request = self.in_place(&values, Collective::AllReduce, Some(operation));
        self.start(values, request)
    }

    /// Replaces `values` on rank r by the combination over ranks 0 to r (`MPI_Scan`, MPI-4.1
    /// §6.11.1). Collective.
    pub fn scan<T: Element>(&self, values: &mut [T], operation: Operation) {
        let _span = self.collective_span(Name::Scan, size_of_val(values));
        let values = Values::of_mut(values);
        // SAFETY: the slice stays borrowed until the call is complete.
        self.block_on(|mpi, mode| unsafe { mpi.scan(mode, None, values, operation) });
    }

    /// Starts combining the `send` of ranks 0 to r in rank r's `receive` (`MPI_Iscan`). Collective.
    ///
    /// # Errors
    /// The lengths differ.
    pub fn start_scan<B: HostBuffer>(
        &self,
        send: B,
        receive: B,
        operation: Operation,
    ) -> Result<Pending<(B, B)>> {
        self.check_equal("scanning", send.as_ref().len(), receive.as_ref().len())?;
        let flight = self.collective_flight(Name::Scan, size_of_val(send.as_ref()));
        Ok(self.start_call(flight, (send, receive), |mpi, mode, (send, receive)| {
            let (send, receive) = (Values::of_mut(send.as_mut()), Values::of_mut(receive.as_mut()));
            // SAFETY: the pending operation owns the buffers, which keep their values in place.
            unsafe { mpi.scan(mode, Some(send), receive, operation) }
        }))
    }

    /// Combines every rank's `send` and leaves part r on rank r (the operation of
    /// `MPI_Reduce_scatter_block`). Sums and products have the bits of
    /// [`Communicator::start_reduce_scatter`]. Collective.
    ///
    /// The minimum and the maximum of floats are unspecified where a term is NaN, and so is the sign of one
    /// that is 0: MPI, which leaves both open, combines up to 4 KiB on two ranks.
    ///
    /// # Errors
    /// `send` does not hold as many elements as `receive` for each rank.
    pub fn reduce_scatter<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        operation: Operation,
    ) -> Result<()> {
        self.check_parts("reduce-scattering", send.len(), receive.len())?;
        let _span = self.collective_span(Name::ReduceScatter, size_of_val(send));
        let (collective, start) = (Collective::ReduceScatter, self.rank() * receive.len());
        let choice = self.choice(collective, Call::Blocking, send.len(), T::TYPE);
        match choice.algorithm {
            Algorithm::Mpi => {
                let (send, receive) = (Values::of(send), Values::of_mut(receive));
                // SAFETY: both slices stay borrowed until the call returns, and the lengths were
                // checked.
                self.block_on(|mpi, mode| unsafe { mpi.reduce_scatter(mode, send, receive, operation) });
                Ok(())
            }
            Algorithm::Pairwise => {
                receive.copy_from_slice(&send[start..][..receive.len()]);
                let sums = receive.as_mut_ptr().wrapping_sub(start).cast();
                let places = Places { values: send.as_ptr().cast_mut().cast(), sums };
                // SAFETY: both slices stay borrowed until the operation is done; the pairwise
                // exchange writes nothing into what it sends, and combines this rank's own part
                // only.
                unsafe { self.run(collective, choice, places, send.len(), T::TYPE, operation) }
            }
            _ => {
                // other algorithms also change parts of other ranks on their way
                let mut values = send.to_vec();
                self.run_in_place(collective, choice, &mut values, operation)?;
                receive.copy_from_slice(&values[start..][..receive.len()]);
                Ok(())
            }
        }
    }

    /// Starts a reduce-scatter in place: afterwards part `rank` of `values` holds the combination
    /// of that part over all ranks, in the order of [`Subtrees`](crate::sums::Subtrees), so that the
    /// bits do not depend on MPI. The other parts are arbitrary afterwards. Collective.
    ///
    /// The algorithm on a node is the pairwise exchange: every part travels once, straight to its owner,
    /// in one round, so it overlaps with computation better than a ring. For 16 MiB on two ranks it
    /// took 1.0 ms, and `MPI_Ireduce_scatter_block` of Open MPI 4.1.4 took 9.7 ms.
    ///
    /// # Errors
    /// The length of a subtree's array is not a multiple of the number of ranks, there is no memory
    /// for values that arrive, or the buffer is a device's and `operation` is not a sum or there are
    /// several arrays.
    pub fn start_reduce_scatter<B: Buffer>(&self, values: B, operation: Operation) -> Result<Pending<B>> {
        self.check_sums("reduce-scattering", &values, self.size())?;
        let request = self.in_place(&values, Collective::ReduceScatter, Some(operation));
        self.start(values, request)
    }

    /// Runs MPI's own blocking operation on a buffer in place, with a sum if it is a reduction,
    /// even if MPI cannot read that memory. For tools that test MPI. Collective.
    ///
    /// # Errors
    /// The buffer cannot be lent.
    pub fn run_inside_mpi<B: Buffer>(&self, collective: Collective, mut buffer: B) -> Result<B> {
        let (len, element) = (buffer.len(), buffer.element_type());
        let request = self.request(collective, Task::Mpi(collective), Some(Operation::Sum), len);
        // SAFETY: the buffer stays here, untouched, until the loan is dropped below.
        let mut loan = unsafe { buffer.lend(&request.needs(len, true))? };
        engine::wait_until(|| loan.arena().is_here(0));
        let (mpi, values) = (&self.group.mpi, Values::new(loan.arena().values(), len, element));
        // SAFETY: the values are lent until the call returns.
        unsafe {
            match collective {
                Collective::AllReduce => mpi.all_reduce(Mode::Blocking, None, values, Operation::Sum),
                Collective::AllGather => mpi.all_gather(Mode::Blocking, None, values),
                Collective::Broadcast { root } => mpi.broadcast(Mode::Blocking, values, root),
                Collective::ReduceScatter => {
                    unreachable!("in place MPI would write the part to the start of the buffer")
                }
            }
        }
        drop(loan);
        buffer.restore(request.receive_range);
        Ok(buffer)
    }
}

/// The layout of operations in place.
impl Communicator {
    /// Lays out `collective` on `values`.
    pub(super) fn in_place<B: Buffer>(
        &self,
        values: &B,
        collective: Collective,
        operation: Option<Operation>,
    ) -> Request {
        let num_sums = match collective {
            Collective::AllReduce | Collective::ReduceScatter => self.subtrees().most(),
            _ => 1,
        };
        let (len, element) = (values.len() / num_sums, values.element_type());
        let choice = self.choice(collective, self.call_on::<B>(), len, element);
        let task = match choice.algorithm {
            Algorithm::Mpi => Task::Mpi(collective),
            Algorithm::Ipc => self.by_peers(collective, self.call_on::<B>(), len, element),
            _ => self.rounds(collective, choice, self.subtrees(), len, element),
        };
        let request = self.request(collective, task, operation, len);
        // every other array is sent too
        let send_range = if num_sums == 1 { request.send_range } else { 0..values.len() };
        Request { send_range, ..request }
    }

    /// Checks that `values` holds the arrays of all subtrees, of which each is cut into `parts`.
    fn check_sums<B: Buffer>(&self, doing: &str, values: &B, parts: usize) -> Result<()> {
        let num_sums = self.subtrees().most();
        if self.subtrees().num_leaves() != self.size() && !B::IS_ON_HOST {
            return Err(Error::failed(doing, "a device adds one sum of each rank"));
        }
        if !values.len().is_multiple_of(num_sums * parts) {
            let why = format!("{} elements are not {num_sums} sums of {parts} equal parts", values.len());
            return Err(Error::failed(doing, why));
        }
        Ok(())
    }

    /// Returns the plan for `len` elements.
    fn rounds(
        &self,
        collective: Collective,
        choice: Choice,
        subtrees: Subtrees,
        len: usize,
        element: ElementType,
    ) -> Task {
        let plan = self.group.plan(collective, choice.algorithm, subtrees);
        let cut = Cut::new(len, plan.parts, choice.chunk / element.bytes(), collective.is_owned());
        Task::Rounds { collective, plan, cut }
    }

    /// Adds the ranges that `collective` sends and changes on this rank.
    fn request(
        &self,
        collective: Collective,
        task: Task,
        operation: Option<Operation>,
        len: usize,
    ) -> Request {
        let [send_range, receive_range] = collective.ranges(self.rank(), self.size(), len);
        Request { task, operation, send_range, receive_range }
    }

    /// Runs `collective` on `values` to its end.
    pub(super) fn run_in_place<T: Element>(
        &self,
        collective: Collective,
        choice: Choice,
        values: &mut [T],
        operation: Operation,
    ) -> Result<()> {
        let place = values.as_mut_ptr().cast();
        let places = Places { values: place, sums: place };
        // SAFETY: the slice stays borrowed until the operation is done.
        unsafe { self.run(collective, choice, places, values.len(), T::TYPE, operation) }
    }

    /// Runs `collective` on `len` elements at `places` to its end.
    ///
    /// # Safety
    /// Until the call returns, the elements (at `values` all, at `sums` those that the plan
    /// combines) are valid, and nobody else accesses them.
    unsafe fn run(
        &self,
        collective: Collective,
        choice: Choice,
        places: Places,
        len: usize,
        element: ElementType,
        operation: Operation,
    ) -> Result<()> {
        let one_each = Subtrees::one_each(self.size());
        let task = self.rounds(collective, choice, one_each, len, element);
        let request = self.request(collective, task, Some(operation), len);
        let inbox_len = request.needs(len, false).inbox_len;
        // SAFETY: the caller guarantees that the elements are valid and accessed by nobody else
        // until this function returns, which drops the arena.
        let mut arena = unsafe { HostArena::new(places, element, operation, inbox_len)? };
        let Task::Rounds { plan, cut, .. } = request.task else { unreachable!("it was made above") };
        let first_tag = self.group.take_tags(cut.chunks());
        let (mpi, receive_range) = (&self.group.mpi, request.receive_range);
        let mut ground = Ground { mpi, arena: &mut arena, element, receive_range };
        let mut rounds = Rounds::start(plan, cut, first_tag, &mut ground);
        engine::wait_until(|| rounds.advance(&mut ground));
        Ok(())
    }
}
