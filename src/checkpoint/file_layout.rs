//! HDF5 files that the HDF5 library lays out in memory, without their values, so that the library never
//! encounters a full disk.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use hdf5::file::LibraryVersion;
use hdf5::plist::dataset_create::{AllocTime, FillTime};
use hdf5::types::VarLenUnicode;
use hdf5::{Dataset, Group, H5Type, Location};
use tempfile::NamedTempFile;

/// A file that is being laid out.
pub struct LayoutBuilder {
    root: hdf5::File,
    in_memory: File,
    values: Vec<Range<u64>>,
}

/// A file in memory that lacks its values.
pub struct FileLayout {
    in_memory: File,
    /// The places of the values in the file, in the order in which their datasets were made.
    pub values: Vec<Range<u64>>,
    /// The length of the whole file.
    pub len: u64,
}

impl LayoutBuilder {
    /// Begins with an empty file behind a user block of `user_block` bytes: none, or a power of two from 512
    /// on. Not collective.
    ///
    /// # Errors
    /// There is no memory, or the HDF5 library failed.
    pub fn new(user_block: usize) -> hdf5::Result<LayoutBuilder> {
        // HDF5 opens files by name only; the name is removed as soon as the file is open
        let in_memory =
            NamedTempFile::new_in("/dev/shm").or_else(|_| NamedTempFile::new()).map_err(of_system)?;
        let root = hdf5::FileBuilder::new()
            .with_fcpl(|create| create.userblock(user_block as u64).obj_track_times(false))
            .with_fapl(|access| access.libver_bounds(LibraryVersion::Earliest, LibraryVersion::V110))
            .create(in_memory.path())?;
        let (in_memory, path) = in_memory.into_parts();
        path.close().map_err(of_system)?;
        Ok(LayoutBuilder { root, in_memory, values: Vec::new() })
    }

    /// Returns the root of the file, for groups, attributes and short datasets.
    pub fn root(&self) -> &hdf5::File {
        &self.root
    }

    /// Creates a dataset whose values are missing.
    ///
    /// # Errors
    /// The HDF5 library failed.
    pub fn place<T: H5Type>(&mut self, group: &Group, name: &str, shape: &[usize]) -> hdf5::Result<Dataset> {
        let dataset = group
            .new_dataset::<T>()
            .with_dcpl(|create| {
                create.alloc_time(Some(AllocTime::Early)).fill_time(FillTime::Never).obj_track_times(false)
            })
            .shape(shape)
            .create(name)?;
        let no_place = || hdf5::Error::Internal(format!("{}/{name} has no place in the file", group.name()));
        let start = dataset.offset().ok_or_else(no_place)?;
        let len: usize = shape.iter().product();
        self.values.push(start..start + (len * size_of::<T>()) as u64);
        Ok(dataset)
    }

    /// Ends the layout.
    ///
    /// # Errors
    /// The HDF5 library or the system failed.
    pub fn finish(self) -> hdf5::Result<FileLayout> {
        let LayoutBuilder { root, in_memory, values } = self;
        root.close()?;
        let len = in_memory.metadata().map_err(of_system)?.len();
        Ok(FileLayout { in_memory, values, len })
    }
}

impl FileLayout {
    /// Copies everything from byte `start` on, but for the values, to its place in `file`, which gets the
    /// length of the layout. Not collective.
    ///
    /// # Errors
    /// The system reports an error, such as a full disk.
    pub fn copy_to(&mut self, file: &mut File, start: u64) -> io::Result<()> {
        let mut values = self.values.clone();
        values.sort_unstable_by_key(|values| values.start);
        values.push(self.len..self.len);
        let (mut at, mut between) = (start, Vec::new());
        for values in values {
            between.resize((values.start - at) as usize, 0);
            self.in_memory.seek(SeekFrom::Start(at))?;
            self.in_memory.read_exact(&mut between)?;
            file.seek(SeekFrom::Start(at))?;
            file.write_all(&between)?;
            at = values.end;
        }
        file.set_len(self.len)
    }
}

/// Gives `location` an attribute with a text.
///
/// # Errors
/// The text holds a zero byte, or the HDF5 library failed.
pub fn add_text(location: &Location, name: &str, value: &str) -> hdf5::Result<()> {
    let value: VarLenUnicode =
        value.parse().map_err(|_| hdf5::Error::Internal(format!("{name} holds a zero byte")))?;
    location.new_attr::<VarLenUnicode>().create(name)?.write_scalar(&value)
}

/// Returns an error of the system as one of the library.
fn of_system(error: io::Error) -> hdf5::Error {
    hdf5::Error::Internal(error.to_string())
}
