//! MPI-native training of neural networks: one short SPMD program per parallel strategy, over one
//! shared core.
//!
//! # The map
//!
//! | module | contents | may use |
//! |---|---|---|
//! | [`memory`] | large arrays on huge pages; buffers as messages see them | |
//! | [`trace`] | the recorder of spans: what a rank did when | |
//! | [`sums`] | sums with the same bits for any division of their terms | |
//! | [`comm`] | ranks and messages; the only place that names MPI | `memory`, `sums`, `trace` |
//! | [`device`] | arithmetic; the only place that names CUDA | `memory`, `sums` |
//! | [`nn`] | networks, losses, initial values, flat parameters | `device`, `sums` |
//! | [`optim`] | optimizers, learning-rate schedules, clipping | `device` |
//! | [`dataset`] | samples, their order and their statistics | `memory`, `nn`, `trace` |
//! | [`store`] | samples of files in the job's memory | `comm`, `dataset`, `nn`, `trace` |
//! | [`checkpoint`] | files from which a run continues | `memory`, `nn` |
//! | [`parallel`] | the strategies: networks on ranks | all above but `dataset`, `store`, `checkpoint` |
//! | [`infer`] | the use of trained networks | all above but `memory`, `optim`, `store`, `trace` |
//! | [`app`] | the frame of programs: start, log, traces, exit code | `comm`, `device`, `trace` |
//! | [`measure`] | the cost of communication | `comm`, `device`, `memory` |
//! | [`probe`] | experiments: what an MPI supports | `comm`, `device`, `measure`, `memory` |
//! | [`train`] | the loop of every training program, its options | all but `infer`, `measure`, `probe` |
//!
//! The training programs in `apps/` are a page each: arguments, grid, plan, run. `tests/layering/`
//! enforces the last column.
//!
//! # Invariants
//!
//! * Nothing that decides a number, be it a sample's place in the order, an initial weight or a
//!   random draw, depends on a rank or on the number of ranks. On the CPU, neither does the order of
//!   sums, so every layout ends with the same bits; on a GPU, layouts agree up to rounding. By default two
//!   things follow the job: sums have more leaves with more than 8 ranks on an axis (`--leaves`), and samples
//!   of files are mixed in windows where the nodes' memory does not hold them all (`--shuffle`). A resumed
//!   run keeps both.
//! * Nothing starts before all ranks have compared their program, its version, their options and
//!   their data; the few options that may differ are listed in `app/command_line.rs`.
//! * After an error on one rank alone no collective operation runs: the rank ends the job at once.
//!   An error that all ranks share has been agreed on.
//! * A training step with one thread per rank allocates no memory once training is under way,
//!   except, on a GPU, a small record of each message.
//! * MPI is given a device buffer only as a message, after the device has finished with it; any
//!   other use does not compile.
//!
//! # Glossary
//!
//! Ranks and messages:
//!
//! * *World*: all ranks of the job. *Communicator*: a group of ranks that exchange messages.
//!   *Rank*: one process, or its number in a communicator. *Root*: the rank from which an operation
//!   distributes or to which it collects; rank 0 where none is named. *Node*: the ranks that share
//!   memory.
//! * *Grid*: the world arranged along the axes data, stage and tensor. *Axis* always means one of
//!   the grid, *dimension* one of a tensor.
//! * *Pending*: an operation that has been started, and that owns its buffers until it is waited
//!   for. *Plan*: one rank's messages and sums in a collective operation, as data. *Round*: the
//!   messages of a plan that travel at once. *Engine*: the code that advances multi-round
//!   operations in every wait and test.
//! * *Part*: one of N equal ranges of a buffer in an operation of N ranks; part r belongs to rank
//!   r. *Chunk*: a range of a long buffer that a plan moves at once. *Lane*: the resources for
//!   one chunk in flight. *Inbox*: the memory where terms of a sum arrive. *Arena*: the memory that
//!   an operation works on, which is a buffer and an inbox per lane. *Loan*: a buffer that an
//!   operation has as its arena until it is done.
//! * *Handle*: a name by which another process maps device memory (CUDA IPC). *Peers*: ranks that map each
//!   other's device memory. *Leader*: the one of the peers on a device, or of all, that does the work; of
//!   two that exchange a message, the receiver.
//! * *CUDA-aware*: said of an MPI that reads and writes device memory itself. *Staged*: said of a
//!   message that is copied through pinned host memory because MPI is not CUDA-aware.
//!
//! Arithmetic and models:
//!
//! * *Device*: a place to compute, the host's CPU or a GPU. *Buffer*: an array in a device's
//!   memory. *View*: a range of a buffer. *Role*: the use of a buffer, from which the device
//!   chooses its precision.
//! * *Leaf*: consecutive terms of a sum, at places that no layout changes, added one after the other.
//!   *Tree*: the order in which leaves are added. *Subtree*: consecutive leaves that the tree adds to one
//!   partial sum. *Section*: the consecutive terms of a sum that a rank adds at a time.
//! * *Module*: an entry of a network as it is written. *Layer*: the modules that a device runs as
//!   one operation. *Tensor*: a named array of parameters, in PyTorch's name and shape. *Logical
//!   order*: the order of layers, tensors and elements that no layout changes.
//! * *Slot*: one value per parameter that the optimizer keeps, such as Adam's first moment.
//! * *Segment*: consecutive tensors in one buffer, padded to divide evenly. *Block*: a rectangular
//!   region of a matrix; of a dataset, the consecutive samples that are read and decompressed together.
//!
//! Strategies:
//!
//! * *Shard*: the share of something divided among ranks that one rank holds: of a tensor, of the
//!   rows of a batch, of a list.
//! * *Replica*: one of several ranks, or groups of ranks, that hold equal parameters (PyTorch's DDP), or
//!   a *part* each of the same ones. *Bucket*: a segment of gradients, which is reduced in one message.
//! * *ZeRO*: the division of a model's state among its replicas, in stages 0 to 3, of which the last is
//!   PyTorch's FSDP. *Owned*: said of
//!   the part that a replica updates. *Gathered*: said of parameters that a replica holds whole for
//!   as long as layers read them. *Open*: said of a segment of gradients that layers write to.
//! * *Column-parallel*, *row-parallel*: said of a linear layer of which ranks have some of the outputs,
//!   or some of the inputs (Megatron-LM).
//! * *Footprint*: the memory that a rank needs. *Recomputation*: the backward pass repeats a forward pass
//!   whose values were not kept; also called activation checkpointing.
//! * *Audit*: the comparison of a rank's work with its repetition by another rank, its *auditor*. *Site*: an
//!   array in the computation of a step. *Fold*: a checksum by which arrays are compared.
//! * *Stage*: consecutive layers that one rank runs. *Micro-batch*: the rows of a batch that pass
//!   through a stage at once; several in a step are *gradient accumulation*. *Schedule*: the *actions*
//!   (passes and messages) of every stage in one step, in order. *Bubble*: the time in a step in which
//!   stages are idle.
//! * *Batch*: the samples of one step, over all ranks. *Step*: one update of the parameters.
//!   *Epoch*: one pass over all samples.
//!
//! Data:
//!
//! * *Block*: see above. *Window*: the consecutive blocks of an epoch's order within which samples are
//!   mixed. *Place*: the position of a block in that order.
//! * *Home*: the rank that reads a sample from its file, on the node that keeps it. *Ticket*: the
//!   number of a block in the order in which a node needs its blocks.
//! * *Scan*: the pass over all samples before training.
//!
//! Runs:
//!
//! * *Run*: training from its first step to its last. *Start*: one launch of a program for it; a run may
//!   take several.
//! * *Checkpoint*: a file from which a run continues. *Bundle*: tensors that ranks send together when one is
//!   written. *Seal*: the checksum over all of a checkpoint.
//! * *Digest*: a hash of all parameters' bits in logical order. *Fingerprint*: a hash by which
//!   ranks compare their data.
//! * *Span*: an activity of one thread, from begin to end. *Flight*: the time that a message
//!   travels.
//!
//! # Deliberately absent
//!
//! `nn` has no rank, `comm` has no layer, no strategy has a loop of its own, there is no mock of
//! MPI (a program started without a launcher is a job of one rank), and no cargo feature changes the
//! library: `gemm` builds a benchmark.
#![warn(clippy::unwrap_used)]

mod error;

pub mod app;
pub mod checkpoint;
pub mod comm;
pub mod dataset;
pub mod device;
pub mod infer;
pub mod measure;
pub mod memory;
pub mod nn;
pub mod optim;
pub mod parallel;
pub mod probe;
pub mod store;
pub mod sums;
pub mod trace;
pub mod train;

pub use error::{Error, Result};
