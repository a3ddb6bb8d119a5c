//! Operations that are the same every time, recorded as a CUDA graph and started with one call.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::machine::explain;
use super::shared::Shared;
use crate::{Error, Result};

/// How often operations are started one by one before they are recorded: until then they find out how products are best done, and how
/// much memory sums take.
const UNRECORDED: u32 = 2;

/// The operations of a step, once they have been recorded.
#[derive(Default)]
pub struct Recording {
    times: u32,
    graph: Option<CudaGraph>,
    /// The length of the memory for sums when it was recorded: with another, it is out of date.
    scratch_len: usize,
}

impl Recording {
    /// See [`crate::device::Device::repeat`].
    pub(super) fn repeat(
        &mut self,
        shared: &Shared,
        scratch_len: usize,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.times < UNRECORDED {
            self.times += 1;
            return work();
        }
        let failed = |error| Error::failed("recording a step as a CUDA graph", explain(error));
        if self.graph.is_none() || self.scratch_len != scratch_len {
            shared.check()?;
            self.graph = None;
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            shared.compute.begin_capture(mode).map_err(failed)?;
            let outcome = work();
            let graph = shared.compute.end_capture(CUgraphInstantiate_flags(0));
            outcome.and(shared.check())?;
            self.graph = graph.map_err(failed)?;
            self.scratch_len = scratch_len;
        }
        shared.count(|counters| counters.replays += 1);
        match &self.graph {
            Some(graph) => {
                graph.launch().map_err(|error| Error::failed("starting a recorded step", explain(error)))
            }
            None => Err(Error::failed("recording a step as a CUDA graph", "nothing was recorded")),
        }
    }
}
