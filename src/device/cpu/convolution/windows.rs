//! The loop of the forward pass and of the gradient of the inputs: sums over windows of an image.
//!
//! Images are channels last, so the inputs that a row of a window covers, all channels, are consecutive in
//! memory. Lanes of a vector are output channels. A tile of `ROWS × COLUMNS` neighbouring sums stays in
//! registers while the loop runs over the taps of the kernel: each step loads `GROUP` vectors of weights and
//! multiplies them by one broadcast input for each sum of the tile.

use pulp::Simd;

/// Stands for a number of channels that is not a compile-time constant, unlike those of grey and
/// colour images and of common residual networks, or for a stride above 1.
pub(super) const ANY: usize = 0;

/// The first place of a tile and its output channels.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Row and column among the windows.
    pub(super) row: usize,
    pub(super) column: usize,
    /// The first vector of output channels.
    pub(super) group: usize,
}

/// The sums of a tile, `[row][column][vector of output channels]`.
pub(super) type TileSums<S, const ROWS: usize, const COLUMNS: usize, const GROUP: usize> =
    [[[<S as Simd>::f32s; GROUP]; COLUMNS]; ROWS];

/// The windows of an image, with the weights in vectors.
#[derive(Clone, Copy)]
pub(super) struct Windows<'a, S: Simd> {
    pub(super) simd: S,
    /// The image from the first window on, with any zeros around it.
    pub(super) image: &'a [f32],
    /// Places from a row of the image to the next.
    pub(super) width: usize,
    pub(super) channels: usize,
    /// Rows and columns of a window.
    pub(super) kernel: [usize; 2],
    /// Places from a window to the next.
    pub(super) stride: usize,
    /// `[kernel row, kernel column, channel, vector of output channels]`.
    pub(super) taps: &'a [S::f32s],
    /// Vectors that hold all output channels.
    pub(super) vectors: usize,
    /// The values with which the sums begin, one vector for each vector of output channels.
    pub(super) start: &'a [S::f32s],
}

impl<S: Simd> Windows<'_, S> {
    /// Returns the number of channels, or `ANY` with a stride above 1.
    #[inline(always)]
    pub(super) fn known_channels(&self) -> usize {
        // the distance between neighbouring inputs is then known too
        if self.stride == 1 { self.channels } else { ANY }
    }

    /// Forms the sums of `rows × columns` windows, and calls `store` with the row and the column of each, the
    /// number of the vector and the sums.
    #[inline(always)]
    pub(super) fn form(&self, size: [usize; 2], mut store: impl FnMut([usize; 2], usize, S::f32s)) {
        match self.known_channels() {
            3 => self.form_rows::<3>(size, &mut store),
            16 => self.form_rows::<16>(size, &mut store),
            32 => self.form_rows::<32>(size, &mut store),
            64 => self.form_rows::<64>(size, &mut store),
            _ => self.form_rows::<ANY>(size, &mut store),
        }
    }

    #[inline(always)]
    fn form_rows<const CHANNELS: usize>(
        &self,
        [rows, columns]: [usize; 2],
        store: &mut impl FnMut([usize; 2], usize, S::f32s),
    ) {
        let few_registers = S::REGISTER_COUNT < 32;
        let mut row = 0;
        while row < rows {
            // a single vector of outputs has too few sums in one row
            let height = if self.vectors == 1 && rows - row >= 2 { 2 } else { 1 };
            let mut group = 0;
            while group < self.vectors {
                let size = if self.vectors - group >= 2 { 2 } else { 1 };
                let mut column = 0;
                while column < columns {
                    let at = Tile { row, column, group };
                    column += match (height, size, columns - column) {
                        (2, _, 8..) if !few_registers => self.form_tile::<2, 8, 1, CHANNELS>(at, store),
                        (2, _, 4..) => self.form_tile::<2, 4, 1, CHANNELS>(at, store),
                        (2, ..) => self.form_tile::<2, 1, 1, CHANNELS>(at, store),
                        (_, 1, 4..) => self.form_tile::<1, 4, 1, CHANNELS>(at, store),
                        (_, 1, _) => self.form_tile::<1, 1, 1, CHANNELS>(at, store),
                        (.., 8..) if !few_registers => self.form_tile::<1, 8, 2, CHANNELS>(at, store),
                        (.., 4..) => self.form_tile::<1, 4, 2, CHANNELS>(at, store),
                        _ => self.form_tile::<1, 1, 2, CHANNELS>(at, store),
                    };
                }
                group += size;
            }
            row += height;
        }
    }

    /// Forms the sums of a tile and stores them. Returns `COLUMNS`.
    #[inline(always)]
    fn form_tile<const ROWS: usize, const COLUMNS: usize, const GROUP: usize, const CHANNELS: usize>(
        &self,
        at: Tile,
        store: &mut impl FnMut([usize; 2], usize, S::f32s),
    ) -> usize {
        let sums = self.tile::<ROWS, COLUMNS, GROUP, CHANNELS>(at);
        for (row, sums) in (at.row..).zip(&sums) {
            for (column, sums) in (at.column..).zip(sums) {
                for (vector, sum) in (at.group..).zip(sums) {
                    store([row, column], vector, *sum);
                }
            }
        }
        COLUMNS
    }

    /// Returns the sums of a tile.
    #[inline(always)]
    pub(super) fn tile<const ROWS: usize, const COLUMNS: usize, const GROUP: usize, const CHANNELS: usize>(
        &self,
        at: Tile,
    ) -> TileSums<S, ROWS, COLUMNS, GROUP> {
        let channels = if CHANNELS == ANY { self.channels } else { CHANNELS };
        let stride = if CHANNELS == ANY { self.stride } else { 1 };
        let [kernel_rows, kernel_columns] = self.kernel;
        let (run, step) = (kernel_columns * channels, stride * channels);
        let start: [S::f32s; GROUP] = std::array::from_fn(|g| self.start[at.group + g]);
        let mut sums = [[start; COLUMNS]; ROWS];
        for kernel_row in 0..kernel_rows {
            let inputs: [&[f32]; ROWS] = std::array::from_fn(|r| {
                let row = (at.row + r) * stride + kernel_row;
                let first = (row * self.width + at.column * stride) * channels;
                &self.image[first..][..(COLUMNS - 1) * step + run]
            });
            let taps = &self.taps[kernel_row * run * self.vectors..][..run * self.vectors];
            for (tap, weights) in taps.chunks_exact(self.vectors).enumerate() {
                let weights = &weights[at.group..][..GROUP];
                for r in 0..ROWS {
                    let inputs = &inputs[r][tap..][..(COLUMNS - 1) * step + 1];
                    for c in 0..COLUMNS {
                        let input = self.simd.splat_f32s(inputs[c * step]);
                        for (sum, weight) in sums[r][c].iter_mut().zip(weights) {
                            *sum = self.simd.mul_add_f32s(input, *weight, *sum);
                        }
                    }
                }
            }
        }
        sums
    }
}
