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

/// Elements from one column to the next, and from one row to the next.
#[derive(Clone, Copy)]
struct Strides {
    column: isize,
    row: isize,
}

impl<'a> Matrix<'a> {
    /// Returns `values` as `[rows, columns]`.
    pub(super) fn new(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert!(holds(values, rows, columns), "a {rows} × {columns} matrix in {} elements", values.len());
        Matrix { values, rows, columns, transposed: false }
    }

    /// Returns the transpose, `[rows, columns]`, of `values` as `[columns, rows]`.
    pub(super) fn transposed(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        Matrix { transposed: true, ..Matrix::new(values, rows, columns) }
    }

    fn strides(&self) -> Strides {
        if self.transposed {
            Strides { column: self.rows as isize, row: 1 }
        } else {
            Strides { column: 1, row: self.columns as isize }
        }
    }
}

/// Returns true if `values` are enough for a matrix of `rows × columns`, whose product may
/// overflow.
fn holds(values: &[f32], rows: usize, columns: usize) -> bool {
    rows.checked_mul(columns).is_some_and(|len| values.len() >= len)
}

/// Below this many rows, `gemm` would spend more time repacking a transposed right-hand side than
/// multiplying.
const MAX_TRANSPOSED_ROWS: usize = 512;

/// Up to this many rows, it is fastest to read the right-hand side in order: see `few_rows.rs`.
const MAX_FEW_ROWS: usize = 32;

/// Above this many elements of the right-hand side, the special algorithms for few rows pay off.
const LARGE: usize = 1 << 16;

thread_local! {
    /// The transposes of a left-hand side and of a product.
    static TRANSPOSES: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

impl Cpu {
    /// Computes `product = left · right`, `[left.rows, right.columns]`, or adds it to `product` if
    /// `accumulate`.
    ///
    /// For few rows and a transposed right-hand side, as in the backward pass of `x · W`, the small
    /// operand is transposed, and the product is formed column-major and transposed back: 64 × 1024
    /// × 1024 runs at 230 GFLOP/s instead of 64. For very few rows the large operand is read once,
    /// in order.
    pub(super) fn multiply(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        product: &mut [f32],
        accumulate: bool,
    ) {
        let (m, n, k) = (left.rows, right.columns, left.columns);
        assert!(holds(product, m, n), "a {m} × {n} product in {} elements", product.len());
        assert_eq!(left.columns, right.rows, "inner lengths of a product");
        let is_special = !left.transposed && !accumulate && n * k > LARGE;
        if is_special && right.transposed && m < MAX_TRANSPOSED_ROWS {
            TRANSPOSES.with_borrow_mut(|[left_transpose, product_transpose]| {
                left_transpose.resize(left_transpose.len().max(m * k), 0.0);
                product_transpose.resize(product_transpose.len().max(m * n), 0.0);
                self.transpose_matrix(m, k, left.values, left_transpose);
                let strides = Strides { column: m as isize, row: 1 };
                let left = Matrix::transposed(left_transpose, m, k);
                self.gemm(left, right, product_transpose, strides, false);
                self.transpose_matrix(n, m, product_transpose, product);
            });
        } else if is_special && !right.transposed && self.threads == 1 && m <= MAX_FEW_ROWS {
            self.multiply_few_rows(left, right, product);
        } else {
            self.gemm(left, right, product, Strides { column: 1, row: n as isize }, accumulate);
        }
    }

    /// Computes a product whose elements are `strides` apart.
    #[allow(unsafe_code)]
    fn gemm(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        product: &mut [f32],
        strides: Strides,
        accumulate: bool,
    ) {
        let (m, n, k) = (left.rows, right.columns, left.columns);
        assert_eq!(k, right.rows, "inner lengths of a product");
        let (left_strides, right_strides) = (left.strides(), right.strides());
        let threads = match self.threads {
            1 => gemm::Parallelism::None,
            threads => gemm::Parallelism::Rayon(threads),
        };
        // SAFETY: the three slices hold the matrices that their sizes and strides describe, which
        // `Matrix::new` and `multiply` have checked: both layouts of the product cover m · n
        // elements. `product` is borrowed exclusively.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                product.as_mut_ptr(),
                strides.column,
                strides.row,
                accumulate,
                left.values.as_ptr(),
                left_strides.column,
                left_strides.row,
                right.values.as_ptr(),
                right_strides.column,
                right_strides.row,
                1.0,
                1.0,
                false,
                false,
                false,
                threads,
            );
        }
    }
}
