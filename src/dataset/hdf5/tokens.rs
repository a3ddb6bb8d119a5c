//! Tokens in HDF5 files: a dataset `tokens` of whole numbers, one sequence or a row for each sample. Those of
//! several files follow each other in the order of their names.

use std::path::{Path, PathBuf};

use super::column::Column;
use super::direct::Scratch;
use super::file::open_hdf5;
use super::names::exists;
use super::pages::PageBuffer;
use crate::dataset::cifar::is_cifar;
use crate::dataset::files::{LARGEST_FILE, is_hdf5_name, matching_paths};
use crate::dataset::idx::is_idx;
use crate::dataset::stored::ColumnFormat;
use crate::memory::check_room;
use crate::{Error, Result};

/// The dataset of tokens.
const TOKENS: &str = "tokens";

/// The dataset of inputs by default: a file that has it is one of samples, whatever else it has.
const INPUTS: &str = "x";

/// The tokens that are read together where any number would do.
const PIECE: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The tokens of files.
pub(in crate::dataset) struct StoredTokens {
    /// The tokens in order.
    pub(in crate::dataset) tokens: Vec<u16>,
    /// The number of tokens of a row, if samples are rows.
    pub(in crate::dataset) columns: Option<usize>,
}

/// Returns the HDF5 files of tokens that `name` stands for, in the order of their names: all of a directory
/// that is no published set; or a file, or those that match a pattern, if the first has tokens. Not
/// collective.
pub fn token_files(name: &str) -> Vec<PathBuf> {
    let is_hdf5 = |path: &PathBuf| is_hdf5_name(&path.to_string_lossy());
    let path = Path::new(name);
    if path.is_dir() {
        if is_cifar(path) || is_idx(path) {
            return Vec::new();
        }
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_hdf5).collect();
        files.sort();
        return files;
    }
    let files = matching_paths(name).unwrap_or_default();
    let has_tokens = files.first().filter(|path| is_hdf5(path)).is_some_and(|path| {
        let file = path.is_file().then(|| open_hdf5(path).ok()).flatten();
        file.is_some_and(|(file, _)| {
            exists(&file, TOKENS) && !has_inputs(&file) && file.dataset(TOKENS).is_ok()
        })
    });
    if has_tokens { files } else { Vec::new() }
}

fn has_inputs(file: &hdf5::File) -> bool {
    exists(file, INPUTS)
}

/// Returns true if the tokens of `files` are a row for each sample. Not collective.
pub fn has_token_rows(files: &[PathBuf]) -> bool {
    let dataset = files.first().and_then(|path| open_hdf5(path).ok()?.0.dataset(TOKENS).ok());
    dataset.is_some_and(|dataset| dataset.ndim() == 2)
}

/// Reads the tokens of `files`, at least one, in their order. Not collective.
///
/// # Errors
/// A file has no such dataset, or inputs of samples too; or the dataset has no whole numbers from 0 to
/// 65,535, or neither one nor two dimensions, or rows of less than two tokens or of another number than the
/// first file, or too many tokens.
pub(in crate::dataset) fn read_tokens(files: &[PathBuf]) -> Result<StoredTokens> {
    let mut all: Option<StoredTokens> = None;
    for path in files {
        let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
        let (file, _) = open_hdf5(path).map_err(fail)?;
        if has_inputs(&file) {
            return Err(fail(format!(
                "it has /{INPUTS}, so it is a file of samples; a pattern names several"
            )));
        }
        let column = Column::open(path, &file, TOKENS).map_err(fail)?;
        let columns = columns_of(&column).map_err(fail)?;
        let all = all.get_or_insert_with(|| StoredTokens { tokens: Vec::new(), columns });
        if columns != all.columns {
            let words = |columns: Option<usize>| match columns {
                Some(columns) => format!("rows of {columns} tokens"),
                None => "one sequence".into(),
            };
            let (own, first) = (words(columns), words(all.columns));
            return Err(fail(format!("it has {own}, but {} has {first}", files[0].display())));
        }
        let len = column.num_rows.saturating_mul(column.format.len);
        let most = LARGEST_FILE / size_of::<u16>();
        if len.saturating_add(all.tokens.len()) > most {
            let before = match all.tokens.len() {
                0 => String::new(),
                before => format!(" after the {before} of other files"),
            };
            return Err(fail(format!("it has {len} tokens{before}, and {most} are the limit")));
        }
        read_rows(&column, len, &mut all.tokens).map_err(fail)?;
    }
    Ok(all.unwrap_or(StoredTokens { tokens: Vec::new(), columns: None }))
}

/// Returns the number of tokens of a row, or `None` for one sequence.
fn columns_of(column: &Column) -> std::result::Result<Option<usize>, String> {
    if column.format.stored.is_real() || column.is_boolean {
        return Err("tokens must be whole numbers".into());
    }
    match column.shape[..] {
        _ if column.num_rows == 0 => Err("it has no tokens".into()),
        [] => Ok(None),
        [columns @ (0 | 1)] => Err(format!("it has rows of length {columns}, and the least is 2 tokens")),
        [columns] => Ok(Some(columns)),
        _ => {
            let shape = [&[column.num_rows], &column.shape[..]].concat();
            Err(format!("tokens has the shape {shape:?}, but must be [N] or [samples, N]"))
        }
    }
}

/// Appends all rows of `column`, of `len` tokens, in pieces of whole chunks, which would otherwise be
/// unpacked more than once.
fn read_rows(column: &Column, len: usize, tokens: &mut Vec<u16>) -> std::result::Result<(), String> {
    check_room(len * size_of::<u16>())?;
    tokens.reserve_exact(len);
    let chunk_rows = column.chunk_rows.unwrap_or(1);
    let step = (PIECE / column.format.len / chunk_rows).max(1).saturating_mul(chunk_rows);
    let (mut bytes, mut scratch) = (PageBuffer::default(), Scratch::default());
    let mut values = Vec::new();
    for start in (0..column.num_rows).step_by(step) {
        let rows = start..column.num_rows.min(start.saturating_add(step));
        column.read(&rows, &mut bytes, &mut scratch)?;
        let format = ColumnFormat { len: rows.len() * column.format.len, ..column.format };
        values.resize(format.len, 0.0);
        // every token has a value of its own in f32
        format.decode(&bytes, &mut values);
        for value in &values {
            if !(0.0..=f32::from(u16::MAX)).contains(value) {
                return Err(format!("it has the token {value}, but tokens are 0 to {}", u16::MAX));
            }
            tokens.push(*value as u16);
        }
    }
    Ok(())
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
        read_tokens(&[path.to_owned()]).unwrap().tokens
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
    fn files_of_a_directory_or_a_pattern_follow_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let name = |name: &str| path(name).display().to_string();
        write(&path("b.h5"), &[4_u16, 5], None);
        write(&path("a.hdf5"), &[1_i64, 2, 3], None);
        std::fs::write(path("c.txt"), "text").unwrap();
        for all in [name(""), name("[ab].h*")] {
            let files = token_files(&all);
            assert_eq!(files, [path("a.hdf5"), path("b.h5")]);
            let StoredTokens { tokens, columns } = read_tokens(&files).unwrap();
            assert!(tokens == [1, 2, 3, 4, 5] && columns.is_none() && !has_token_rows(&files));
        }
        assert_eq!(token_files(&name("b.h5")), [path("b.h5")]);
        assert!(token_files(&name("c.txt")).is_empty() && token_files(&name("none")).is_empty());

        let rows = hdf5::File::create(path("b.h5")).unwrap();
        rows.new_dataset::<u16>().shape([2, 3]).create(TOKENS).unwrap().write_raw(&[1_u16; 6]).unwrap();
        drop(rows);
        assert!(has_token_rows(&[path("b.h5")]));
        let refused = |why: &str| {
            let error = read_tokens(&token_files(&name(""))).err().unwrap().to_string();
            assert!(error.contains("b.h5") && error.contains(why), "{error}");
        };
        refused("it has rows of 3 tokens, but ");
        hdf5::File::create(path("b.h5")).unwrap().create_group(TOKENS).unwrap();
        refused("tokens is a group");
        // a group is no dataset, and with inputs the tokens are something else
        assert!(token_files(&name("b.h5")).is_empty());
        let both = hdf5::File::open_rw(path("a.hdf5")).unwrap();
        both.new_dataset::<f32>().shape(3).create(INPUTS).unwrap();
        drop(both);
        assert!(token_files(&name("a.hdf5")).is_empty());
        let error = read_tokens(&token_files(&name(""))).err().unwrap().to_string();
        assert!(error.contains("a.hdf5: it has /x, so it is a file of samples"), "{error}");
        // a published set is read as one
        std::fs::write(path("data_batch_1.bin"), "").unwrap();
        assert!(token_files(&name("")).is_empty());
    }

    #[test]
    fn other_numbers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.h5");
        let check = |why: &str| {
            let error = read_tokens(std::slice::from_ref(&path)).err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        };
        write(&path, &[3_i32, 65_536], None);
        check("it has the token 65536, but tokens are 0 to 65535");
        write(&path, &[3_i8, -1], None);
        check("it has the token -1, but tokens are 0 to 65535");
        write(&path, &[3.0_f32, 1.0], None);
        check("tokens must be whole numbers");
        write(&path, &[true, false], None);
        check("tokens must be whole numbers");
    }
}
