//! The audit of a step: every rank repeats some of the work of another, and the bits are compared.
//!
//! Canonical sums make the bits of every array independent of who computes it, so a difference is a
//! fault of a processor, of memory or of a message, never rounding. In an audited step:
//!
//! 1. Before the step, every rank plays the part of another (`roles`): of another replica, on another
//!    node if there is one, which has equal parameters; else of another stage or rank of the tensor axis,
//!    which sends it its parameters. The ranks that play a replica run the forward and the backward pass
//!    of one leaf of that replica's batch, with all exchanges and messages (`replay`), and keep a
//!    checksum of every array (`BitFold`): values and gradients between layers, gradients of weights.
//!    Replicas also keep checksums of their parameters. Every rank sends the rank that plays its part a
//!    block of the parameters that it will update, with the optimizer's slots.
//! 2. In the step, every rank keeps the same checksums of the leaf with which its sums begin
//!    (`Recorder`). The gradients of weights are added for that leaf first and then for the other rows,
//!    which gives the same bits, because the leaf is a node of the tree. Its terms of the block's
//!    gradients are copied before they are reduced.
//! 3. After the step, checksums, terms and updated blocks go to the ranks that play the parts. These
//!    compare, add the terms in the order of the tree, repeat the update of the block (`update`), and
//!    compare that too, and what they received of it as replicas.
//!
//! The first difference in the order of the computation (`Site`) is reported: `finding`. A checksum
//! counts the bits that differ. Where there is a third rank, it repeats the leaf or the update too and says
//! whose bits it has: a replica with its parameters from before the step, or without replicas a rank of
//! another part, to which the auditor sends those that it got. With two replicas, or several in stage 3 of
//! ZeRO, no other rank has the parameters from before the step, so no third rank repeats a leaf.
//!
//! # What an audit does not see
//!
//! Work that is not repeated: other leaves, other blocks, the update of a tensor that two layers use, the
//! loss, and the norm by which gradients are clipped. A fault that stays is found once it meets a repeated
//! part. Parameters and slots of which there is one copy only (one replica, or those of ZeRO's parts), and
//! slots that every replica keeps, that change between two updates. And faults that are the same on both
//! ranks.
//!
//! The rank that is named may be another where messages of the audit itself are damaged, and where ranks
//! of the tensor axis add up gradients: these are compared after the sum, which a fault on any rank
//! changes on all of them, and the first of them is named.

mod auditor;
mod exchange;
mod finding;
mod job;
mod replay;
mod roles;
mod settings;
mod steps;
mod update;
mod witness;

pub use auditor::Auditor;
pub use job::needed_bytes;
pub use replay::{AuditedBatch, LoadRows};
pub use settings::{AuditAction, AuditSettings};
