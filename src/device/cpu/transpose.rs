//! Transposition, in blocks of registers.

use super::fetch::fetch_after;

/// Rows and columns of a block.
const SIDE: usize = 4;

/// Elements in a cache line: the columns that are read before those that follow.
const LINE: usize = 16;

/// The distance, in elements of a row, at which rows are fetched ahead into the L2 cache.
const AHEAD: usize = 2 * LINE;

/// Writes the transpose of `from`, `[rows, columns]`, whose rows are `from_stride` apart, into `into`, whose
/// rows are `into_stride` apart.
#[inline(always)]
pub(super) fn transpose(
    [rows, columns]: [usize; 2],
    from: &[f32],
    from_stride: usize,
    into: &mut [f32],
    into_stride: usize,
) {
    let whole_rows = rows / SIDE * SIDE;
    for first in (0..columns).step_by(LINE) {
        let end = columns.min(first + LINE);
        let whole_end = end / SIDE * SIDE;
        for row in (0..whole_rows).step_by(SIDE) {
            // no closures: the compiler calls them instead of inlining them
            let mut lines: [&[[f32; SIDE]]; SIDE] = [&[]; SIDE];
            for (i, blocks) in lines.iter_mut().enumerate() {
                let line = &from[(row + i) * from_stride..][first..whole_end.max(first)];
                fetch_after(line, AHEAD);
                *blocks = line.as_chunks().0;
            }
            let [a, b, c, d] = lines;
            let into = &mut into[first * into_stride + row..];
            for (at, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
                let into = &mut into[at * SIDE * into_stride..];
                for (i, line) in transposed([*a, *b, *c, *d]).iter().enumerate() {
                    into[i * into_stride..][..SIDE].copy_from_slice(line);
                }
            }
        }
        let copy = |row: usize, column: usize, into: &mut [f32]| {
            into[column * into_stride + row] = from[row * from_stride + column];
        };
        for column in first..end {
            let rest = if column < whole_end { whole_rows } else { 0 };
            (rest..rows).for_each(|row| copy(row, column, into));
        }
    }
}

/// Returns the transpose of a block.
#[inline(always)]
fn transposed(block: [[f32; SIDE]; SIDE]) -> [[f32; SIDE]; SIDE] {
    #[cfg(target_arch = "x86_64")]
    if let Some(sse) = pulp::core_arch::x86::Sse::try_new() {
        // the compiler makes no shuffles of the loop below
        let [a, b, c, d]: [std::arch::x86_64::__m128; SIDE] = bytemuck::cast(block);
        let [low, low_after] = [sse._mm_unpacklo_ps(a, b), sse._mm_unpacklo_ps(c, d)];
        let [high, high_after] = [sse._mm_unpackhi_ps(a, b), sse._mm_unpackhi_ps(c, d)];
        return bytemuck::cast([
            sse._mm_movelh_ps(low, low_after),
            sse._mm_movehl_ps(low_after, low),
            sse._mm_movelh_ps(high, high_after),
            sse._mm_movehl_ps(high_after, high),
        ]);
    }
    let mut result = [[0.0; SIDE]; SIDE];
    for (row, line) in block.iter().enumerate() {
        for (column, element) in line.iter().enumerate() {
            result[column][row] = *element;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::transpose;

    #[test]
    fn matrices_of_all_sizes_are_transposed() {
        for rows in [1, 3, 4, 5, 16, 21] {
            for columns in [1, 2, 4, 7, 16, 19, 33] {
                let (from_stride, into_stride) = (columns + 3, rows + 2);
                let from: Vec<f32> = (0..rows * from_stride).map(|i| i as f32).collect();
                let mut into = vec![-1.0; columns * into_stride];
                transpose([rows, columns], &from, from_stride, &mut into, into_stride);
                for (at, value) in into.iter().enumerate() {
                    let (column, row) = (at / into_stride, at % into_stride);
                    let expected = if row < rows { (row * from_stride + column) as f32 } else { -1.0 };
                    assert_eq!(*value, expected, "{rows} × {columns}, column {column}, row {row}");
                }
            }
        }
    }
}
