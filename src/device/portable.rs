//! How the values of a device's buffer get to where MPI may touch them, and back.
//!
//! A buffer *departs*: its values are on their way to host memory while the device goes on with other work. The
//! [`Departure`] becomes a *message* once the work that made the values and their copy are done; only messages are
//! [buffers that MPI takes](HostBuffer), so a buffer that the device may still be writing cannot be sent. A message that has been
//! received *arrives*: its values are copied back before whatever the device is told to do next.
//!
//! An MPI that knows of devices takes the device's memory itself: then a buffer *settles* instead, that is, becomes something that
//! no work of the device is under way on, which only the work of the messages may touch until it *resumes*.
//!
//! The processor's memory is its own message, and nothing is copied.
//!
//! So the race with the device that every user of CUDA and MPI knows does not compile. This does:
//!
//! ```no_run
//! use phalanx::comm::{Communicator, DeviceCommunicator};
//! use phalanx::device::{Cuda, CudaBuffer, Departure, Device, Portable};
//!
//! fn send(communicator: &Communicator, device: &Cuda, gradients: CudaBuffer) -> phalanx::Result<()> {
//!     let departing = gradients.depart(0..10)?;
//!     let (message, _rest) = departing.wait();
//!     communicator.start_send::<f32, _>(message, 1, 0)?.wait();
//!     Ok(())
//! }
//!
//! fn send_and_clear(communicator: &DeviceCommunicator, device: &Cuda, gradients: CudaBuffer) -> phalanx::Result<()> {
//!     let transfer = communicator.start_send(gradients, 10, 1, 0)?;
//!     let mut gradients = transfer.wait()?;
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
//!     let departing = gradients.depart(0..10)?;
//!     communicator.start_send::<f32, _>(departing, 1, 0)?.wait();
//!     Ok(())
//! }
//! ```
//!
//! And a buffer that is away cannot be computed with:
//!
//! ```compile_fail,E0382
//! # use phalanx::comm::DeviceCommunicator;
//! # use phalanx::device::{Cuda, CudaBuffer, Device};
//! fn send(communicator: &DeviceCommunicator, device: &Cuda, mut gradients: CudaBuffer) -> phalanx::Result<()> {
//!     let transfer = communicator.start_send(gradients, 10, 1, 0)?;
//!     device.fill(device.view_mut(&mut gradients, 0..10), 0.0);
//!     transfer.wait().map(|_| ())
//! }
//! ```

use std::ops::Range;

use crate::Result;
use crate::memory::{HostBuffer, Memory};

/// Memory of a device for values that messages can carry. Not one of its operations is collective.
pub trait Portable: Sized + 'static {
    /// Host memory with the values.
    type Message: HostBuffer<f32>;
    /// What is left of the buffer while its message is away.
    type Rest: 'static;
    /// Values on their way to the host.
    type Departure: Departure<Message = Self::Message, Rest = Self::Rest>;

    /// What MPI may read and write on the device itself.
    type Settled: Settled;
    /// A buffer whose work of the device is still under way.
    type Settling: Departure<Message = Self::Settled, Rest = ()>;

    /// True if the values are in a device's memory, where an MPI may or may not reach them.
    const IS_ON_DEVICE: bool;

    /// The number of values.
    fn len(&self) -> usize;

    /// The bytes of a value where it is.
    fn value_bytes(&self) -> usize;

    /// True if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends the values in `range` to the message; the rest of it may hold anything. An empty range makes a message to be
    /// received.
    ///
    /// # Errors
    /// There is no memory for the message.
    fn depart(self, range: Range<usize>) -> Result<Self::Departure>;

    /// Puts the message's values in `range` back into the buffer.
    fn arrive(rest: Self::Rest, message: Self::Message, range: Range<usize>) -> Self;

    /// Lets the work that is under way come to its end, for messages from and to the buffer itself and, of what is to be added to it, to
    /// an inbox of `inbox` values. Only for buffers on a device.
    ///
    /// # Errors
    /// There is no memory for the inbox.
    fn settle(self, inbox: usize) -> Result<Self::Settling>;

    /// Goes on with the buffer; messages have changed the values in `range`.
    fn resume(settled: Self::Settled, range: Range<usize>) -> Self;
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

impl Departure for Never {
    type Message = Never;
    type Rest = ();

    fn is_complete(&mut self) -> bool {
        match *self {}
    }

    fn wait(self) -> (Never, ()) {
        match self {}
    }
}

/// Values on their way to the host.
pub trait Departure: 'static {
    /// What they become.
    type Message;
    /// What is left behind.
    type Rest;

    /// True when [`Departure::wait`] will return at once.
    fn is_complete(&mut self) -> bool;

    /// Waits until the values are there.
    fn wait(self) -> (Self::Message, Self::Rest);
}

impl Portable for Memory<f32> {
    type Message = Memory<f32>;
    type Rest = ();
    type Departure = Memory<f32>;
    type Settled = Never;
    type Settling = Never;

    const IS_ON_DEVICE: bool = false;

    fn len(&self) -> usize {
        self.as_ref().len()
    }

    fn value_bytes(&self) -> usize {
        size_of::<f32>()
    }

    fn settle(self, _: usize) -> Result<Never> {
        unreachable!("the processor's memory is its own message")
    }

    fn resume(settled: Never, _: Range<usize>) -> Memory<f32> {
        match settled {}
    }

    fn depart(self, _: Range<usize>) -> Result<Memory<f32>> {
        Ok(self)
    }

    fn arrive((): (), message: Memory<f32>, _: Range<usize>) -> Memory<f32> {
        message
    }
}

impl Departure for Memory<f32> {
    type Message = Memory<f32>;
    type Rest = ();

    fn is_complete(&mut self) -> bool {
        true
    }

    fn wait(self) -> (Memory<f32>, ()) {
        (self, ())
    }
}
