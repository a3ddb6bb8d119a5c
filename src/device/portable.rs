//! How the values of a device's buffer get to where MPI may touch them, and back.
//!
//! The processor's memory is a *message* as it is: only messages are [buffers that MPI takes](HostBuffer). A device's buffer is none, for
//! work of the device on it may be under way. It takes one of two ways.
//!
//! An MPI that knows of devices takes the device's memory itself: the buffer *settles*, that is, becomes something that no work of the
//! device is under way on, which only the work of the messages may touch until it *resumes*.
//!
//! Otherwise it is *staged*: its values are copied to pinned host memory, piece by piece, while the device goes on with other work, and
//! what messages have changed there is copied back, piece by piece too, before whatever the device is told to do next.
//!
//! So the race with the device that every user of CUDA and MPI knows does not compile. This does:
//!
//! ```no_run
//! use phalanx::comm::DeviceCommunicator;
//! use phalanx::device::prelude::*;
//! use phalanx::device::{Cuda, CudaBuffer};
//!
//! fn send_and_clear(communicator: &DeviceCommunicator, device: &Cuda, gradients: CudaBuffer) -> phalanx::Result<()> {
//!     let transfer = communicator.start_send(gradients, 10, 1, 0)?;
//!     let mut gradients = transfer.wait();
//!     device.fill(device.view_mut(&mut gradients, 0..10), 0.0);
//!     Ok(())
//! }
//! ```
//!
//! A buffer that the device may still be writing is no message:
//!
//! ```compile_fail,E0277
//! # use phalanx::comm::Communicator;
//! # use phalanx::device::CudaBuffer;
//! fn send(communicator: &Communicator, gradients: CudaBuffer) -> phalanx::Result<()> {
//!     communicator.start_send::<f32, _>(gradients, 1, 0)?.wait();
//!     Ok(())
//! }
//! ```
//!
//! Nor is one whose copy to the host is under way:
//!
//! ```compile_fail,E0277
//! # use phalanx::comm::Communicator;
//! # use phalanx::device::{CudaBuffer, Portable};
//! fn send(communicator: &Communicator, gradients: CudaBuffer) -> phalanx::Result<()> {
//!     let staged = gradients.stage(1)?;
//!     communicator.start_send::<f32, _>(staged, 1, 0)?.wait();
//!     Ok(())
//! }
//! ```
//!
//! And a buffer that is away cannot be computed with:
//!
//! ```compile_fail,E0382
//! # use phalanx::comm::DeviceCommunicator;
//! # use phalanx::device::prelude::*;
//! # use phalanx::device::{Cuda, CudaBuffer};
//! fn send(communicator: &DeviceCommunicator, device: &Cuda, mut gradients: CudaBuffer) -> phalanx::Result<()> {
//!     let transfer = communicator.start_send(gradients, 10, 1, 0)?;
//!     device.fill(device.view_mut(&mut gradients, 0..10), 0.0);
//!     drop(transfer.wait());
//!     Ok(())
//! }
//! ```

use std::ops::Range;

use crate::Result;
use crate::memory::{HostBuffer, Memory};

/// Memory of a device for values that messages can carry. Not one of its operations is collective.
pub trait Portable: Sized + 'static {
    /// The values where they are, if that is the processor's memory.
    type Message: HostBuffer<f32>;
    /// What MPI may read and write on the device itself.
    type Settled: Settled;
    /// A buffer whose work of the device is still under way.
    type Settling: Settling<Settled = Self::Settled>;
    /// A buffer with its values in host memory as far as they were brought there.
    type Staged: Staged;

    /// The number of values.
    fn len(&self) -> usize;

    /// The bytes of a value where it is.
    fn value_bytes(&self) -> usize;

    /// True if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values as a message, or the buffer itself if they are on a device.
    ///
    /// # Errors
    /// They are on a device.
    fn into_message(self) -> std::result::Result<Self::Message, Self>;

    /// The buffer again.
    fn from_message(message: Self::Message) -> Self;

    /// Lets the work that is under way come to its end, for messages from and to the buffer itself and, of what is to be added to it, to
    /// an inbox of `inbox` values. Only for buffers on a device.
    ///
    /// # Errors
    /// There is no memory for the inbox.
    fn settle(self, inbox: usize) -> Result<Self::Settling>;

    /// Goes on with the buffer; messages have changed the values in `range`.
    fn resume(settled: Self::Settled, range: Range<usize>) -> Self;

    /// Prepares to bring values to the host, in at most `pieces` pieces, once the work that is under way has made them. Only for buffers
    /// on a device.
    ///
    /// # Errors
    /// There is no memory for them on the host.
    fn stage(self, pieces: usize) -> Result<Self::Staged>;

    /// Goes on with the buffer; the values in `range` were brought back.
    fn unstage(staged: Self::Staged, range: Range<usize>) -> Self;
}

/// Values on a device that nothing but messages, and sums of what they brought, touches.
///
/// # Safety
/// The pointers are to as many values as the buffer and the inbox have, which stay where they are until the value is dropped.
#[allow(unsafe_code)]
pub unsafe trait Settled: 'static {
    /// Where the values are.
    fn values(&self) -> *mut u8;

    /// Where what is to be added arrives.
    fn inbox(&self) -> *mut u8;

    /// Starts an addition, in turn after all others; `slot` (0 or 1) tells those apart that are under way at once.
    fn add(&mut self, slot: usize, addition: &Addition);

    /// True when the last addition of `slot` is done.
    fn is_added(&mut self, slot: usize) -> bool;
}

/// A sum of values and what has arrived in the inbox, in a certain order, formed in `f32`.
#[derive(Debug, Clone)]
pub struct Addition {
    /// Which values become the sum.
    pub into: Range<usize>,
    /// Where the first term begins in the inbox.
    pub first: usize,
    /// How many terms the inbox has.
    pub terms: usize,
    /// From the beginning of a term to that of the next.
    pub stride: usize,
    /// The place of the values' own term among them.
    pub own: usize,
}

/// A buffer on its way to being settled.
pub trait Settling: 'static {
    /// What it becomes.
    type Settled;

    /// True when [`Settling::wait`] will return at once.
    fn is_complete(&mut self) -> bool;

    /// Waits until nothing is under way on it.
    fn wait(self) -> Self::Settled;
}

/// Values of a device's buffer in host memory.
///
/// # Safety
/// The pointer is to as many values, in the device's format, as the buffer has, which stay where they are until the value is dropped.
#[allow(unsafe_code)]
pub unsafe trait Staged: 'static {
    /// Where the values are on the host.
    fn values(&self) -> *mut u8;

    /// Starts to bring the values in all of `ranges` here, behind all others, as piece number `piece`. Without any the piece is not here at
    /// once nevertheless: what was here before may still be on its way back to the device.
    fn fetch(&mut self, piece: usize, ranges: &mut dyn Iterator<Item = Range<usize>>);

    /// True when the piece is here, to be read and written.
    fn is_here(&mut self, piece: usize) -> bool;

    /// Starts to bring the values in all of `ranges`, of a piece that was here, back to the device.
    fn deliver(&mut self, ranges: &mut dyn Iterator<Item = Range<usize>>);
}

/// The buffer that there is none of.
#[derive(Debug, Clone, Copy)]
pub enum Never {}

#[allow(unsafe_code)]
// SAFETY: there is no value of the type.
unsafe impl Settled for Never {
    fn values(&self) -> *mut u8 {
        match *self {}
    }

    fn inbox(&self) -> *mut u8 {
        match *self {}
    }

    fn add(&mut self, _: usize, _: &Addition) {
        match *self {}
    }

    fn is_added(&mut self, _: usize) -> bool {
        match *self {}
    }
}

impl Settling for Never {
    type Settled = Never;

    fn is_complete(&mut self) -> bool {
        match *self {}
    }

    fn wait(self) -> Never {
        self
    }
}

#[allow(unsafe_code)]
// SAFETY: there is no value of the type.
unsafe impl Staged for Never {
    fn values(&self) -> *mut u8 {
        match *self {}
    }

    fn fetch(&mut self, _: usize, _: &mut dyn Iterator<Item = Range<usize>>) {
        match *self {}
    }

    fn is_here(&mut self, _: usize) -> bool {
        match *self {}
    }

    fn deliver(&mut self, _: &mut dyn Iterator<Item = Range<usize>>) {
        match *self {}
    }
}

impl AsRef<[f32]> for Never {
    fn as_ref(&self) -> &[f32] {
        match *self {}
    }
}

impl AsMut<[f32]> for Never {
    fn as_mut(&mut self) -> &mut [f32] {
        match *self {}
    }
}

#[allow(unsafe_code)]
// SAFETY: there is no value of the type.
unsafe impl HostBuffer<f32> for Never {}

impl Portable for Memory<f32> {
    type Message = Memory<f32>;
    type Settled = Never;
    type Settling = Never;
    type Staged = Never;

    fn len(&self) -> usize {
        self.as_ref().len()
    }

    fn value_bytes(&self) -> usize {
        size_of::<f32>()
    }

    fn into_message(self) -> std::result::Result<Memory<f32>, Memory<f32>> {
        Ok(self)
    }

    fn from_message(message: Memory<f32>) -> Memory<f32> {
        message
    }

    fn settle(self, _: usize) -> Result<Never> {
        unreachable!("the processor's memory is a message")
    }

    fn resume(settled: Never, _: Range<usize>) -> Memory<f32> {
        match settled {}
    }

    fn stage(self, _: usize) -> Result<Never> {
        unreachable!("the processor's memory is a message")
    }

    fn unstage(staged: Never, _: Range<usize>) -> Memory<f32> {
        match staged {}
    }
}
