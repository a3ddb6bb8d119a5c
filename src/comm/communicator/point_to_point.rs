//! Messages between two ranks. None is collective: one rank sends, another receives, and both pass
//! the same tag.
#![allow(unsafe_code)]

use super::Communicator;
use crate::comm::Pending;
use crate::comm::engine::{self, Request, Task, is_busy};
use crate::comm::mpi::{Channel, MatchedMessage, Requests, Values};
use crate::memory::{Buffer, Element};
use crate::trace::{self, Name, Span};
use crate::{Error, Result};

impl Communicator {
    /// Sends `values` to rank `to` (`MPI_Send`, MPI-4.1 §3.2); may block until the receive is
    /// posted. Not collective.
    ///
    /// # Errors
    /// `to` or `tag` is out of range.
    pub fn send<T: Element>(&self, values: &[T], to: usize, tag: i32) -> Result<()> {
        self.check_peer("sending", to, tag)?;
        let _span = self.message_span(Name::Send, size_of_val(values), to, tag);
        let (mpi, values) = (&self.group.mpi, Values::of(values));
        // SAFETY: the slice stays borrowed until the message is complete.
        unsafe {
            if is_busy() {
                // a blocking call would keep the engine from advancing
                self.complete(|requests| mpi.send(requests, Channel::Public, values, to, tag));
            } else {
                mpi.blocking_send(values, to, tag);
            }
        }
        Ok(())
    }

    /// Blocks until a message from rank `from` has arrived and returns its number of elements,
    /// which may be fewer than `values` holds (`MPI_Mprobe` and `MPI_Imrecv`, MPI-4.1 §3.8). Not
    /// collective.
    ///
    /// # Errors
    /// `from` or `tag` is out of range, or the message is longer than `values` or has no whole number of
    /// elements, in which case it is lost.
    pub fn receive<T: Element>(&self, values: &mut [T], from: usize, tag: i32) -> Result<usize> {
        self.check_peer("receiving", from, tag)?;
        let _span = self.message_span(Name::Receive, size_of_val(values), from, tag);
        let mpi = &self.group.mpi;
        let mut found = None;
        if is_busy() {
            engine::wait_until(|| {
                found = mpi.look_for_message(from, tag, T::TYPE);
                found.is_some()
            });
        }
        let mut message = found.unwrap_or_else(|| mpi.wait_for_message(from, tag, T::TYPE));
        if let Some(len) = message.len.filter(|len| *len <= values.len()) {
            self.take_message(&mut message, &mut values[..len]);
            return Ok(len);
        }
        // a matched message must be received: one that does not fit is discarded, because its
        // sender would otherwise wait for ever
        let why = match (message.len, message.bytes) {
            (Some(len), _) => {
                self.take_message(&mut message, &mut vec![T::default(); len]);
                format!("the message has {len} elements, but the buffer has room for {}", values.len())
            }
            (None, bytes) => {
                self.take_message(&mut message, &mut vec![0_u8; bytes]);
                let each = size_of::<T>();
                format!("the message has {bytes} bytes, but an element of the buffer has {each}")
            }
        };
        Err(Error::failed(format!("receiving from rank {from} with tag {tag}"), why))
    }

    /// Receives a matched message, which is as long as `values`.
    fn take_message<T: Element>(&self, message: &mut MatchedMessage, values: &mut [T]) {
        self.complete(|requests| {
            // SAFETY: the slice stays borrowed until the message is complete, and has its length.
            unsafe { self.group.mpi.receive_matched(requests, message, Values::of_mut(values)) }
        });
    }

    /// Sends `send` to rank `to` and meanwhile receives into `receive` from rank `from` (`MPI_Sendrecv`,
    /// MPI-4.1 §3.10), so that ranks in a ring need not take turns. The message from `from` should be as long
    /// as `receive`: a longer one ends the job, and a shorter one goes unnoticed and leaves the other values
    /// as they are. Not collective.
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
        self.group.links.message(self.rank(), to, tag);
        let _span = self.message_span(Name::SendReceive, size_of_val(receive), from, tag);
        let (mpi, send, receive) = (&self.group.mpi, Values::of(send), Values::of_mut(receive));
        // SAFETY: both slices stay borrowed until both messages are complete, and do not overlap
        // because one of them is borrowed mutably.
        unsafe {
            if is_busy() {
                self.complete(|requests| {
                    mpi.receive(requests, Channel::Public, receive, from, tag);
                    mpi.send(requests, Channel::Public, send, to, tag);
                });
            } else {
                mpi.send_receive(send, to, receive, from, tag);
            }
        }
        Ok(())
    }

    /// Starts sending `values` to rank `to` (`MPI_Isend`). A device buffer is sent when the device
    /// has finished the earlier work on it. Between ranks that map each other's device memory the receiver
    /// copies it, so that both ends of the message must be device buffers. Not collective.
    ///
    /// # Errors
    /// `to` or `tag` is out of range, or there is no memory for staging.
    pub fn start_send<B: Buffer>(&self, values: B, to: usize, tag: i32) -> Result<Pending<B>> {
        self.check_peer("sending", to, tag)?;
        let send_range = 0..values.len();
        let task = match self.maps::<B>(to) {
            true => Task::PeerCopy { from: self.rank(), to, tag },
            false => Task::Send { to, tag },
        };
        self.start(values, Request { task, operation: None, send_range, receive_range: 0..0 })
    }

    /// Starts receiving from rank `from` (`MPI_Irecv`): at most as many elements as `values` holds. A
    /// shorter message leaves the other values as they are; a longer one ends the job, with MPI's own error
    /// if MPI moves it. Not collective.
    ///
    /// # Errors
    /// `from` or `tag` is out of range, or there is no memory for staging.
    pub fn start_receive<B: Buffer>(&self, values: B, from: usize, tag: i32) -> Result<Pending<B>> {
        self.check_peer("receiving", from, tag)?;
        let receive_range = 0..values.len();
        let task = match self.maps::<B>(from) {
            true => Task::PeerCopy { from, to: self.rank(), tag },
            false => Task::Receive { from, tag },
        };
        self.start(values, Request { task, operation: None, send_range: 0..0, receive_range })
    }

    /// Returns true if messages between a buffer of type `B` and one of rank `peer` are copies in device
    /// memory.
    fn maps<B: Buffer>(&self, peer: usize) -> bool {
        !B::IS_ON_HOST && self.transfers.is_none() && self.group.maps(peer)
    }

    /// Waits for the requests that `post` adds.
    fn complete(&self, post: impl FnOnce(&mut Requests)) {
        let mut requests = self.group.mpi.requests();
        post(&mut requests);
        engine::wait_all(&mut requests);
    }

    /// Begins the span of the next message of `bytes` to or from rank `peer`.
    fn message_span(&self, name: Name, bytes: usize, peer: usize, tag: i32) -> Span {
        let own = self.rank();
        let (from, to) = if name == Name::Send { (own, peer) } else { (peer, own) };
        let link = self.group.links.message(from, to, tag);
        trace::communication(name, bytes, link, self.group.in_job(peer))
    }
}
