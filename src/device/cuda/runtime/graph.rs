//! Operations that are the same every time, but for the number of the step, recorded as a CUDA graph and
//! started with one call.

use std::rc::Rc;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, cuMemsetD32Async};

use super::format::Format;
use super::machine::explain;
use super::memory::DeviceMemory;
use super::streams::Streams;
use crate::{Error, Result};

/// Runs before the recording: until then operations choose algorithms for products and grow the
/// memory for partial sums.
const WARM_UP_RUNS: u32 = 2;

/// A recorded step. The graph is dropped before the memory that it reads.
struct RecordedGraph {
    graph: CudaGraph,
    /// The number of the step, if kernels of the graph read it.
    step: Option<DeviceMemory>,
    /// The length of the memory for partial sums at the time of the recording: the graph is out of date when
    /// that has grown.
    partial_sums_len: usize,
}

/// The operations of a step, once they have been recorded.
#[derive(Default)]
pub struct Recording {
    runs: u32,
    recorded: Option<RecordedGraph>,
}

impl Recording {
    /// Runs `work`, or records it, or starts its recording.
    pub(crate) fn repeat(
        &mut self,
        streams: &Rc<Streams>,
        step: u32,
        partial_sums_len: usize,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.runs < WARM_UP_RUNS {
            self.runs += 1;
            return work();
        }
        let current = self.recorded.take().filter(|recorded| recorded.partial_sums_len == partial_sums_len);
        let recorded = match current {
            Some(recorded) => recorded,
            None => RecordedGraph::record(streams, partial_sums_len, work)?,
        };
        let recorded = self.recorded.insert(recorded);
        streams.count(|counters| counters.replays += 1);
        if let Some(memory) = &recorded.step {
            write_step(streams, memory, step)?;
        }
        let outcome = recorded.graph.launch();
        outcome.map_err(|error| Error::failed("starting a recorded step", explain(error)))
    }
}

impl RecordedGraph {
    fn record(
        streams: &Rc<Streams>,
        partial_sums_len: usize,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<RecordedGraph> {
        let doing = "recording a step as a CUDA graph";
        let failed = |error| Error::failed(doing, explain(error));
        streams.check()?;
        let memory = DeviceMemory::new(streams, 1, Format::F32)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        streams.compute.begin_capture(mode).map_err(failed)?;
        streams.step_address.begin(memory.pointer());
        let outcome = work();
        let graph = streams.compute.end_capture(CUgraphInstantiate_flags(0));
        let is_read = streams.step_address.end();
        outcome.and(streams.check())?;
        let graph = graph.map_err(failed)?.ok_or_else(|| Error::failed(doing, "nothing was recorded"))?;
        Ok(RecordedGraph { graph, step: is_read.then_some(memory), partial_sums_len })
    }
}

/// Writes the number of a step for the kernels of a graph that is started next.
fn write_step(streams: &Streams, memory: &DeviceMemory, step: u32) -> Result<()> {
    // SAFETY: the memory has one value of four bytes, and the work before in the stream is done by then.
    let outcome = unsafe { cuMemsetD32Async(memory.pointer(), step, 1, streams.compute.cu_stream()) };
    outcome.result().map_err(|error| Error::failed("writing the number of a recorded step", explain(error)))
}
