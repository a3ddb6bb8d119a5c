//! Memory on a GPU, transfers, and recorded steps.

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::result;

use super::runtime::buffer::{CudaBuffer, CudaView, CudaViewMut};
use super::runtime::format::{Format, Precision};
use super::runtime::gpu::Cuda;
use super::runtime::graph::Recording;
use super::runtime::memory::DeviceMemory;
use super::runtime::message_memory::MessageMemory;
use super::runtime::readings::TotalsReading;
use crate::Result;
use crate::device::{CopyOperations, MemoryOperations, Role, StepTotals};

/// Samples stay on the device only if they occupy at most this many bytes: every rank reads them
/// all before the first step.
const MAX_SAMPLE_BYTES: usize = 2 << 30;

impl MemoryOperations for Cuda {
    type Buffer = CudaBuffer;
    type View<'a> = CudaView<'a>;
    type ViewMut<'a> = CudaViewMut<'a>;
    type Totals = TotalsReading;
    type Recording = Recording;

    fn allocate(&self, len: usize, role: Role) -> Result<CudaBuffer> {
        let (format, has_copy) = match (self.precision, role) {
            (Precision::Bf16, Role::Activations) => (Format::Bf16, false),
            (Precision::Bf16, Role::Parameters) => (Format::F32, true),
            _ => (Format::F32, false),
        };
        let streams = Rc::clone(&self.streams);
        let copy = has_copy.then(|| DeviceMemory::zeroed(&streams, len, Format::Bf16)).transpose()?;
        let memory = DeviceMemory::zeroed(&streams, len, format)?;
        Ok(CudaBuffer { streams, memory, len, format, copy, messages: MessageMemory::default() })
    }

    fn view<'a>(&self, buffer: &'a CudaBuffer, range: Range<usize>) -> CudaView<'a> {
        buffer.view(range)
    }

    fn view_mut<'a>(&self, buffer: &'a mut CudaBuffer, range: Range<usize>) -> CudaViewMut<'a> {
        buffer.view_mut(range)
    }

    fn write(&self, into: CudaViewMut<'_>, fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        self.streams.check()?;
        self.uploads.write(&self.streams, &into, fill)
    }

    fn read(&self, from: CudaView<'_>, inspect: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        if from.format == Format::Bf16 {
            let mut wide = self.allocate(from.len, Role::Exact)?;
            self.copy(from, wide.view_mut(0..from.len));
            return self.readings.read(&self.streams, wide.view(0..from.len), inspect);
        }
        self.readings.read(&self.streams, from, inspect)
    }

    fn take_totals(&self, sums: CudaViewMut<'_>) -> Result<TotalsReading> {
        self.readings.take_totals(&self.streams, sums)
    }

    fn finish_totals(&self, reading: TotalsReading) -> Result<StepTotals> {
        self.readings.finish_totals(&self.streams, reading)
    }

    fn wait(&self) {
        self.streams.synchronise();
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn sample_budget(&self) -> usize {
        // an eighth of the free memory: other ranks may share the device, and evaluation needs some
        // too
        result::mem_get_info().map_or(0, |(free, _)| MAX_SAMPLE_BYTES.min(free / 8))
    }

    fn repeat(
        &self,
        recording: &mut Option<Recording>,
        step: u32,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        recording.get_or_insert_default().repeat(&self.streams, step, self.partial_sums.len(), work)
    }
}
