//! Formats of values on the device, and precisions of products.

/// The precision of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// `f32` throughout.
    F32,
    /// Factors rounded to 10 bits of mantissa, sums in `f32`.
    Tf32,
    /// Factors kept in bf16, 7 bits of mantissa, sums in `f32`.
    Bf16,
}

/// The format of values in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    F32,
    Bf16,
}

impl Format {
    /// Returns the name of the format in the kernels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::Bf16 => 2,
        }
    }

    /// Returns the number of values in 16 bytes, the most that a thread reads or writes in one access.
    pub(crate) fn values_at_once(self) -> usize {
        16 / self.bytes()
    }
}
