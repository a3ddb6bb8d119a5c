//! Tokens in HDF5 files: a dataset `tokens` of whole numbers, one sequence or a row for each sample.

use std::path::Path;

use super::column::Column;
use super::direct::Scratch;
use super::file::open_hdf5;
use super::names::exists;
use super::pages::PageBuffer;
use crate::dataset::LARGEST_FILE;
use crate::dataset::stored::{ColumnFormat, StoredType};
use crate::memory::check_room;
use crate::{Error, Result};

/// The dataset of tokens.
const TOKENS: &str = "tokens";

/// The tokens that are read together where any number would do.
const PIECE: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The tokens of a file.
pub(in crate::dataset) struct TokenFile {
    /// The tokens in order.
    pub(in crate::dataset) tokens: Vec<u16>,
    /// The number of tokens of a row, if samples are rows.
    pub(in crate::dataset) columns: Option<usize>,
}

/// Opens the file at `path`, if it is an HDF5 file with tokens.
fn open_tokens(path: &Path) -> Option<hdf5::File> {
    let extension = path.extension();
    let is_hdf5 = extension.is_some_and(|extension| extension == "h5" || extension == "hdf5");
    let (file, _) = (is_hdf5 && path.is_file()).then(|| open_hdf5(path).ok()).flatten()?;
    exists(&file, TOKENS).then_some(file)
}

/// Returns true for an HDF5 file with tokens. Not collective.
pub(in crate::dataset) fn has_tokens(path: &Path) -> bool {
    open_tokens(path).is_some()
}

/// Reads the tokens of the file at `path`; `None` if it is no HDF5 file with tokens. Not collective.
///
/// # Errors
/// The dataset has no whole numbers from 0 to 65,535, or neither one nor two dimensions, or rows of less
/// than two tokens, or is too large.
pub(in crate::dataset) fn read_tokens(path: &Path) -> Result<Option<TokenFile>> {
    let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
    let Some(file) = open_tokens(path) else { return Ok(None) };
    let column = Column::open(path, &file, TOKENS).map_err(fail)?;
    let columns = match column.shape[..] {
        [] => None,
        [columns @ (0 | 1)] => {
            return Err(fail(format!("a row has {columns} tokens, and the least is 2")));
        }
        [columns] => Some(columns),
        _ => {
            let shape = [&[column.num_rows], &column.shape[..]].concat();
            return Err(fail(format!("tokens has the shape {shape:?}, but must be [N] or [samples, N]")));
        }
    };
    let is_real = matches!(column.format.stored, StoredType::F16 | StoredType::F32 | StoredType::F64);
    if is_real || column.is_boolean {
        return Err(fail("tokens must be whole numbers".into()));
    }
    let len = column.num_rows.saturating_mul(column.format.len);
    if len > LARGEST_FILE / 2 {
        return Err(fail(format!("it has {len} tokens, and {} are the limit", LARGEST_FILE / 2)));
    }
    Ok(Some(TokenFile { tokens: read_rows(&column, len).map_err(fail)?, columns }))
}

/// Reads all rows of `column`, of `len` tokens, in pieces of whole chunks, which would otherwise be unpacked
/// more than once.
fn read_rows(column: &Column, len: usize) -> std::result::Result<Vec<u16>, String> {
    check_room(len * size_of::<u16>())?;
    let chunk_rows = column.chunk_rows.unwrap_or(1);
    let step = (PIECE / column.format.len / chunk_rows).max(1).saturating_mul(chunk_rows);
    let (mut bytes, mut scratch) = (PageBuffer::default(), Scratch::default());
    let (mut tokens, mut values) = (Vec::with_capacity(len), Vec::new());
    for start in (0..column.num_rows).step_by(step) {
        let rows = start..column.num_rows.min(start.saturating_add(step));
        column.read(&rows, &mut bytes, &mut scratch)?;
        let format = ColumnFormat { len: rows.len() * column.format.len, ..column.format };
        values.resize(format.len, 0.0);
        // every token has a value of its own in f32
        format.decode(&bytes, &mut values);
        for value in &values {
            if !(0.0..=f32::from(u16::MAX)).contains(value) {
                return Err(format!("it has the token {value}, but they are 0 to {}", u16::MAX));
            }
            tokens.push(*value as u16);
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes `numbers` as the tokens of a file, in chunks of this many, if a number is given.
    fn write<T: hdf5::H5Type>(path: &Path, numbers: &[T], chunk: Option<usize>) {
        let file = hdf5::File::create(path).unwrap();
        let new = file.new_dataset::<T>().shape(numbers.len());
        let new = if let Some(chunk) = chunk { new.chunk(chunk) } else { new };
        new.create(TOKENS).unwrap().write_raw(numbers).unwrap();
    }

    fn found(path: &Path) -> Vec<u16> {
        read_tokens(path).unwrap().unwrap().tokens
    }

    #[test]
    fn tokens_are_whole_numbers_of_any_type() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.h5");
        let tokens: Vec<u16> = (0..20).map(|number| 3000 * number).collect();
        let wide: Vec<i64> = tokens.iter().copied().map(i64::from).collect();
        for chunk in [None, Some(3), Some(20)] {
            write(&path, &tokens, chunk);
            assert_eq!(found(&path), tokens);
            write(&path, &wide, chunk);
            assert_eq!(found(&path), tokens);
        }

        let swapped: Vec<u16> = tokens.iter().map(|token| token.swap_bytes()).collect();
        write(&path, &swapped, None);
        let mut bytes = std::fs::read(&path).unwrap();
        // the type of such numbers, whose second byte says that the most significant byte is the last
        // (HDF5 File Format Specification 3.0, §IV.A.2.d)
        let kind = [0x10, 0, 0, 0, 2, 0, 0, 0, 0, 0, 16, 0];
        let at = bytes.windows(kind.len()).position(|window| window == kind).unwrap();
        bytes[at + 1] = 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(found(&path), tokens);
    }

    #[test]
    fn other_numbers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.h5");
        let check = |why: &str| {
            let error = read_tokens(&path).err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        };
        write(&path, &[3_i32, 65_536], None);
        check("it has the token 65536, but they are 0 to 65535");
        write(&path, &[3_i8, -1], None);
        check("it has the token -1, but they are 0 to 65535");
        write(&path, &[3.0_f32, 1.0], None);
        check("tokens must be whole numbers");
        write(&path, &[true, false], None);
        check("tokens must be whole numbers");
    }
}
