//! Reading without the HDF5 library: the bytes of rows whose places in the file are known, and that
//! are packed with nothing but gzip and shuffle.
//!
//! The library unpacks one chunk at a time for all threads of a process, with zlib. Here a thread
//! needs no lock, and libdeflate takes a third of the time. Whatever is stored otherwise is read by
//! the library.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdf5::dataset::Layout;
use hdf5::filters::Filter;
use libdeflater::Decompressor;

use super::pages::{ByteFile, PageBuffer};
use crate::trace::{self, Name};

/// The longest time to look for the places of all chunks. The library looks for each from the first one on,
/// so the time grows with the square of their number.
const LONGEST_SEARCH: Duration = Duration::from_millis(300);

/// The packed size below which chunks are small.
const SMALL_CHUNK: usize = 64 << 10;

/// The first bytes of a file whose addresses count from its beginning (HDF5 File Format
/// Specification 3.0, §II.A).
const SIGNATURE: &[u8; 8] = b"\x89HDF\r\n\x1a\n";

/// Memory for reading rows, which is reused.
#[derive(Default)]
pub struct RowBuffer {
    /// The bytes of the inputs, row after row.
    pub(super) inputs: PageBuffer,
    /// The bytes of the targets, row after row.
    pub(super) targets: PageBuffer,
    /// For the inputs and for the targets.
    pub(super) scratch: [Scratch; 2],
}

/// Memory for unpacking chunks.
#[derive(Default)]
pub(super) struct Scratch {
    packed: PageBuffer,
    chunk: Vec<u8>,
    shuffled: Vec<u8>,
    decompressor: Option<Decompressor>,
    /// The file and the address of the chunk that was unpacked last.
    kept: Option<(usize, u64)>,
}

/// The places of the rows of a dataset in its file. A clone reads the same open file.
#[derive(Clone)]
pub(super) struct DirectReader {
    file: ByteFile,
    row_bytes: usize,
    storage: RowStorage,
}

/// The storage of rows.
#[derive(Clone)]
enum RowStorage {
    /// One after the other, from this byte on.
    Contiguous(u64),
    Chunked(Arc<Chunks>),
}

/// The chunks of a dataset, each of whole rows.
struct Chunks {
    num_rows: usize,
    /// The address and the size of each chunk.
    places: Vec<(u64, usize)>,
    is_deflated: bool,
    /// The bytes of an element if their order was changed.
    shuffled: Option<usize>,
}

impl DirectReader {
    /// Finds the places of the rows of `dataset`, of `row_bytes` each, in the file at `path`; its
    /// numbers must be stored as they are in memory. Returns `None` if the library has to read them.
    pub(super) fn new(path: &Path, dataset: &hdf5::Dataset, row_bytes: usize) -> Option<DirectReader> {
        let element = dataset.dtype().ok()?.size();
        let file = File::open(path).ok()?;
        // places count in the file that holds the dataset, to which an external link may lead
        if !is_called(&file, &dataset.filename()) {
            return None;
        }
        let file = ByteFile::new(file);
        let mut first = [0; SIGNATURE.len()];
        file.read_exact_at(&mut first, 0).ok().filter(|()| first == *SIGNATURE)?;
        let storage = match dataset.layout() {
            Layout::Contiguous => RowStorage::Contiguous(dataset.offset()?),
            Layout::Chunked => RowStorage::Chunked(Arc::new(Chunks::find(dataset, element)?)),
            _ => return None,
        };
        Some(DirectReader { file, row_bytes, storage })
    }

    /// Reads past the page cache from now on, if the file system can, unless chunks are small: the
    /// system reads neighbours of those ahead.
    pub(super) fn bypass_cache(&mut self) {
        let is_small = match &self.storage {
            RowStorage::Contiguous(_) => false,
            RowStorage::Chunked(chunks) => {
                let bytes: usize = chunks.places.iter().map(|(_, size)| size).sum();
                bytes < SMALL_CHUNK * chunks.places.len()
            }
        };
        if !is_small {
            self.file.bypass_cache();
        }
    }

    /// Reads `rows` to `bytes`, or returns the reason why they cannot be read.
    pub(super) fn read(
        &self,
        rows: &Range<usize>,
        bytes: &mut PageBuffer,
        scratch: &mut Scratch,
    ) -> Result<(), String> {
        let len = rows.len() * self.row_bytes;
        match &self.storage {
            RowStorage::Contiguous(start) => {
                self.read_at(start + (rows.start * self.row_bytes) as u64, len, bytes)
            }
            RowStorage::Chunked(chunks) => {
                let bytes = bytes.room(len);
                let mut row = rows.start;
                while row < rows.end {
                    let number = row / chunks.num_rows;
                    let first = number * chunks.num_rows;
                    let end = rows.end.min(first + chunks.num_rows);
                    let into =
                        &mut bytes[(row - rows.start) * self.row_bytes..(end - rows.start) * self.row_bytes];
                    self.read_chunk(chunks, number, (row - first) * self.row_bytes, into, scratch)?;
                    row = end;
                }
                Ok(())
            }
        }
    }

    fn read_at(&self, place: u64, len: usize, bytes: &mut PageBuffer) -> Result<(), String> {
        let _span = trace::work(Name::Read);
        let outcome = bytes.read(&self.file, place, len);
        outcome.map_err(|error| format!("{error} (reading {len} bytes at {place})"))
    }

    /// Writes the bytes of a chunk from `start` on to `into`.
    fn read_chunk(
        &self,
        chunks: &Chunks,
        number: usize,
        start: usize,
        into: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), String> {
        let (place, size) = chunks.places[number];
        let len = chunks.num_rows * self.row_bytes;
        let Scratch { packed, chunk, shuffled, decompressor, kept } = scratch;
        let name = (self.file.id(), place);
        let is_kept = kept.take() == Some(name);
        if !is_kept {
            self.read_at(place, size, packed)?;
        }
        let _span = trace::work(Name::Unpack);
        let damaged = |why: &str| format!("the chunk of {size} bytes at {place} is damaged: {why}");
        let mut bytes: &[u8] = packed;
        if chunks.is_deflated {
            let unpacked = if chunks.shuffled.is_some() { &mut *shuffled } else { &mut *chunk };
            if !is_kept {
                unpacked.resize(len, 0);
                let decompressor = decompressor.get_or_insert_with(Decompressor::new);
                let found = decompressor.zlib_decompress(packed, unpacked);
                let found = found.map_err(|error| damaged(&format!("gzip: {error}")))?;
                if found != len {
                    return Err(damaged(&format!("it unpacks to {found} bytes instead of {len}")));
                }
            }
            bytes = unpacked;
        } else if size != len {
            return Err(damaged(&format!("it should have {len} bytes")));
        }
        match chunks.shuffled {
            None => into.copy_from_slice(&bytes[start..start + into.len()]),
            Some(element) => unshuffle(bytes, element, start, into),
        }
        *kept = Some(name);
        Ok(())
    }
}

impl Chunks {
    /// Finds the chunks of `dataset`, whose elements have `element` bytes.
    fn find(dataset: &hdf5::Dataset, element: usize) -> Option<Chunks> {
        let (is_deflated, shuffled) = match *dataset.filters().as_slice() {
            [] => (false, None),
            [Filter::Deflate(_)] => (true, None),
            [Filter::Shuffle, Filter::Deflate(_)] => (true, Some(element)),
            _ => return None,
        };
        let (shape, chunk) = (dataset.shape(), dataset.chunk()?);
        let num_rows = *chunk.first()?;
        if chunk[1..] != shape[1..] || num_rows == 0 {
            return None;
        }
        let num_chunks = shape[0].div_ceil(num_rows);
        if dataset.num_chunks()? != num_chunks {
            // some have never been written, and hold the fill value
            return None;
        }
        let (began, mut places) = (Instant::now(), vec![(0, 0); num_chunks]);
        for number in 0..num_chunks {
            if began.elapsed() > LONGEST_SEARCH {
                log::info!(
                    "{} of {} has {num_chunks} chunks, whose places take too long to find: the HDF5 library \
                     reads them, one after the other; larger chunks are faster",
                    dataset.name(),
                    dataset.filename()
                );
                return None;
            }
            let found = dataset.chunk_info(number)?;
            if found.filter_mask != 0 {
                return None;
            }
            let row = usize::try_from(*found.offset.first()?).ok()?;
            *places.get_mut(row / num_rows)? = (found.addr, usize::try_from(found.size).ok()?);
        }
        Some(Chunks { num_rows, places, is_deflated, shuffled })
    }
}

/// Returns true if `file` is the one that is called `name`.
fn is_called(file: &File, name: &str) -> bool {
    let place = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let (own, named) = (file.metadata().map(place), std::fs::metadata(name).map(place));
    own.ok().zip(named.ok()).is_some_and(|(own, named)| own == named)
}

/// Undoes the shuffle filter: `bytes` holds the first bytes of all elements, then the second bytes,
/// and so on. Writes the elements from byte `start` on to `into`; both are whole elements.
fn unshuffle(bytes: &[u8], element: usize, start: usize, into: &mut [u8]) {
    let num = bytes.len() / element;
    let range = start / element..(start + into.len()) / element;
    let plane = |byte: usize| &bytes[byte * num..][range.clone()];
    match element {
        2 => interleave([plane(0), plane(1)], into),
        4 => interleave([plane(0), plane(1), plane(2), plane(3)], into),
        8 => interleave(std::array::from_fn::<_, 8, _>(plane), into),
        _ => {
            for byte in 0..element {
                let places = into[byte..].iter_mut().step_by(element);
                places.zip(plane(byte)).for_each(|(to, from)| *to = *from);
            }
        }
    }
}

fn interleave<const N: usize>(planes: [&[u8]; N], into: &mut [u8]) {
    let (elements, _) = into.as_chunks_mut::<N>();
    // equal lengths, which the compiler sees
    let planes = planes.map(|plane| &plane[..elements.len()]);
    for (at, element) in elements.iter_mut().enumerate() {
        *element = std::array::from_fn(|byte| planes[byte][at]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_directly_is_what_the_library_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.h5");
        let file = hdf5::File::create(&path).unwrap();
        let values =
            ndarray::Array3::from_shape_fn((50, 3, 4), |(n, i, j)| (n * 12 + i * 4 + j) as f64 / 7.0);
        let new = || file.new_dataset_builder().with_data(&values);
        new().create("plain").unwrap();
        new().chunk((7, 3, 4)).create("chunks").unwrap();
        new().chunk((7, 3, 4)).deflate(4).create("gzip").unwrap();
        new().chunk((7, 3, 4)).shuffle().create("shuffle").unwrap();
        new().chunk((7, 3, 4)).shuffle().deflate(1).create("both").unwrap();
        let small = values.mapv(|value| value as i16);
        let new = || file.new_dataset_builder().with_data(&small).chunk((9, 3, 4));
        new().shuffle().deflate(1).create("small").unwrap();
        new().shuffle().fletcher32().create("checked").unwrap();
        file.new_dataset_builder().with_data(&values).chunk((7, 3, 2)).create("cut").unwrap();
        drop(file);

        let file = hdf5::File::open(&path).unwrap();
        let mut scratch = Scratch::default();
        for (name, element) in [("plain", 8), ("chunks", 8), ("gzip", 8), ("both", 8), ("small", 2)] {
            let dataset = file.dataset(name).unwrap();
            let direct = DirectReader::new(&path, &dataset, 12 * element).unwrap();
            for rows in [0..50, 0..7, 3..4, 6..22, 49..50, 5..5] {
                let mut bytes = PageBuffer::default();
                direct.read(&rows, &mut bytes, &mut scratch).unwrap();
                let expected: Vec<u8> = if element == 8 {
                    bytemuck::cast_slice(&values.as_slice().unwrap()[rows.start * 12..rows.end * 12]).to_vec()
                } else {
                    bytemuck::cast_slice(&small.as_slice().unwrap()[rows.start * 12..rows.end * 12]).to_vec()
                };
                assert_eq!(*bytes, expected, "{name} {rows:?}");
            }
        }
        for name in ["shuffle", "checked", "cut"] {
            let dataset = file.dataset(name).unwrap();
            assert!(DirectReader::new(&path, &dataset, 96).is_none(), "{name}");
        }
    }

    #[test]
    fn a_dataset_in_another_file_is_left_to_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other, link] = ["data.h5", "other.h5", "link.h5"].map(|name| folder.path().join(name));
        let values = ndarray::Array2::from_shape_fn((6, 2), |(n, i)| (n * 2 + i) as f32);
        let write = |path: &Path, values: &ndarray::Array2<f32>| {
            let file = hdf5::File::create(path).unwrap();
            file.new_dataset_builder().with_data(values).create("own").unwrap();
            file
        };
        drop(write(&other, &values.mapv(|value| value + 100.0)));
        write(&path, &values).link_external("other.h5", "/own", "linked").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();

        for path in [&path, &link] {
            let file = hdf5::File::open(path).unwrap();
            assert!(DirectReader::new(path, &file.dataset("own").unwrap(), 8).is_some());
            let linked = file.dataset("linked").unwrap();
            assert!(DirectReader::new(path, &linked, 8).is_none());
            assert_eq!(linked.read_raw::<f32>().unwrap()[..3], [100.0, 101.0, 102.0]);
        }
    }

    #[test]
    fn any_size_of_elements_is_unshuffled() {
        for element in [1, 2, 3, 4, 8] {
            let whole: Vec<u8> = (0..element * 20).map(|at| at as u8).collect();
            let shuffled: Vec<u8> = (0..element)
                .flat_map(|byte| whole.iter().skip(byte).step_by(element).copied().collect::<Vec<_>>())
                .collect();
            for range in [0..20, 3..17] {
                let mut found = vec![0; range.len() * element];
                unshuffle(&shuffled, element, range.start * element, &mut found);
                assert_eq!(found, whole[range.start * element..range.end * element]);
            }
        }
    }
}
