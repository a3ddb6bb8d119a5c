//! Ten thousand handwritten digits embedded in the program: `data/digits.h5`, see `data/README.md`.

use std::io::Write;

use super::{ByteImages, Data};
use crate::nn::Features;
use crate::{Error, Result};

static FILE: &[u8] = include_bytes!("../../data/digits.h5");

/// Opens the embedded digits: 9,000 for training, 1,000 for testing. Not collective.
///
/// # Errors
/// The temporary file that HDF5 reads them through cannot be written.
pub fn open() -> Result<Data> {
    let fail = |why: String| {
        Error::failed(
            "unpacking the embedded digits",
            format!("{why}; is there room in the temporary directory?"),
        )
    };
    let mut file = tempfile::NamedTempFile::new().map_err(|error| fail(error.to_string()))?;
    file.write_all(FILE).map_err(|error| fail(error.to_string()))?;
    let opened = hdf5::File::open(file.path()).map_err(|error| fail(error.to_string()))?;
    let subset = |name: &str| -> Result<ByteImages> {
        let bytes =
            |what: &str| -> hdf5::Result<Vec<u8>> { opened.dataset(&format!("{name}/{what}"))?.read_raw() };
        let pixels = bytes("images").map_err(|error| fail(error.to_string()))?;
        let labels = bytes("labels").map_err(|error| fail(error.to_string()))?;
        let features = Features::Image { height: 28, width: 28, channels: 1 };
        let source = "the embedded digits".into();
        ByteImages {
            label_source: "the embedded digits".into(),
            source,
            features,
            pixels,
            labels,
            num_classes: 10,
            preset: vec![[0.1307, 0.3081]],
        }
        .checked()
    };
    Ok(Data { train: Box::new(subset("train")?), test: Some(Box::new(subset("test")?)) })
}
