//! A group of ranks that can talk: typed point-to-point messages and collective operations on slices.

use std::collections::HashSet;
use std::rc::Rc;

use mpi::topology::{Color, Communicator as _, SimpleCommunicator};

use super::algorithm::{Algorithm, Collective};
use super::blocking::duplicate;
use super::choice::{self, Choice};
use super::links::Links;
use super::raw::Raw;
use super::{Element, Operation, Transfers};
use crate::trace::{self, Name, Span};
use crate::{Error, Result};

/// The largest tag: what every MPI has (MPI-4.1 §9.1.2).
pub const LARGEST_TAG: i32 = 32_767;

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

    /// The number of nodes that the group spans. Not collective.
    pub fn num_nodes(&self) -> usize {
        self.raw.with_ranks(|ranks| ranks.nodes.iter().collect::<HashSet<_>>().len())
    }

    /// Makes a communicator of the ranks that pass the same `color`, ordered by `key`, then by rank (`MPI_Comm_split`,
    /// MPI-4.1 §7.4.2). Collective.
    ///
    /// # Errors
    /// `color` or `key` is above 2³¹ − 1.
    pub fn split(&self, color: usize, key: usize) -> Result<Communicator> {
        let number = |value: usize, name: &str| {
            i32::try_from(value).map_err(|_| {
                Error::failed("splitting a communicator", format!("{name} {value} is above 2³¹ − 1"))
            })
        };
        let mpi_color = Color::with_value(number(color, "the color")?);
        let part = self.raw.public.split_by_color_with_key(mpi_color, number(key, "the key")?);
        let part = part.expect("MPI_Comm_split gives a communicator for every color that is not undefined");
        let part = Communicator::new(part, self.raw.links.split(color));
        part.set_transfers(self.transfers());
        Ok(part)
    }

    /// Another communicator of the same ranks, whose messages never meet those of this one (`MPI_Comm_dup`, MPI-4.1 §7.4.2).
    /// Collective.
    pub fn duplicate(&self) -> Communicator {
        let twin = Communicator::new(duplicate(&self.raw.public), self.raw.links.split(0));
        twin.set_transfers(self.transfers());
        twin
    }

    /// The root's `bytes`, however many they are, on every rank. Collective; on other ranks `bytes` is not looked at.
    ///
    /// # Errors
    /// `root` is out of range.
    pub fn broadcast_bytes(&self, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        let mut length = [bytes.len() as i64];
        self.broadcast(&mut length, root)?;
        bytes.resize(length[0] as usize, 0);
        self.broadcast(&mut bytes, root)?;
        Ok(bytes)
    }

    /// For tests: splits messages above `limit` elements as if the MPI could count no further.
    #[doc(hidden)]
    pub fn set_message_limit(&self, limit: usize) {
        self.raw.set_limit(limit);
    }

    /// Does collective operations by `choice`, where there is a plan of it for them, instead of by what was measured to be fast:
    /// for benchmarks and tests. Collective.
    pub fn set_choice(&self, choice: Option<Choice>) {
        self.raw.set_override(choice);
        self.raw.last_algorithm.set(Algorithm::Mpi);
    }

    /// How buffers of a device travel on this communicator and those that are made of it from now on: through the host at first.
    /// Collective.
    pub fn set_transfers(&self, transfers: Transfers) {
        self.raw.transfers.set(transfers);
    }

    /// How buffers of a device travel. Not collective.
    pub fn transfers(&self) -> Transfers {
        self.raw.transfers.get()
    }

    /// What did the last operation that has a choice; MPI before the first. Not collective.
    pub fn last_algorithm(&self) -> Algorithm {
        self.raw.last_algorithm.get()
    }

    /// For tests: takes the ranks to be on these nodes. Collective.
    #[doc(hidden)]
    pub fn set_nodes(&self, nodes: Vec<usize>) {
        self.raw.set_nodes(nodes);
    }

    /// Returns when every rank has called it (`MPI_Barrier`, MPI-4.1 §6.3). Collective.
    pub fn barrier(&self) {
        let _span = self.collective_span::<u8>(Name::Barrier, 0);
        self.raw.barrier();
    }

    /// A span of the next collective operation, of `len` elements on this rank.
    fn collective_span<T>(&self, name: Name, len: usize) -> Span {
        trace::communication(name, len * size_of::<T>(), self.raw.links.collective(), None)
    }

    /// A span of the next message between two ranks, of `len` elements.
    fn message_span<T>(&self, name: Name, len: usize, (from, to): (usize, usize), tag: i32) -> Span {
        let peer = if name == Name::Send { to } else { from };
        trace::communication(
            name,
            len * size_of::<T>(),
            self.raw.links.message(from, to, tag),
            self.raw.in_job(peer),
        )
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
        self.raw.blocking_send_receive((send, to), (receive, from), tag);
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
        let choice = choice::broadcast(size_of_val(values));
        let collective = Collective::Broadcast { root };
        match self.raw.override_choice(collective, choice) {
            Choice { algorithm: Algorithm::Mpi, .. } => self.raw.blocking_broadcast(values, root),
            choice => self.perform(collective, choice, values, Operation::Sum)?,
        }
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
        self.raw.blocking_scatter(send, receive, root);
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
        self.raw.blocking_gather(send, receive, root);
        Ok(())
    }

    /// Collects every rank's `send`, in rank order, in every rank's `receive` (`MPI_Allgather`). Collective.
    ///
    /// # Errors
    /// `receive` does not hold a part for each rank.
    pub fn all_gather<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        self.check_parts("all-gathering", receive.len(), send.len())?;
        let _span = self.collective_span::<T>(Name::AllGather, receive.len());
        self.raw.blocking_all_gather(send, receive);
        Ok(())
    }

    /// Sends part s of `send` to rank s, where it becomes part r of `receive` (`MPI_Alltoall`). Collective.
    ///
    /// # Errors
    /// The two lengths differ, or are no multiple of the number of ranks.
    pub fn all_to_all<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        let count = self.check_all_to_all(send.len(), receive.len())?;
        let _span = self.collective_span::<T>(Name::AllToAll, send.len());
        self.raw.blocking_all_to_all(send, receive, count);
        Ok(())
    }

    /// Combines every rank's `send` in the root's `receive` (`MPI_Reduce`). Collective; `receive` is looked at on the
    /// root only.
    ///
    /// # Errors
    /// `root` is out of range, or the root's lengths differ.
    pub fn reduce<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        operation: Operation,
        root: usize,
    ) -> Result<()> {
        self.check_root("reducing", root)?;
        if self.rank() == root {
            self.check_equal("reducing", send.len(), receive.len())?;
        }
        let _span = self.collective_span::<T>(Name::Reduce, send.len());
        self.raw.blocking_reduce(send, receive, operation, root);
        Ok(())
    }

    /// Replaces `values` by their combination over all ranks, the same bits on each: short ones by `MPI_Allreduce`, long ones chunk
    /// by chunk ([`Algorithm::Pairwise`]), which is faster. Collective.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn all_reduce<T: Element>(&self, values: &mut [T], operation: Operation) -> Result<()> {
        let _span = self.collective_span::<T>(Name::AllReduce, values.len());
        let choice = choice::all_reduce(size_of_val(values), self.size());
        match self.raw.override_choice(Collective::AllReduce, choice) {
            Choice { algorithm: Algorithm::Mpi, .. } => self.raw.blocking_all_reduce(values, operation),
            choice => self.perform(Collective::AllReduce, choice, values, operation)?,
        }
        Ok(())
    }

    /// Combines every rank's `send` and leaves part r on rank r, with the bits of [`Communicator::start_reduce_scatter`] (what
    /// `MPI_Reduce_scatter_block` does). Collective.
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
        let _span = self.collective_span::<T>(Name::ReduceScatter, send.len());
        let choice = choice::reduce_scatter(size_of_val(send), self.size());
        match self.raw.override_reduce_scatter(receive.len(), choice) {
            Choice { algorithm: Algorithm::Mpi, .. } => {
                self.raw.blocking_reduce_scatter(send, receive, operation)
            }
            choice => self.perform_apart(choice, send, receive, operation)?,
        }
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
        if !(0..=LARGEST_TAG).contains(&tag) {
            return Err(Error::failed(doing, format!("tag {tag} is not between 0 and {LARGEST_TAG}")));
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
