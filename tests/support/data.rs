//! Small training data.

use std::path::{Path, PathBuf};

use ndarray::{Array, Array1, Array2, Dimension};

/// Writes `/x`, 40 rows of 6 real numbers, and `/y`, one of 3 classes for each row.
pub fn table(path: &Path) {
    table_of(path, 40);
}

/// Writes a file like [`table`] with `num_rows` rows.
pub fn table_of(path: &Path, num_rows: usize) {
    let (x, y) = rows(num_rows);
    let file = hdf5::File::create(path).expect("the file can be created");
    put(&file, "x", &x);
    put(&file, "y", &y);
}

/// Makes `data.h5` in `folder`, in which `write` writes.
pub fn hdf5_file(folder: &Path, write: impl FnOnce(&hdf5::File)) -> PathBuf {
    let path = folder.join("data.h5");
    write(&hdf5::File::create(&path).expect("a file can be made"));
    path
}

/// Writes a dataset.
pub fn put<T: hdf5::H5Type, D: Dimension>(file: &hdf5::File, name: &str, values: &Array<T, D>) {
    file.new_dataset_builder().with_data(values).create(name).expect("a dataset can be written");
}

/// Returns the arrays that [`table_of`] writes.
pub fn rows(num_rows: usize) -> (Array2<f32>, Array1<i64>) {
    let x = Array2::from_shape_fn((num_rows, 6), |(row, column)| {
        ((row * 7 + column * 3) % 11) as f32 / 5.0 - 1.0
    });
    (x, Array1::from_shape_fn(num_rows, |row| (row % 3) as i64))
}
