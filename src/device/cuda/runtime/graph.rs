//! Operations that are the same every time, recorded as a CUDA graph and started with one call.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::machine::explain;
use super::streams::Streams;
use crate::{Error, Result};

/// Runs before the recording: until then operations choose algorithms for products and grow the
/// memory for partial sums.
const WARM_UP_RUNS: u32 = 2;

/// The operations of a step, once they have been recorded.
#[derive(Default)]
pub struct Recording {
    runs: u32,
    graph: Option<CudaGraph>,
    /// The length of the memory for partial sums when the graph was recorded: the graph is out of
    /// date when that has grown.
    partial_sums_len: usize,
}

impl Recording {
    /// Runs `work`, or records it, or starts its recording.
    pub(crate) fn repeat(
        &mut self,
        streams: &Streams,
        partial_sums_len: usize,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.runs < WARM_UP_RUNS {
            self.runs += 1;
            return work();
        }
        let failed = |error| Error::failed("recording a step as a CUDA graph", explain(error));
        if self.graph.is_none() || self.partial_sums_len != partial_sums_len {
            streams.check()?;
            self.graph = None;
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            streams.compute.begin_capture(mode).map_err(failed)?;
            let outcome = work();
            let graph = streams.compute.end_capture(CUgraphInstantiate_flags(0));
            outcome.and(streams.check())?;
            self.graph = graph.map_err(failed)?;
            self.partial_sums_len = partial_sums_len;
        }
        streams.count(|counters| counters.replays += 1);
        match &self.graph {
            Some(graph) => {
                graph.launch().map_err(|error| Error::failed("starting a recorded step", explain(error)))
            }
            None => Err(Error::failed("recording a step as a CUDA graph", "nothing was recorded")),
        }
    }
}
