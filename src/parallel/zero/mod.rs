//! ZeRO: the replicas of a model divide their state among themselves (Rajbhandari et al., "ZeRO",
//! SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023).
//!
//! Every segment of the flat buffers is cut into as many equal parts as there are replicas, and
//! replica r owns part r. [`ZeroStage`] says of which arrays a replica keeps its part only:
//!
//! | stage | optimizer's slots | gradients | parameters | messages of a step, in parameters |
//! |---|---|---|---|---|
//! | 0 | whole | whole | whole | all-reduce: 2 |
//! | 1 | part | whole | whole | reduce-scatter, all-gather: 2 |
//! | 2 | part | part | whole | reduce-scatter, all-gather: 2 |
//! | 3 | part | part | part | all-gather, all-gather, reduce-scatter: 3 |
//!
//! [`GradientSegments`] lends a segment of gradients to the layers that fill it and takes it back
//! after its reduce-scatter. [`ParameterSegments`] gathers a segment of parameters before the layers
//! that read it, one segment ahead, and drops it after them. Layers see whole segments in every
//! stage.
//!
//! Invariants: a layer's tensors lie in one segment, and a segment's tensors in one pipeline stage;
//! all replicas open, reduce and gather segments in the order of their schedule, which is the same
//! on all of them, and no timing changes that order; every sum over replicas is in one order, so
//! all stages give the same bits.

mod gradients;
mod parameters;
mod partition;
mod stage;

pub use gradients::{GradientSegments, GradientUse};
pub use parameters::{Direction, Gathering, ParameterSegments, ParameterSettings};
pub use partition::{Partition, TensorPart};
pub use stage::{Accumulation, ZeroStage};
