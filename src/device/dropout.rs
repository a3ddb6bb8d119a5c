//! Random numbers of dropout.

/// The draws of a module's dropout in a step: element e is drawn by `(seed, step, module, e)` alone, with the
/// generator Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so that
/// every layout draws the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutMask {
    /// The probability of 0, below 1.
    pub rate: f32,
    /// The seed of the run.
    pub seed: u64,
    /// The number of the step.
    pub step: u32,
    /// The number of the module among those that draw.
    pub module: u32,
}

impl DropoutMask {
    /// Returns the smallest number of 32 random bits that keeps an element.
    pub(super) fn threshold(&self) -> u32 {
        (f64::from(self.rate) * (1_u64 << 32) as f64) as u32
    }

    /// Returns the factor of elements that are kept.
    pub(super) fn scale(&self) -> f32 {
        1.0 / (1.0 - self.rate)
    }
}

/// The draws of the elements of an array, and their numbers.
#[derive(Debug, Clone, Copy)]
pub struct DropoutShape {
    /// The draws.
    pub mask: DropoutMask,
    /// The number of the first element among those of the batch.
    pub first: u64,
    /// The elements of a row, at least 1, whose numbers are consecutive.
    pub row_len: u64,
    /// The distance from the number of a row's first element to that of the next.
    pub row_stride: u64,
}

/// The draws of the weights of attention, the softmax's values, and their numbers. The weights of a query
/// have consecutive numbers; between heads, there is [`AttentionDropout::head_stride`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// The draws.
    pub mask: DropoutMask,
    /// The number of the first weight of the first head and sequence among those of the batch: a multiple
    /// of 4.
    pub first: u64,
    /// The distance from the number of a sequence's first weight to that of the next: that of all heads of
    /// the whole layer.
    pub row_stride: u64,
}

impl AttentionDropout {
    /// Returns the distance from the number of a query's first weight to that of the next, among `positions`
    /// keys: whole blocks of the generator.
    pub(super) fn query_stride(positions: usize) -> u64 {
        positions.next_multiple_of(4) as u64
    }

    /// Returns the distance from the number of a head's first weight to that of the next.
    pub fn head_stride(positions: usize) -> u64 {
        positions as u64 * AttentionDropout::query_stride(positions)
    }

    /// Returns the number of the first weight of a head of a rank in sequence `row`.
    pub(super) fn of_head(&self, row: usize, head: usize, positions: usize) -> u64 {
        self.first + row as u64 * self.row_stride + head as u64 * AttentionDropout::head_stride(positions)
    }
}
