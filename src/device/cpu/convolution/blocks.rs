//! The loop of both gradients: a block of the result stays in registers while blocks of another array,
//! each times one gradient, are added to it.

use pulp::Simd;

/// Gradients of `OUTPUTS` outputs, and the start of the block that those of a place belong to. The places
/// are in lines of one length.
pub(super) trait BlockGradients<const OUTPUTS: usize>: Copy {
    fn num_lines(self) -> usize;

    fn line_len(self) -> usize;

    fn get(self, line: usize, at: usize) -> ([f32; OUTPUTS], usize);
}

/// A gradient that is not zero, and the start of its block.
#[derive(Clone, Copy, Default)]
pub(super) struct SparseGradient {
    pub(super) gradient: f32,
    pub(super) start: u32,
}

impl BlockGradients<1> for &[SparseGradient] {
    #[inline(always)]
    fn num_lines(self) -> usize {
        1
    }

    #[inline(always)]
    fn line_len(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn get(self, _: usize, at: usize) -> ([f32; 1], usize) {
        let SparseGradient { gradient, start } = self[at];
        ([gradient], start as usize)
    }
}

/// All gradients, zeros included: the first of every `stride` of `values`. The starts of blocks are `step`
/// apart, those of lines `line_step`.
#[derive(Clone, Copy)]
pub(super) struct DenseGradients<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
    pub(super) num_lines: usize,
    pub(super) line_len: usize,
    pub(super) step: usize,
    pub(super) line_step: usize,
}

impl<const OUTPUTS: usize> BlockGradients<OUTPUTS> for DenseGradients<'_> {
    #[inline(always)]
    fn num_lines(self) -> usize {
        self.num_lines
    }

    #[inline(always)]
    fn line_len(self) -> usize {
        self.line_len
    }

    #[inline(always)]
    fn get(self, line: usize, at: usize) -> ([f32; OUTPUTS], usize) {
        let mut gradients = [0.0; OUTPUTS];
        let place = line * self.line_len + at;
        gradients.copy_from_slice(&self.values[place * self.stride..][..OUTPUTS]);
        (gradients, line * self.line_step + at * self.step)
    }
}

/// An array of which blocks are read, with the distance between rows of a block.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

/// Blocks to add to, with the distance between their rows.
pub(super) struct TargetBlock<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) stride: usize,
    /// The distance to the block of the next output, if there are several.
    pub(super) distance: usize,
    /// Rows of the block.
    pub(super) rows: usize,
    /// Vectors in a row of the block.
    pub(super) vectors: usize,
}

/// Vectors of sums that fit 32 registers, beside gradients and a vector of the other array.
pub(super) const MOST_SUMS: usize = 24;

/// Computes `target += Σ gradient · block` over `gradients`, in their order, for the block of each output.
#[inline(always)]
pub(super) fn add_blocks<S: Simd, G: BlockGradients<OUTPUTS>, const OUTPUTS: usize>(
    simd: S,
    gradients: G,
    from: Blocks<'_>,
    target: TargetBlock<'_>,
) {
    let TargetBlock { values, stride, distance, rows, vectors } = target;
    let most_sums = if S::REGISTER_COUNT < 32 { MOST_SUMS / 2 } else { MOST_SUMS };
    let mut row = 0;
    while row < rows {
        let height = match rows - row {
            5 | 7.. if OUTPUTS == 1 => 5,
            3.. => 3,
            _ => 1,
        };
        let most_vectors = (most_sums / (height * OUTPUTS)).clamp(1, 4);
        let mut vector = 0;
        while vector < vectors {
            let width = (vectors - vector).min(most_vectors);
            let offset = vector * S::F32_LANES;
            let from = Blocks { values: &from.values[row * from.stride + offset..], ..from };
            let into = Place { values: &mut values[row * stride + offset..], stride, distance };
            match (height, width) {
                (5, 1) => add_block::<S, G, OUTPUTS, 5, 1>(simd, gradients, from, into),
                (5, 2) => add_block::<S, G, OUTPUTS, 5, 2>(simd, gradients, from, into),
                (5, 3) => add_block::<S, G, OUTPUTS, 5, 3>(simd, gradients, from, into),
                (5, _) => add_block::<S, G, OUTPUTS, 5, 4>(simd, gradients, from, into),
                (3, 1) => add_block::<S, G, OUTPUTS, 3, 1>(simd, gradients, from, into),
                (3, 2) => add_block::<S, G, OUTPUTS, 3, 2>(simd, gradients, from, into),
                (3, 3) => add_block::<S, G, OUTPUTS, 3, 3>(simd, gradients, from, into),
                (3, _) => add_block::<S, G, OUTPUTS, 3, 4>(simd, gradients, from, into),
                (_, 1) => add_block::<S, G, OUTPUTS, 1, 1>(simd, gradients, from, into),
                (_, 2) => add_block::<S, G, OUTPUTS, 1, 2>(simd, gradients, from, into),
                (_, 3) => add_block::<S, G, OUTPUTS, 1, 3>(simd, gradients, from, into),
                _ => add_block::<S, G, OUTPUTS, 1, 4>(simd, gradients, from, into),
            }
            vector += width;
        }
        row += height;
    }
}

/// The beginning of the blocks that fit the registers: see [`TargetBlock`].
struct Place<'a> {
    values: &'a mut [f32],
    stride: usize,
    distance: usize,
}

/// Adds to blocks that fit the registers: see [`add_blocks`].
#[inline(always)]
fn add_block<
    S: Simd,
    G: BlockGradients<OUTPUTS>,
    const OUTPUTS: usize,
    const ROWS: usize,
    const VECTORS: usize,
>(
    simd: S,
    gradients: G,
    from: Blocks<'_>,
    into: Place<'_>,
) {
    let length = VECTORS * S::F32_LANES;
    let mut sums = [[[simd.splat_f32s(0.0); VECTORS]; ROWS]; OUTPUTS];
    for (output, sums) in sums.iter_mut().enumerate() {
        for (r, sums) in sums.iter_mut().enumerate() {
            let row = &into.values[output * into.distance + r * into.stride..][..length];
            sums.copy_from_slice(S::as_simd_f32s(row).0);
        }
    }
    for line in 0..gradients.num_lines() {
        for at in 0..gradients.line_len() {
            let (factors, start) = gradients.get(line, at);
            let block = &from.values[start..][..(ROWS - 1) * from.stride + length];
            for r in 0..ROWS {
                let (row, _) = S::as_simd_f32s(&block[r * from.stride..][..length]);
                for v in 0..VECTORS {
                    for output in 0..OUTPUTS {
                        let gradient = simd.splat_f32s(factors[output]);
                        sums[output][r][v] = simd.mul_add_f32s(gradient, row[v], sums[output][r][v]);
                    }
                }
            }
        }
    }
    for (output, sums) in sums.iter().enumerate() {
        for (r, sums) in sums.iter().enumerate() {
            let row = &mut into.values[output * into.distance + r * into.stride..][..length];
            S::as_mut_simd_f32s(row).0.copy_from_slice(sums);
        }
    }
}
