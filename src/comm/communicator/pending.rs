//! [`Pending`]: an operation that is started now and finished later, with the caller's work in
//! between.
//!
//! A buffer that an operation under way owns cannot be used, so the race between MPI and a CUDA
//! stream does not compile. This compiles:
//!
//! ```no_run
//! use phalanx::comm::Communicator;
//! use phalanx::device::prelude::*;
//! use phalanx::device::{Cuda, CudaBuffer};
//!
//! # use phalanx::Result;
//! fn send_and_clear(all: &Communicator, device: &Cuda, gradients: CudaBuffer) -> Result<()> {
//!     let pending = all.start_send(gradients, 1, 0)?;
//!     let mut gradients = pending.wait();
//!     device.fill(device.view_mut(&mut gradients, 0..10), 0.0);
//!     Ok(())
//! }
//! ```
//!
//! A computation with the buffer before the wait does not:
//!
//! ```compile_fail,E0382
//! # use phalanx::comm::Communicator;
//! # use phalanx::device::prelude::*;
//! # use phalanx::device::{Cuda, CudaBuffer};
//! # use phalanx::Result;
//! # fn run(all: &Communicator, device: &Cuda, mut gradients: CudaBuffer) -> Result<()> {
//! let pending = all.start_send(gradients, 1, 0)?;
//! device.fill(device.view_mut(&mut gradients, 0..10), 0.0);
//! drop(pending.wait());
//! # Ok(())
//! # }
//! ```
//!
//! Nor does a call that would read device memory from the host:
//!
//! ```compile_fail,E0308
//! # use phalanx::comm::Communicator;
//! # use phalanx::device::CudaBuffer;
//! # fn send(communicator: &Communicator, gradients: CudaBuffer) -> phalanx::Result<()> {
//! communicator.send::<f32>(&gradients, 1, 0)
//! # }
//! ```
#![allow(unsafe_code)]

use std::mem;
use std::ops::Range;
use std::rc::Rc;

use super::Communicator;
use crate::Result;
use crate::comm::algorithm::Call;
use crate::comm::engine::{self, Entry, Request};
use crate::comm::mpi::{Handle, Mode, Requests, Values};
use crate::memory::Buffer;
use crate::trace::Flight;

/// An operation under way, which owns its buffers `B`, in host or device memory, until
/// [`Pending::wait`] returns them. MPI moves data only inside MPI calls: a program that computes
/// for a long time calls [`Pending::test`] now and then, as the backward pass does between layers.
///
/// A device buffer is posted to MPI when the device has finished the earlier work on it. Until
/// then, host messages and host collectives on the same communicator may overtake it, so use a
/// [duplicate](Communicator::duplicate) for device buffers if both are in use.
///
/// A value that is dropped before [`Pending::wait`] leaks its buffers, because MPI may still write
/// to them. That is sound but wasteful, and happens only after a fatal error.
#[must_use = "an operation that is not waited for never ends"]
pub struct Pending<B> {
    buffers: Option<B>,
    work: Option<PendingWork>,
    restore: fn(&mut B, Range<usize>),
}

/// The operation.
enum PendingWork {
    /// MPI requests, which MPI alone advances.
    Requests(Flight, Requests, bool),
    /// An entry in the engine's queue.
    Entry(Rc<Entry>),
}

impl<B> Pending<B> {
    /// Lets MPI, and all other operations under way, make progress; returns true when
    /// [`Pending::wait`] will return at once. Not collective.
    pub fn test(&mut self) -> bool {
        if self.is_done() {
            return true;
        }
        match &mut self.work {
            Some(PendingWork::Requests(flight, requests, is_done)) => {
                *is_done = requests.test();
                if *is_done {
                    flight.end();
                } else {
                    engine::advance();
                }
            }
            _ => engine::advance(),
        }
        self.is_done()
    }

    /// Returns true once the operation is known to be done, without asking MPI. Not collective.
    pub fn is_done(&self) -> bool {
        match &self.work {
            Some(PendingWork::Requests(.., is_done)) => *is_done,
            Some(PendingWork::Entry(entry)) => entry.is_done(),
            None => true,
        }
    }

    /// Blocks until the operation is done, advancing all other operations under way, and returns
    /// the buffers. Not collective, but it returns only when the other ranks have done their part.
    /// In an operation of several rounds (all-reduces and gathers in place, reduce-scatters, broadcasts
    /// from 2 GiB on, device buffers) this requires that they call [`Pending::test`] or wait for any
    /// started operation.
    pub fn wait(mut self) -> B {
        // until the operation is done the buffers stay where a panic would leak them
        let mut changed = None;
        match self.work.take() {
            Some(PendingWork::Requests(mut flight, mut requests, is_done)) => {
                if is_done {
                    flight.wait(|| ());
                } else {
                    flight.wait(|| engine::wait_all(&mut requests));
                }
            }
            Some(PendingWork::Entry(entry)) => {
                // the span begins when the operation is posted
                let mut span = entry.waiting();
                if !entry.is_done() {
                    engine::wait_until(|| {
                        span = span.take().or_else(|| entry.waiting());
                        entry.is_done()
                    });
                }
                drop(span);
                changed = Some(entry.end());
            }
            None => {}
        }
        let mut buffers = self.buffers.take().expect("`wait` consumes the only value that holds the buffers");
        if let Some(changed) = changed {
            (self.restore)(&mut buffers, changed);
        }
        buffers
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        mem::forget(self.buffers.take());
        mem::forget(self.work.take());
    }
}

impl Communicator {
    /// Starts an MPI call on host memory.
    pub(super) fn start_call<B>(
        &self,
        flight: Flight,
        mut buffers: B,
        call: impl FnOnce(&Handle, Mode<'_>, &mut B),
    ) -> Pending<B> {
        let mpi = &self.group.mpi;
        let mut requests = mpi.requests();
        let span = flight.posting();
        call(mpi, Mode::Started(&mut requests), &mut buffers);
        drop(span);
        let work = Some(PendingWork::Requests(flight, requests, false));
        Pending { buffers: Some(buffers), work, restore: |_, _| {} }
    }

    /// Starts `request` on `buffer`. MPI alone advances a request that is one call on host memory;
    /// the engine advances all others.
    pub(super) fn start<B: Buffer>(&self, mut buffer: B, request: Request) -> Result<Pending<B>> {
        let group = &self.group;
        let is_cuda_aware = self.call_on::<B>() == Call::CudaAware;
        if !B::IS_ON_HOST || !request.is_one_call() {
            // SAFETY: the pending operation owns the buffer until the operation is done, or leaks
            // it.
            let entry = unsafe { Entry::new(group, request, &mut buffer, is_cuda_aware)? };
            engine::enter(&entry);
            return Ok(Pending {
                buffers: Some(buffer),
                work: Some(PendingWork::Entry(entry)),
                restore: B::restore,
            });
        }
        let (len, element) = (buffer.len(), buffer.element_type());
        // SAFETY: the pending operation owns the buffer until the requests are complete, or leaks
        // it.
        let mut loan = unsafe { buffer.lend(&request.needs(len, is_cuda_aware))? };
        let values = Values::new(loan.arena().values(), len, element);
        let flight = request.flight(group, request.link(group), len * element.bytes());
        let span = flight.posting();
        // SAFETY: the pending operation owns the buffer, which keeps its values in place.
        let requests = unsafe { request.post(&group.mpi, values, values) };
        drop(span);
        let work = Some(PendingWork::Requests(flight, requests, false));
        Ok(Pending { buffers: Some(buffer), work, restore: B::restore })
    }
}
