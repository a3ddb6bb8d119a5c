//! A group of ranks that can talk: typed point-to-point messages and collective operations on slices.

use std::rc::Rc;

use mpi::topology::{Color, Communicator as _, SimpleCommunicator};

use super::links::Links;
use super::raw::{Channel, Raw, Requests, wait_all};
use super::{Element, Operation};
use crate::observe::{self, Name, Span};
use crate::{Error, Result};

/// Elements that an in-place all-reduce sends at a time: 4 MiB of `f32`, so that neither our scratch nor MPI's grows
/// with the message. Open MPI's reductions allocate their scratch afresh for each call and pay for its page faults.
const ALL_REDUCE_CHUNK: usize = 1 << 20;

/// A group of ranks, numbered from 0 to `size − 1`.
///
/// Operations are blocking unless their name begins with `start_`. "Collective" means that every rank of the group
/// calls it, in the same order relative to the group's other collective operations, with the same root, operation and
/// lengths. Lengths and ranks are checked before MPI is called; what MPI itself finds wrong ends the job.
pub struct Communicator {
    pub(super) raw: Rc<Raw>,
}

impl Communicator {
    /// Collective over `communicator`; in traces its operations are named under `links`.
    pub(super) fn new(communicator: SimpleCommunicator, links: Links) -> Communicator {
        Communicator { raw: Rc::new(Raw::new(communicator, links)) }
    }

    /// This process's number in the group. Not collective.
    pub fn rank(&self) -> usize {
        self.raw.rank
    }

    /// The number of ranks in the group. Not collective.
    pub fn size(&self) -> usize {
        self.raw.size
    }

    /// True on rank 0, which speaks for the group. Not collective.
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// Makes a communicator of the ranks that pass the same `color`, ordered by `key`, then by rank (`MPI_Comm_split`,
    /// MPI-4.1 §7.4.2). Collective.
    ///
    /// # Errors
    /// `color` or `key` is above 2³¹ − 1.
    pub fn split(&self, color: usize, key: usize) -> Result<Communicator> {
        let number = |value: usize, name: &str| {
            i32::try_from(value)
                .map_err(|_| Error::failed("splitting a communicator", format!("{name} {value} is above 2³¹ − 1")))
        };
        let mpi_color = Color::with_value(number(color, "the color")?);
        let part = self.raw.public.split_by_color_with_key(mpi_color, number(key, "the key")?);
        let part = part.expect("MPI_Comm_split gives a communicator for every color that is not undefined");
        Ok(Communicator::new(part, self.raw.links.split(color)))
    }

    /// Another communicator of the same ranks, whose messages never meet those of this one. Collective.
    ///
    /// # Errors
    /// There are more ranks than MPI can count.
    pub fn duplicate(&self) -> Result<Communicator> {
        self.split(0, self.rank())
    }

    /// For tests: splits messages above `limit` elements as if the MPI could count no further.
    #[doc(hidden)]
    pub fn set_message_limit(&self, limit: usize) {
        self.raw.set_limit(limit);
    }

    /// Returns when every rank has called it (`MPI_Barrier`, MPI-4.1 §6.3). Collective.
    pub fn barrier(&self) {
        let _span = self.collective_span::<u8>(Name::Barrier, 0);
        self.raw.barrier();
    }

    /// A span of the next collective operation, of `len` elements on this rank.
    fn collective_span<T>(&self, name: Name, len: usize) -> Span {
        observe::communication(name, len * size_of::<T>(), self.raw.links.collective(), None)
    }

    /// A span of the next message between two ranks, of `len` elements.
    fn message_span<T>(&self, name: Name, len: usize, (from, to): (usize, usize), tag: i32) -> Span {
        let peer = if name == Name::Send { to } else { from };
        observe::communication(
            name,
            len * size_of::<T>(),
            self.raw.links.message(from, to, tag),
            self.raw.in_job(peer),
        )
    }

    fn complete(&self, post: impl FnOnce(&Raw, &mut Requests)) {
        let mut requests = self.raw.take_requests();
        post(&self.raw, &mut requests);
        wait_all(&mut requests);
        requests.clear();
        self.raw.recycle_requests(requests);
    }
}

/// Point-to-point messages. Not collective: one rank sends, another receives, both name the same tag.
impl Communicator {
    /// Sends `values` to rank `to` (`MPI_Send`, MPI-4.1 §3.2); may wait until the receiver has come.
    ///
    /// # Errors
    /// `to` or `tag` is out of range.
    pub fn send<T: Element>(&self, values: &[T], to: usize, tag: i32) -> Result<()> {
        self.check_peer("sending", to, tag)?;
        let _span = self.message_span::<T>(Name::Send, values.len(), (self.rank(), to), tag);
        self.raw.blocking_send(values, to, tag);
        Ok(())
    }

    /// Waits for a message from rank `from` and returns its number of elements, which may be fewer than `values`
    /// holds (`MPI_Mprobe` and `MPI_Mrecv`, MPI-4.1 §3.8).
    ///
    /// # Errors
    /// `from` or `tag` is out of range, or the message is longer than `values`, and then it is lost.
    pub fn receive<T: Element>(&self, values: &mut [T], from: usize, tag: i32) -> Result<usize> {
        self.check_peer("receiving", from, tag)?;
        let _span = self.message_span::<T>(Name::Receive, values.len(), (from, self.rank()), tag);
        self.raw.blocking_receive(values, from, tag).map_err(|length| {
            let (doing, room) = (format!("receiving from rank {from} with tag {tag}"), values.len());
            Error::failed(doing, format!("the message has {length} elements, the buffer room for {room}"))
        })
    }

    /// Sends `values` to rank `to` and meanwhile receives as many from rank `from` (`MPI_Sendrecv`, MPI-4.1 §3.10), so
    /// that ranks in a ring need not take turns.
    ///
    /// # Errors
    /// A rank or the tag is out of range.
    pub fn send_receive<T: Element>(
        &self,
        send: &[T],
        to: usize,
        receive: &mut [T],
        from: usize,
        tag: i32,
    ) -> Result<()> {
        self.check_peer("sending", to, tag)?;
        self.check_peer("receiving", from, tag)?;
        self.raw.links.message(self.rank(), to, tag);
        let _span = self.message_span::<T>(Name::SendReceive, receive.len(), (from, self.rank()), tag);
        self.complete(|raw, requests| raw.post_send_receive((send, to), (receive, from), tag, requests));
        Ok(())
    }
}

/// Collective operations (MPI-4.1 §6).
impl Communicator {
    /// Copies the root's `values` to every rank (`MPI_Bcast`). Collective.
    ///
    /// # Errors
    /// `root` is out of range.
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        self.check_root("broadcasting", root)?;
        let _span = self.collective_span::<T>(Name::Broadcast, values.len());
        self.complete(|raw, requests| raw.post_broadcast(values, root, requests));
        Ok(())
    }

    /// Hands part r of the root's `send` to rank r's `receive` (`MPI_Scatter`). Collective; `send` is looked at on the
    /// root only.
    ///
    /// # Errors
    /// `root` is out of range, or the root's `send` does not hold a part for each rank.
    pub fn scatter<T: Element>(&self, send: &[T], receive: &mut [T], root: usize) -> Result<()> {
        self.check_root("scattering", root)?;
        if self.rank() == root {
            self.check_parts("scattering", send.len(), receive.len())?;
        }
        let _span = self.collective_span::<T>(Name::Scatter, receive.len());
        self.complete(|raw, requests| raw.post_scatter(send, receive, root, requests));
        Ok(())
    }

    /// Collects every rank's `send`, in rank order, in the root's `receive` (`MPI_Gather`). Collective; `receive` is
    /// looked at on the root only.
    ///
    /// # Errors
    /// `root` is out of range, or the root's `receive` does not hold a part for each rank.
    pub fn gather<T: Element>(&self, send: &[T], receive: &mut [T], root: usize) -> Result<()> {
        self.check_root("gathering", root)?;
        if self.rank() == root {
            self.check_parts("gathering", receive.len(), send.len())?;
        }
        let _span = self.collective_span::<T>(Name::Gather, send.len());
        self.complete(|raw, requests| raw.post_gather(send, receive, root, requests));
        Ok(())
    }

    /// Collects every rank's `send`, in rank order, in every rank's `receive` (`MPI_Allgather`). Collective.
    ///
    /// # Errors
    /// `receive` does not hold a part for each rank.
    pub fn all_gather<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        self.check_parts("all-gathering", receive.len(), send.len())?;
        let _span = self.collective_span::<T>(Name::AllGather, receive.len());
        self.complete(|raw, requests| raw.post_all_gather(send, receive, requests));
        Ok(())
    }

    /// Sends part s of `send` to rank s, where it becomes part r of `receive` (`MPI_Alltoall`). Collective.
    ///
    /// # Errors
    /// The two lengths differ, or are no multiple of the number of ranks.
    pub fn all_to_all<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        let count = self.check_all_to_all(send.len(), receive.len())?;
        let _span = self.collective_span::<T>(Name::AllToAll, send.len());
        self.complete(|raw, requests| raw.post_all_to_all(send, receive, count, requests));
        Ok(())
    }

    /// Combines every rank's `send` in the root's `receive` (`MPI_Reduce`). Collective; `receive` is looked at on the
    /// root only.
    ///
    /// # Errors
    /// `root` is out of range, or the root's lengths differ.
    pub fn reduce<T: Element>(&self, send: &[T], receive: &mut [T], operation: Operation, root: usize) -> Result<()> {
        self.check_root("reducing", root)?;
        if self.rank() == root {
            self.check_equal("reducing", send.len(), receive.len())?;
        }
        let _span = self.collective_span::<T>(Name::Reduce, send.len());
        self.complete(|raw, requests| raw.post_reduce(send, receive, operation, root, requests));
        Ok(())
    }

    /// Replaces `values` by their combination over all ranks (`MPI_Allreduce`), the same bits on each. Collective.
    ///
    /// # Errors
    /// There is no memory for a chunk of scratch.
    pub fn all_reduce<T: Element>(&self, values: &mut [T], operation: Operation) -> Result<()> {
        let _span = self.collective_span::<T>(Name::AllReduce, values.len());
        let mut scratch = self.raw.take_scratch::<T>(values.len().min(ALL_REDUCE_CHUNK))?;
        for chunk in values.chunks_mut(ALL_REDUCE_CHUNK) {
            let result = &mut bytemuck::cast_slice_mut(&mut scratch)[..chunk.len()];
            self.raw.blocking_all_reduce(chunk, result, operation);
            chunk.copy_from_slice(result);
        }
        self.raw.recycle(scratch);
        Ok(())
    }

    /// Combines every rank's `send` and leaves part r on rank r (what `MPI_Reduce_scatter_block` does, by the pairwise
    /// exchange of [`Communicator::start_reduce_scatter`]). Collective.
    ///
    /// # Errors
    /// `send` does not hold as many elements as `receive` for each rank.
    pub fn reduce_scatter<T: Element>(&self, send: &[T], receive: &mut [T], operation: Operation) -> Result<()> {
        self.check_parts("reduce-scattering", send.len(), receive.len())?;
        let values = self.start_reduce_scatter(send.to_vec(), operation)?.wait();
        receive.copy_from_slice(&values[self.rank() * receive.len()..][..receive.len()]);
        Ok(())
    }
}

/// Checks that come before the call, because MPI's own come as the end of the job.
impl Communicator {
    pub(super) fn check_peer(&self, doing: &str, peer: usize, tag: i32) -> Result<()> {
        if peer >= self.size() {
            let why = format!("there is no rank {peer} in a communicator of {}", self.size());
            return Err(Error::failed(doing, why));
        }
        if tag < 0 {
            return Err(Error::failed(doing, format!("tag {tag} is negative")));
        }
        Ok(())
    }

    pub(super) fn check_root(&self, doing: &str, root: usize) -> Result<()> {
        self.check_peer(doing, root, 0)
    }

    pub(super) fn check_parts(&self, doing: &str, whole: usize, part: usize) -> Result<()> {
        if whole != part * self.size() {
            let size = self.size();
            let why = format!("{whole} elements are not {size} parts of {part}, one for each rank");
            return Err(Error::failed(doing, why));
        }
        Ok(())
    }

    pub(super) fn check_equal(&self, doing: &str, send: usize, receive: usize) -> Result<()> {
        if send != receive {
            let why = format!("{send} elements to send, room for {receive} to receive");
            return Err(Error::failed(doing, why));
        }
        Ok(())
    }

    pub(super) fn check_all_to_all(&self, send: usize, receive: usize) -> Result<usize> {
        self.check_equal("all-to-all", send, receive)?;
        self.part_length("all-to-all", send)
    }

    pub(super) fn part_length(&self, doing: &str, whole: usize) -> Result<usize> {
        self.check_parts(doing, whole, whole / self.size())?;
        Ok(whole / self.size())
    }
}

/// Slices handed to the raw calls, to be completed before the slices' borrows end.
#[allow(unsafe_code)]
impl Raw {
    // SAFETY, for each of these: `Communicator::complete` waits for the requests while the slices are still borrowed,
    // and the public operation has checked the lengths.

    fn post_send_receive<T: Element>(
        &self,
        (send, to): (&[T], usize),
        (receive, from): (&mut [T], usize),
        tag: i32,
        requests: &mut Requests,
    ) {
        // SAFETY: see the head of this block.
        unsafe {
            self.receive(requests, Channel::Public, (receive.as_mut_ptr(), receive.len()), from, tag);
            self.send(requests, Channel::Public, (send.as_ptr(), send.len()), to, tag);
        }
    }

    fn post_broadcast<T: Element>(&self, values: &mut [T], root: usize, requests: &mut Requests) {
        // SAFETY: see the head of this block.
        unsafe { self.broadcast(requests, (values.as_mut_ptr(), values.len()), root) }
    }

    fn post_scatter<T: Element>(&self, send: &[T], receive: &mut [T], root: usize, requests: &mut Requests) {
        // SAFETY: see the head of this block.
        unsafe { self.scatter(requests, send.as_ptr(), (receive.as_mut_ptr(), receive.len()), root) }
    }

    fn post_gather<T: Element>(&self, send: &[T], receive: &mut [T], root: usize, requests: &mut Requests) {
        // SAFETY: see the head of this block.
        unsafe { self.gather(requests, (send.as_ptr(), send.len()), receive.as_mut_ptr(), root) }
    }

    fn post_all_gather<T: Element>(&self, send: &[T], receive: &mut [T], requests: &mut Requests) {
        // SAFETY: see the head of this block.
        unsafe { self.all_gather(requests, (send.as_ptr(), send.len()), receive.as_mut_ptr()) }
    }

    fn post_all_to_all<T: Element>(&self, send: &[T], receive: &mut [T], count: usize, requests: &mut Requests) {
        // SAFETY: see the head of this block.
        unsafe { self.all_to_all(requests, (send.as_ptr(), count), receive.as_mut_ptr()) }
    }

    fn post_reduce<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        operation: Operation,
        root: usize,
        requests: &mut Requests,
    ) {
        // SAFETY: see the head of this block.
        unsafe { self.reduce(requests, (send.as_ptr(), send.len()), receive.as_mut_ptr(), operation, root) }
    }
}
