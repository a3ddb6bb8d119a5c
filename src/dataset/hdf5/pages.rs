//! [`PageBuffer`]: bytes of a [`ByteFile`], read through the system's page cache or past it.
//!
//! A file that is larger than the memory that is free has been pushed out of the cache before it is
//! read again, so that keeping its pages costs time and brings nothing.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Result};
use std::ops::Deref;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::Arc;

use rustix::fs::OFlags;

/// The alignment of places, lengths and memory in reads past the page cache: a multiple of what most
/// devices and file systems ask for (open(2), `O_DIRECT`).
const PAGE: usize = 4096;

/// An open file. A clone is the same open file.
#[derive(Clone)]
pub(super) struct ByteFile {
    cached: Arc<File>,
    /// The file once more, opened for reads past the page cache.
    uncached: Option<Arc<File>>,
}

impl ByteFile {
    pub(super) fn new(file: File) -> ByteFile {
        ByteFile { cached: Arc::new(file), uncached: None }
    }

    /// Returns a number that other open files do not have.
    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.cached).addr()
    }

    /// Reads past the page cache from now on, if the file system can.
    pub(super) fn bypass_cache(&mut self) {
        // by its number, for another file may have taken the place of this one
        let path = format!("/proc/self/fd/{}", self.cached.as_raw_fd());
        let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
        self.uncached = OpenOptions::new().read(true).custom_flags(flags).open(path).ok().map(Arc::new);
    }

    /// Fills `bytes` with those at `place`, through the page cache.
    pub(super) fn read_exact_at(&self, bytes: &mut [u8], place: u64) -> Result<()> {
        self.cached.read_exact_at(bytes, place)
    }
}

/// Bytes in memory that is reused.
#[derive(Default)]
pub(super) struct PageBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..][..self.len]
    }
}

impl PageBuffer {
    /// Makes these the bytes.
    pub(super) fn set(&mut self, bytes: &[u8]) {
        self.room(bytes.len()).copy_from_slice(bytes);
    }

    /// Returns `len` bytes with arbitrary values, to be overwritten.
    pub(super) fn room(&mut self, len: usize) -> &mut [u8] {
        if self.memory.len() < len {
            self.memory.resize(len, 0);
        }
        (self.start, self.len) = (0, len);
        &mut self.memory[..len]
    }

    /// Reads `len` bytes at `place` of `file`, through the page cache where the file system cannot
    /// read past it in pages.
    ///
    /// # Errors
    /// The file is shorter or cannot be read.
    pub(super) fn read(&mut self, file: &ByteFile, place: u64, len: usize) -> Result<()> {
        match &file.uncached {
            Some(uncached) if self.read_pages(uncached, place, len) => Ok(()),
            _ => file.read_exact_at(self.room(len), place),
        }
    }

    /// Reads `len` bytes at `place` of `file`, opened for reads past the page cache, as whole pages.
    /// Returns false if they cannot be read in this way.
    fn read_pages(&mut self, file: &File, place: u64, len: usize) -> bool {
        let before = (place % PAGE as u64) as usize;
        let whole = (before + len).next_multiple_of(PAGE);
        let room = self.room(whole + PAGE);
        let aligned = room.as_ptr().align_offset(PAGE);
        let pages = &mut room[aligned..][..whole];
        let mut num_read = 0;
        while num_read < before + len {
            match file.read_at(&mut pages[num_read..], place - before as u64 + num_read as u64) {
                Ok(num) if num > 0 => num_read += num,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return false,
            }
        }
        (self.start, self.len) = (aligned + before, len);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn bytes_read_past_the_cache_are_those_of_the_file() {
        let whole: Vec<u8> = (0..3 * PAGE + 77).map(|at| (at * 7 % 251) as u8).collect();
        // where the code lies, for temporary files may be in memory, past which nothing is read
        let named = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(named.path(), &whole).unwrap();
        let mut file = ByteFile::new(File::open(named.path()).unwrap());
        let mut buffer = PageBuffer::default();
        for _ in 0..2 {
            for range in [0..whole.len(), 1..2, PAGE..2 * PAGE, PAGE - 1..2 * PAGE + 1, 0..0, 12_300..12_365]
            {
                buffer.read(&file, range.start as u64, range.len()).unwrap();
                assert_eq!(*buffer, whole[range]);
            }
            let error = buffer.read(&file, PAGE as u64, whole.len()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
            file.bypass_cache();
        }
        match &file.uncached {
            Some(uncached) => {
                // a failure of this would be hidden above by a read through the cache
                assert!(buffer.read_pages(uncached, 1, whole.len() - 1));
                assert_eq!(*buffer, whole[1..]);
            }
            None => {
                let (path, what) = (named.path().display(), "reads past the page cache");
                let _ = writeln!(std::io::stderr(), "SKIPPED: {path} cannot be opened for {what}");
            }
        }
        buffer.set(&[1, 2, 3]);
        assert_eq!(*buffer, [1, 2, 3]);
    }
}
