//! Small training data.

use std::path::Path;

/// Writes `/x`, 40 rows of 6 real numbers, and `/y`, one of 3 classes for each row.
pub fn table(path: &Path) {
    table_of(path, 40);
}

/// Writes a file like [`table`] with `num_rows` rows.
pub fn table_of(path: &Path, num_rows: usize) {
    let (x, y) = rows(num_rows);
    let file = hdf5::File::create(path).expect("the file can be created");
    file.new_dataset_builder().with_data(&x).create("x").expect("a dataset can be written");
    file.new_dataset_builder().with_data(&y).create("y").expect("a dataset can be written");
}

/// Returns the arrays that [`table_of`] writes.
pub fn rows(num_rows: usize) -> (ndarray::Array2<f32>, ndarray::Array1<i64>) {
    let x = ndarray::Array2::from_shape_fn((num_rows, 6), |(row, column)| {
        ((row * 7 + column * 3) % 11) as f32 / 5.0 - 1.0
    });
    (x, ndarray::Array1::from_shape_fn(num_rows, |row| (row % 3) as i64))
}
