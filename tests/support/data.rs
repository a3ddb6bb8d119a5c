//! Files to train on, good and bad.

use std::path::Path;

/// Writes `/x`, 40 rows of 6 real numbers, and `/y`, one of 3 classes for each.
pub fn table(path: &Path) {
    let (x, y) = rows();
    let file = hdf5::File::create(path).expect("the file can be created");
    file.new_dataset_builder().with_data(&x).create("x").expect("a dataset can be written");
    file.new_dataset_builder().with_data(&y).create("y").expect("a dataset can be written");
}

/// The arrays of [`table`].
pub fn rows() -> (ndarray::Array2<f32>, ndarray::Array1<i64>) {
    let x = ndarray::Array2::from_shape_fn((40, 6), |(row, column)| ((row * 7 + column * 3) % 11) as f32 / 5.0 - 1.0);
    (x, ndarray::Array1::from_shape_fn(40, |row| (row % 3) as i64))
}
