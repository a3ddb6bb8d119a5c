//! Sums whose bits are the same in every layout: for any number of ranks, threads and
//! micro-batches, and with any vector instructions.
//!
//! [`Leaves`] is the canonical order of a sum of products, [`Section`] the consecutive terms of one
//! that a rank adds at a time, [`Subtrees`] the sums that ranks have before they are added up over
//! the ranks, [`ExactSum`] a sum that is rounded once and has no order.
//!
//! # The order
//!
//! Floating-point addition is not associative, so a sum has the same bits only if it is formed in
//! the same order. A layout divides the rows of a batch among replicas and micro-batches, and the
//! features of a layer among the ranks of the tensor axis. The sums over those are canonical. (A sum
//! over features that no layout divides is one leaf: over the inputs of a column-parallel layer, and
//! over the outputs of the layer after attention.)
//!
//! * The n terms are cut into L *leaves*, of which leaf i begins with term ⌈n·i/L⌉ (`--leaves L`, 8
//!   unless more ranks share a sum). Longer leaves are spread among the others, so that ranks have
//!   equally many terms. A leaf may be empty: its value is +0.
//! * A leaf is one chain of fused multiply-adds in the order of its terms, from +0:
//!   `sum = fma(left, right, sum)`. The first leaf of an output with a bias begins with the bias. A
//!   gradient of a bias is a chain of additions, of images that of the sums of each, and so are the
//!   exponentials of a cross-entropy over classes. The gradient of a convolution's weight goes from
//!   image to image: one chain of products, without those of gradients that pooling or a ReLU has set
//!   to 0, or, for kernels of 3 × 3 on many channels, a sum of each image.
//! * The leaves are added by one binary tree: neighbours first, then pairs of neighbours, cut off at
//!   the last leaf. With 6 leaves: ((0 + 1) + (2 + 3)) + (4 + 5).
//!
//! # A rank's work is made of subtrees
//!
//! A node of the tree covers the leaves `j·2ᵗ` to `(j + 1)·2ᵗ`, cut off at L, and its value depends
//! on those leaves alone. Rank r of R has the leaves from `a` to `b` of [`shard()`]`(L, r, R)`.
//! Reading the leaves in order and merging two neighbouring nodes as soon as both are complete, as a
//! binary counter carries, leaves the maximal nodes within `a..b` on a stack: at most 2·log₂ L, first
//! growing, then shrinking. None of them can be merged within the rank, and each is a node of the
//! whole tree, so the owner of a sum only has to put the nodes of all ranks side by side, in the
//! order of the ranks, and go on merging: [`Subtrees::merges`] says how often after each. The result
//! is the root, by the same additions as on one rank. If L and R are powers of two, `b − a` is L / R
//! and `a` a multiple of it, so every rank has one node, and a reduce-scatter moves as many bytes as
//! one in any other order. Three ranks that share 8 leaves have two nodes each, and send twice as
//! much; with `--leaves 12` they have one.
//!
//! The losses of rows, and the squares in the norm of the gradient to clip it, are added exactly
//! ([`ExactSum`]), so their sums need no order.
//!
//! A micro-batch is some of the rank's leaves, and leaves the stack to the next one; or, where
//! micro-batches are more than leaves, a part of a leaf, whose chain the next one continues:
//! `fma` from where it stopped has the bits of one long chain. [`Section`] is both.
//!
//! Parameters and losses are then a function of the network, the data, the options and L: tests hold one
//! `parameters_digest` over programs, ranks, schedules, stages of ZeRO, micro-batches, threads,
//! vector instructions and MPIs (`tests/programs/one_hash.rs`).
//!
//! So what a rank computes can be repeated by any other, and a difference is a fault:
//! [`parallel::audit`](crate::parallel::audit).
//!
//! # Traps
//!
//! * *Tails.* A loop over whole vectors and one over the rest must use the same operations: an
//!   `exp` from a library for the rest has other bits than a polynomial in vectors. Loops here are
//!   written once, for one element, and compiled for every width. The C library's functions have other
//!   bits on other machines, so those of `libm` take their place.
//! * *Fused multiply-adds.* `a * b + c` is rounded twice, `fma(a, b, c)` once. A compiler may not
//!   exchange them, so each is written where it is meant; a processor without the instruction
//!   computes `fma` in software.
//! * *Blocks.* A product that cuts its inner dimension by the size of a cache, or takes another way
//!   for few rows, has bits that depend on the machine and on the shape. The product in
//!   `device/cpu/matmul/` never cuts it but at leaves.
//! * *Zeros.* +0 is not neutral for −0: `−0 + 0` is +0. An empty leaf and a product with a gradient of
//!   zero are added in every layout or in none.
//! * *Subnormal numbers* are flushed to zero by every thread of every rank, or by none:
//!   [`flush_subnormals`](crate::device::flush_subnormals).
//! * *NaN.* Which of two NaN a sum has, and its sign, depends on the processor. A run stops before
//!   that matters.
//! * *Norms* are sums over parameters, which ZeRO cuts anywhere. They are summed exactly:
//!   [`ExactSum`].
//!
//! # GPUs
//!
//! On a GPU the bits depend on the layout, and the log says so. Matrix products come from cuBLASLt,
//! which chooses its order by shape and may split the inner dimension; bias gradients and filters are
//! added up by as many blocks as the device has room for. A run repeats its own bits. The bits of every
//! layout would take products of our own that cut the inner dimension at leaves: on tensor cores, whose
//! order within an instruction is not documented, that means leaves of whole instructions, and f32
//! accumulators that are added by the tree in registers.

mod exact;
mod leaves;
mod shard;
mod subtrees;

pub use exact::ExactSum;
pub use leaves::{Leaves, MOST_LEAVES, MOST_PENDING, NUM_LEAVES, Section, Step};
pub use shard::shard;
pub use subtrees::Subtrees;
