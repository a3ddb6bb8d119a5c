//! Sums and copies of the buffers of several processes, which the leader of a device maps.
//!
//! A rank's compute stream says by an event when its values may be read. The leader's kernel then reads and
//! writes all buffers in its stream of additions; its host observes the end and tells the other ranks. So
//! no stream waits for another process: on a device that processes share in time slices, each such wait
//! would cost a slice.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{CUdeviceptr, CUresult};

use super::Cuda;
use super::message::sums_only;
use super::runtime::buffer::CudaBuffer;
use super::runtime::format::Format;
use super::runtime::ipc::address;
use super::runtime::launch::{KernelArgument, launch_in, size32};
use super::runtime::machine::explain;
use super::runtime::message_memory::PeerEvents;
use super::runtime::streams::Streams;
use crate::memory::{MOST_PEERS, MemoryHandle, Operation, PeerBuffer, PeerWork, PeerWorkKind};
use crate::{Error, Result};

/// The addresses of the same array in the buffers of all ranks: an argument of kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Peers {
    at: [CUdeviceptr; MOST_PEERS],
    num: u32,
}

impl KernelArgument for Peers {}

/// A buffer on loan to an operation of ranks that map it.
pub(super) struct LentToPeers {
    streams: Rc<Streams>,
    pointer: CUdeviceptr,
    len: usize,
    format: Format,
    /// The handle of the memory; zeros if no other process maps it, and after a failure.
    handle: MemoryHandle,
    events: Rc<PeerEvents>,
}

/// Says why memory cannot be mapped, and the way out, if there is one.
fn why_not_mapped(error: DriverError) -> String {
    let way_out = match error.0 {
        CUresult::CUDA_ERROR_ALREADY_MAPPED => "; MPI may have mapped it: try --device-transfers staged",
        _ => "",
    };
    format!("{}{way_out}", explain(error))
}

impl PeerBuffer for LentToPeers {
    fn is_computed(&mut self) -> bool {
        self.streams.is_complete(&self.events.computed)
    }

    fn handle(&mut self) -> MemoryHandle {
        self.handle
    }

    fn start(&mut self, rank: usize, handles: &[MemoryHandle], work: &[PeerWork]) {
        let mut peers = Peers { at: [0; MOST_PEERS], num: size32(handles.len()) };
        for (other, handle) in handles.iter().enumerate() {
            let address =
                if other == rank { Ok(self.pointer) } else { address(self.streams.ordinal, handle) };
            match address {
                Ok(address) => peers.at[other] = address,
                Err(error) => {
                    return self.streams.fail("mapping the memory of another process", why_not_mapped(error));
                }
            }
        }
        for PeerWork { range, kind } in work {
            match kind {
                PeerWorkKind::Sum { into } => self.sum(peers, range, into),
                PeerWorkKind::Copy { from, into } => self.copy(peers, range, *from, into),
            }
        }
        let streams = &self.streams;
        streams.note("working on the memory of all ranks", self.events.done.record(&streams.h2d));
    }

    fn is_done(&mut self) -> bool {
        self.streams.is_complete(&self.events.done)
    }
}

impl LentToPeers {
    fn sum(&self, peers: Peers, range: &Range<usize>, into: &Range<usize>) {
        assert!(range.end <= self.len && into.end <= peers.num as usize, "{range:?} of {} values", self.len);
        let (streams, kernel) = (&self.streams, self.streams.kernels.sum_peers.of(self.format));
        let launch = streams.over(range.len(), self.format.values_at_once());
        let (first, len) = (range.start as u64, range.len() as u64);
        let (into, end) = (size32(into.start), size32(into.end));
        launch_in!(streams, streams.h2d, kernel, launch, first, len, peers, into, end);
    }

    fn copy(&self, peers: Peers, range: &Range<usize>, from: usize, into: &Range<usize>) {
        let num = peers.num as usize;
        assert!(range.end <= self.len && from < num && into.end <= num, "{range:?} of {} values", self.len);
        let (streams, units) = (&self.streams, self.format.bytes() / 2);
        let launch = streams.over(range.len() * units, 8);
        let (first, len) = ((range.start * units) as u64, (range.len() * units) as u64);
        let kernel = &streams.kernels.copy_to_peers;
        let (from, into, end) = (size32(from), size32(into.start), size32(into.end));
        launch_in!(streams, streams.h2d, kernel, launch, first, len, peers, from, into, end);
    }
}

impl CudaBuffer {
    /// Lends the values to an operation of ranks that map each other's memory. This one's is exported, and
    /// so never freed, only if others map it.
    pub(super) fn lent_to_peers(
        &mut self,
        operation: Option<Operation>,
        is_mapped: bool,
    ) -> Result<LentToPeers> {
        sums_only(operation)?;
        let events = self.messages.peers(&self.streams)?;
        let (streams, pointer) = (Rc::clone(&self.streams), self.memory.pointer());
        streams.note("computing what other ranks read", events.computed.record(&streams.compute));
        let export = || streams.note("exporting memory to other processes", self.memory.handle());
        let handle = is_mapped.then(export).flatten().unwrap_or([0; 64]);
        Ok(LentToPeers { streams, pointer, len: self.len, format: self.format, handle, events })
    }
}

/// The direction of a copy between this process and another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerDirection {
    /// To the memory of the other process.
    To,
    /// From the memory of the other process.
    From,
}

impl Cuda {
    /// Returns the number by which processes recognise the device: its UUID.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn device_number(&self) -> Result<u128> {
        let uuid = self.streams.context.uuid();
        let uuid = uuid.map_err(|error| Error::failed("identifying a CUDA device", explain(error)))?;
        Ok(u128::from_ne_bytes(uuid.bytes.map(|byte| byte as u8)))
    }

    /// Returns the first failure of the device's operations, if there was any: after a fault of a kernel, the
    /// driver refuses all further work of the process. Not collective.
    ///
    /// # Errors
    /// An earlier operation failed.
    pub fn check(&self) -> Result<()> {
        self.streams.check()
    }

    /// Returns the handle by which other processes of the node map `buffer` (CUDA IPC), once all work on
    /// its values is complete.
    ///
    /// # Errors
    /// The driver has no handles for other processes, or an earlier operation failed.
    pub fn memory_handle(&self, buffer: &CudaBuffer) -> Result<MemoryHandle> {
        self.streams.synchronise();
        self.streams.check()?;
        let failed = |error| Error::failed("exporting device memory to other processes", explain(error));
        buffer.memory.handle().map_err(failed)
    }

    /// Maps the buffer of another process, which is as long as `buffer`, and copies value `at`, an `f32`, to
    /// its place there, or from it, as the operations of peers do: by a kernel. Returns when the copy is
    /// complete.
    ///
    /// # Errors
    /// The memory cannot be mapped, read or written.
    pub fn copy_value(
        &self,
        direction: PeerDirection,
        handle: &MemoryHandle,
        buffer: &mut CudaBuffer,
        at: usize,
    ) -> Result<()> {
        assert!(at < buffer.len && buffer.format == Format::F32, "value {at} of {} values", buffer.len);
        let failed = |error| Error::failed("mapping the device memory of another process", explain(error));
        self.streams.synchronise();
        let address_there = address(self.streams.ordinal, handle).map_err(failed)?;
        let mut peers = Peers { at: [0; MOST_PEERS], num: 2 };
        peers.at[..2].copy_from_slice(&[buffer.memory.pointer(), address_there]);
        let (streams, units) = (&self.streams, size_of::<f32>() / 2);
        let launch = streams.over(units, 8);
        let (first, len) = ((at * units) as u64, units as u64);
        let (from, into) = match direction {
            PeerDirection::To => (0_u32, 1_u32),
            PeerDirection::From => (1, 0),
        };
        let (kernel, end) = (&streams.kernels.copy_to_peers, into + 1);
        launch_in!(streams, streams.compute, kernel, launch, first, len, peers, from, into, end);
        streams.synchronise();
        streams.check()
    }
}
