//! Networks in text files, in [KDL](https://kdl.dev): a module a line, branches in braces.
//!
//! ```text
//! network "residual" loss="cross-entropy"
//! linear 12
//! residual {
//!     layer-norm
//!     linear 24 name="up"
//!     gelu
//!     linear 12 name="down"
//! }
//! linear 4
//! ```
//!
//! | line | module |
//! |---|---|
//! | `linear N bias=#false deviation=D` | [`Module::Linear`] with N outputs; with a bias by default |
//! | `product N` | [`Module::Product`] with N outputs |
//! | `convolution N kernel=K` | [`Module::Convolution`] with N output channels |
//! | `max-pool N`, `average-pool N` | [`Module::MaxPool`], [`Module::AveragePool`] over windows of N × N |
//! | `global-average` | [`Module::GlobalAverage`] |
//! | `relu`, `gelu`, `gelu-tanh`, `silu`, `tanh` | [`Module::Activation`] |
//! | `gated-linear-unit "silu"` | [`Module::GatedLinearUnit`]; `sigmoid` by default, or `silu`, `gelu` |
//! | `dropout R` | [`Module::Dropout`] of rate R |
//! | `flatten` | [`Module::Flatten`] |
//! | `layer-norm bias=#false` | [`Module::LayerNorm`]; with a bias unless told otherwise |
//! | `rms-norm` | [`Module::RmsNorm`] |
//! | `group-norm G` | [`Module::GroupNorm`] of G groups |
//! | `embedding N deviation=D` | [`Module::Embedding`] with N features |
//! | `positions deviation=D` | [`Module::Positions`] |
//! | `attention H causal=#true` | [`Module::Attention`] with H heads; not causal by default |
//! | `tied-output` | [`Module::TiedOutput`] |
//! | `residual { … }` | [`Module::Residual`]: the body, and perhaps `shortcut { … }` as its last line |
//! | `scope "h" { … }` | [`Module::Scope`]: names in it begin with `h.` |
//! | `repeat N { … }` | the modules N times; `repeat N "h" { … }` in scopes `h.0`, `h.1`, … |
//!
//! `deviation` is the standard deviation of normal initial weights, in place of PyTorch's default.
//! `convolution` may have `stride=S`, `padding=P` and `bias=#false`. `attention` may have
//! `key-value-heads=K`, for heads that share keys and values, `rotary=B`, for rotary positions of base B
//! (10000 is usual), `bias=#false`, `deviation=D`, and for the layer after it `output-deviation=D`.
//!
//! A module with parameters may have `name="…"`, which its tensors get in place of a name with a number.
//! The line `network` is the first, or is left out: the network's name is then that of the file, and its
//! loss fits the targets. `//` begins a comment.
//!
//! `--show-network` prints any network in this form.

mod parse;
mod print;

#[cfg(test)]
mod tests;

pub(super) use print::head;

use super::Loss;
use crate::device::{Activation, Gate};

/// The most bytes of a text, so that it fits into a checkpoint's attribute.
pub const LONGEST_TEXT: usize = 32 << 10;

/// The names of activations.
const ACTIVATIONS: [(&str, Activation); 5] = [
    ("relu", Activation::Relu),
    ("gelu", Activation::Gelu),
    ("gelu-tanh", Activation::GeluTanh),
    ("silu", Activation::Silu),
    ("tanh", Activation::Tanh),
];

/// The names of gates.
const GATES: [(&str, Gate); 3] = [("sigmoid", Gate::Sigmoid), ("silu", Gate::Silu), ("gelu", Gate::Gelu)];

/// The names of losses.
const LOSSES: [(&str, Loss); 3] = [
    ("cross-entropy", Loss::CrossEntropy),
    ("mean-squared-error", Loss::MeanSquaredError),
    ("mean-of-squares", Loss::MeanOfSquares),
];
