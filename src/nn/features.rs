//! The shape of a row of values.

use std::str::FromStr;

/// The shape of one row of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Features {
    /// A vector of features.
    Flat(usize),
    /// An image, channels last.
    Image {
        /// Rows of pixels.
        height: usize,
        /// Pixels per row.
        width: usize,
        /// Values per pixel.
        channels: usize,
    },
    /// Numbers of tokens, one for each position of a sequence.
    Tokens {
        /// Positions.
        len: usize,
        /// The number of tokens that there are; numbers are below it.
        vocabulary: usize,
    },
    /// A vector of features for each position of a sequence.
    Sequence {
        /// Positions.
        len: usize,
        /// Features of a position.
        width: usize,
    },
}

/// The largest number of values in a row of inputs, of targets or of a layer's outputs. Such a row
/// takes 1 GiB, and the product of two such sizes cannot overflow.
pub const LARGEST_SIZE: usize = 1 << 28;

impl Features {
    /// Returns the number of values, saturating at `usize::MAX`.
    #[allow(clippy::len_without_is_empty)] // emptiness is an error where a model is built
    pub fn len(self) -> usize {
        match self {
            Features::Flat(len) => len,
            Features::Image { height, width, channels } => {
                height.saturating_mul(width).saturating_mul(channels)
            }
            Features::Tokens { len, .. } => len,
            Features::Sequence { len, width } => len.saturating_mul(width),
        }
    }

    /// Returns this shape with another number of values in the innermost dimension. Tokens stay as they are.
    pub fn with_last_dimension(self, last: usize) -> Features {
        match self {
            Features::Flat(_) => Features::Flat(last),
            Features::Image { height, width, .. } => Features::Image { height, width, channels: last },
            Features::Tokens { .. } => self,
            Features::Sequence { len, .. } => Features::Sequence { len, width: last },
        }
    }

    /// Returns the shape of `len` positions of this sequence. Other shapes stay as they are.
    pub fn with_positions(self, len: usize) -> Features {
        match self {
            Features::Sequence { width, .. } => Features::Sequence { len, width },
            other => other,
        }
    }

    /// Returns the number of values of the innermost dimension: features, or channels.
    pub fn last_dimension(self) -> usize {
        match self {
            Features::Flat(len) => len,
            Features::Image { channels, .. } => channels,
            Features::Tokens { .. } => 1,
            Features::Sequence { width, .. } => width,
        }
    }
}

impl FromStr for Features {
    type Err = String;

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<Features, String> {
        let words: Vec<&str> = text.split(' ').collect();
        let number = |word: &str| word.parse().map_err(|_| format!("{word:?} in {text:?} is no number"));
        Ok(match words.as_slice() {
            [len, "feature" | "features"] => Features::Flat(number(len)?),
            ["images", "of", height, "×", width, "with", channels, "channel" | "channels"] => {
                Features::Image {
                    height: number(height)?,
                    width: number(width)?,
                    channels: number(channels)?,
                }
            }
            ["sequences", "of", len, "tokens", "of", vocabulary] => {
                Features::Tokens { len: number(len)?, vocabulary: number(vocabulary)? }
            }
            ["sequences", "of", len, "×", width, "features"] => {
                Features::Sequence { len: number(len)?, width: number(width)? }
            }
            _ => return Err(format!("{text:?} is no shape of a sample")),
        })
    }
}

impl std::fmt::Display for Features {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Features::Flat(1) => write!(f, "1 feature"),
            Features::Flat(len) => write!(f, "{len} features"),
            Features::Image { height, width, channels } => {
                write!(
                    f,
                    "images of {height} × {width} with {channels} channel{}",
                    if *channels == 1 { "" } else { "s" }
                )
            }
            Features::Tokens { len, vocabulary } => write!(f, "sequences of {len} tokens of {vocabulary}"),
            Features::Sequence { len, width } => write!(f, "sequences of {len} × {width} features"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Features;

    #[test]
    fn shapes_are_text_and_back() {
        for features in [
            Features::Flat(1),
            Features::Flat(784),
            Features::Image { height: 28, width: 32, channels: 1 },
            Features::Image { height: 28, width: 32, channels: 3 },
            Features::Tokens { len: 64, vocabulary: 65 },
            Features::Sequence { len: 64, width: 128 },
        ] {
            assert_eq!(features.to_string().parse(), Ok(features));
        }
        assert!("images of 28".parse::<Features>().unwrap_err().contains("no shape"));
        assert!("x features".parse::<Features>().unwrap_err().contains("\"x\""));
    }
}
