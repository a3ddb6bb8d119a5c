//! The exchanges of the ranks of the tensor axis between divided layers.
//!
//! Each exchange is a pair of conjugate operations, one for the values of the forward pass, one for
//! the gradients of the backward pass: Shoeybi et al., "Megatron-LM", 2019, §3, where the first two
//! are called f and g; Korthikanti et al., "Reducing activation recomputation in large transformer
//! models", 2022, §4.2, where a gather and a scatter of positions, in their place, are called g and ḡ.
//!
//! The loss has exchanges of its own: [`cross_entropy`](super::cross_entropy).
//!
//! Sums are formed in the order of [`crate::sums`], so every rank gets the bits of a whole
//! layer, or its part of them. Their first round is under way while the gradients of the weights are
//! computed.

mod exchanger;
mod kind;

pub use exchanger::{Exchanger, Started, here, here_mut};
pub use kind::{Exchange, ExchangeKind, MessageLengths};
