//! Memory of the CPU: the host's own, so that transfers cost nothing.

use std::ops::Range;

use super::Cpu;
use crate::Result;
use crate::device::{MemoryOperations, Role, StepTotals, totals};
use crate::memory::Memory;

impl MemoryOperations for Cpu {
    type Buffer = Memory<f32>;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];
    type Totals = StepTotals;
    type Recording = ();

    fn allocate(&self, len: usize, _: Role) -> Result<Memory<f32>> {
        Memory::zeroed(len)
    }

    fn view<'a>(&self, buffer: &'a Memory<f32>, range: Range<usize>) -> &'a [f32] {
        &buffer[range]
    }

    fn view_mut<'a>(&self, buffer: &'a mut Memory<f32>, range: Range<usize>) -> &'a mut [f32] {
        &mut buffer[range]
    }

    fn write(&self, into: &mut [f32], fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        fill(into)
    }

    fn read(&self, from: &[f32], inspect: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        inspect(from)
    }

    fn take_totals(&self, sums: &mut [f32]) -> Result<StepTotals> {
        let mut reading = StepTotals::rounded(std::array::from_fn(|total| sums[total]));
        reading.loss += bytemuck::pod_read_unaligned(bytemuck::cast_slice(&sums[totals::EXACT_LOSS]));
        sums.fill(0.0);
        Ok(reading)
    }

    fn finish_totals(&self, reading: StepTotals) -> Result<StepTotals> {
        Ok(reading)
    }
}
