//! The CUDA runtime under the operations: the device, its streams and memory, and its kernels.
//!
//! Each file uses only files that stand above it in this list: `format` (of values), `machine`
//! (driver and device), `compile` (NVRTC), `kernels` (loading), `launch`, `ipc` (memory that processes
//! share), `streams`, `memory`, `message_memory`, `buffer`; then, independent of each other, `upload`
//! (host to device), `readings` (device to host), `partial_sums` (memory of reductions), `graph` (recorded
//! steps), `specialised` (kernels for sizes of a network), `product` (descriptions of matrix products),
//! `cublaslt` (which forms them) and `tuning` (which measures its algorithms); and `gpu` (the device with all
//! of these).

pub(crate) mod buffer;
pub(crate) mod compile;
pub(crate) mod cublaslt;
mod described;
pub(crate) mod format;
pub(crate) mod gpu;
pub(crate) mod graph;
pub(crate) mod ipc;
pub(crate) mod kernels;
pub(crate) mod launch;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod message_memory;
pub(crate) mod partial_sums;
pub(crate) mod product;
pub(crate) mod readings;
pub(crate) mod specialised;
pub(crate) mod streams;
mod tuning;
pub(crate) mod upload;
