//! Matrix products on the `gemm` crate: the only place that names it.

use std::cell::RefCell;

use super::Cpu;

/// A row-major matrix, or the transpose of one.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) transposed: bool,
}

impl<'a> Matrix<'a> {
    /// `values` as `[rows, columns]`.
    pub(super) fn new(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert!(holds(values, rows, columns), "a {rows} × {columns} matrix in {} elements", values.len());
        Matrix { values, rows, columns, transposed: false }
    }

    /// `values` as `[columns, rows]`, to be read as its transpose, `[rows, columns]`.
    pub(super) fn transposed(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        Matrix { transposed: true, ..Matrix::new(values, rows, columns) }
    }

    /// `(column stride, row stride)`.
    fn strides(&self) -> (isize, isize) {
        if self.transposed { (self.rows as isize, 1) } else { (1, self.columns as isize) }
    }
}

/// True if `values` are enough for a matrix of `rows × columns`, whose product may be more than a `usize` can hold.
fn holds(values: &[f32], rows: usize, columns: usize) -> bool {
    rows.checked_mul(columns).is_some_and(|len| values.len() >= len)
}

/// Below this many rows, `gemm` would spend more time in repacking a transposed right-hand side than in multiplying.
const TURNED_ROWS: usize = 512;

/// Up to this many rows, a matrix is best read in order: see `few_rows.rs`.
const STRIPE_ROWS: usize = 32;

thread_local! {
    static TURNED: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

impl Cpu {
    /// `product (+)= left · right`, `[left.rows, right.columns]`; added where `accumulate`.
    ///
    /// A product of few rows with a transposed matrix, as in the backward pass of `x · W`, has the small operand turned, is
    /// formed column-major and turned back: 64 × 1024 × 1024 runs at 64 GFLOP/s the straight way, at 230 this way. A product of
    /// very few rows reads the large operand once, in order.
    pub(super) fn multiply(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        product: &mut [f32],
        accumulate: bool,
    ) {
        let (m, n) = (left.rows, right.columns);
        assert!(holds(product, m, n), "a {m} × {n} product in {} elements", product.len());
        assert_eq!(left.columns, right.rows, "inner lengths of a product");
        let large = n * left.columns > 1 << 16;
        if right.transposed && !left.transposed && !accumulate && m < TURNED_ROWS && large {
            TURNED.with_borrow_mut(|[turned_left, turned_product]| {
                let k = left.columns;
                turned_left.resize(turned_left.len().max(m * k), 0.0);
                turned_product.resize(turned_product.len().max(m * n), 0.0);
                self.transpose_matrix(m, k, left.values, turned_left);
                self.gemm(
                    Matrix::transposed(turned_left, m, k),
                    right,
                    turned_product,
                    (m as isize, 1),
                    false,
                );
                self.transpose_matrix(n, m, turned_product, product);
            });
        } else if self.threads == 1
            && !right.transposed
            && !left.transposed
            && !accumulate
            && m <= STRIPE_ROWS
            && large
        {
            self.multiply_few_rows((m, left.columns, n), left.values, right.values, product);
        } else {
            self.gemm(left, right, product, (1, n as isize), accumulate);
        }
    }

    /// `strides` are those of the product, column then row.
    #[allow(unsafe_code)]
    fn gemm(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        product: &mut [f32],
        strides: (isize, isize),
        add: bool,
    ) {
        let (m, n, k) = (left.rows, right.columns, left.columns);
        assert_eq!(k, right.rows, "inner lengths of a product");
        let (left_strides, right_strides) = (left.strides(), right.strides());
        let threads = match self.threads {
            1 => gemm::Parallelism::None,
            threads => gemm::Parallelism::Rayon(threads),
        };
        // SAFETY: the three slices hold the matrices that their sizes and strides describe: checked by `Matrix::new` and
        // by `multiply`, whose two layouts of the product both cover m · n elements; `product` is borrowed exclusively.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                product.as_mut_ptr(),
                strides.0,
                strides.1,
                add,
                left.values.as_ptr(),
                left_strides.0,
                left_strides.1,
                right.values.as_ptr(),
                right_strides.0,
                right_strides.1,
                1.0,
                1.0,
                false,
                false,
                false,
                threads,
            );
        }
    }

    /// `output = inputᵀ`, `input` being `[rows, columns]`; in blocks that fit a cache line each way.
    pub(super) fn transpose_matrix(&self, rows: usize, columns: usize, input: &[f32], output: &mut [f32]) {
        const BLOCK: usize = 16;
        self.vectorised(
            #[inline(always)]
            || {
                for row in (0..rows).step_by(BLOCK) {
                    let height = BLOCK.min(rows - row);
                    for column in (0..columns).step_by(BLOCK) {
                        let width = BLOCK.min(columns - column);
                        for c in column..column + width {
                            let line = &mut output[c * rows + row..][..height];
                            let from = &input[row * columns + c..];
                            for (r, value) in line.iter_mut().enumerate() {
                                *value = from[r * columns];
                            }
                        }
                    }
                }
            },
        );
    }
}
