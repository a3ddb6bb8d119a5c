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
//! | `linear 24`, and others without braces | the one that [`modules`] has for the name |
//! | `residual { … }` | [`Module::Residual`]: the body, and perhaps `shortcut { … }` as its last line |
//! | `scope "h" { … }` | [`Module::Scope`]: names in it begin with `h.` |
//! | `repeat N { … }` | the modules N times; `repeat N "h" { … }` in scopes `h.0`, `h.1`, … |
//!
//! A module with parameters may have `name="…"`, which its tensors get in place of a name with a number.
//! The line `network` is the first, or is left out: the network's name is then that of the file, and its
//! loss fits the targets. `//` begins a comment.
//!
//! `--show-network` prints any network in this form.

mod fields;
mod modules;
mod parse;
mod print;

#[cfg(test)]
mod tests;

pub(super) use print::head;

use super::Loss;

/// The most bytes of a text, which takes its time to be read.
pub const LONGEST_TEXT: usize = 256 << 10;

/// The names of losses.
const LOSSES: [(&str, Loss); 3] = [
    ("cross-entropy", Loss::CrossEntropy),
    ("mean-squared-error", Loss::MeanSquaredError),
    ("mean-of-squares", Loss::MeanOfSquares),
];
