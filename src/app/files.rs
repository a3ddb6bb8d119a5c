//! Checks of the files that options name, before any of them is opened: for files that would block,
//! and for outputs that would overwrite another file.

use std::fs::{self, File, FileType};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The use that a program makes of a file.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// The program reads the file.
    Input,
    /// The program reads the file or, if it is a directory, the files in it whose names the
    /// function accepts.
    InputOrDirectory(fn(&str) -> bool),
    /// The program writes the file.
    Output,
    /// The program writes another file, which takes the place of this one when it is whole.
    WholeOutput,
    /// The program writes the file from front to back, line by line.
    OutputOrPipe,
}

/// A file, the option that names it, and its use.
#[derive(Debug, Clone, Copy)]
pub struct FileOption<'a> {
    option: &'static str,
    path: &'a Path,
    purpose: Purpose,
}

impl<'a> FileOption<'a> {
    /// Describes a file that is read.
    pub fn input(option: &'static str, path: &'a Path) -> FileOption<'a> {
        FileOption { option, path, purpose: Purpose::Input }
    }

    /// Describes a file that is read, or a directory in which the files are read whose names
    /// `is_read` accepts.
    pub fn input_or_directory(
        option: &'static str,
        path: &'a Path,
        is_read: fn(&str) -> bool,
    ) -> FileOption<'a> {
        FileOption { option, path, purpose: Purpose::InputOrDirectory(is_read) }
    }

    /// Describes a file that is written.
    pub fn output(option: &'static str, path: &'a Path) -> FileOption<'a> {
        FileOption { option, path, purpose: Purpose::Output }
    }

    /// Describes a file that is replaced by another when that is complete. It may not be a device, which
    /// would be replaced too.
    pub fn whole_output(option: &'static str, path: &'a Path) -> FileOption<'a> {
        FileOption { option, path, purpose: Purpose::WholeOutput }
    }

    /// Describes a file that is written line by line, which may be a pipe that another process
    /// reads.
    pub fn output_or_pipe(option: &'static str, path: &'a Path) -> FileOption<'a> {
        FileOption { option, path, purpose: Purpose::OutputOrPipe }
    }

    /// Returns the path.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Returns the path by which this file is, or would be, the same file as `output`, if it is: an input may
    /// be a pattern.
    fn same_as(&self, output: &Path) -> Option<PathBuf> {
        let pattern = self.path.to_string_lossy();
        if !self.is_output() && !self.path.exists() && pattern.contains(['*', '?', '[']) {
            let mut found = glob::glob(&pattern).into_iter().flatten().flatten();
            let is_matched =
                || glob::Pattern::new(&pattern).is_ok_and(|pattern| pattern.matches_path(output));
            return found
                .find(|path| is_same(path, output))
                .or_else(|| is_matched().then(|| output.to_owned()));
        }
        let Purpose::InputOrDirectory(is_read) = self.purpose else {
            return is_same(self.path, output).then(|| self.path.to_owned());
        };
        if !self.path.is_dir() {
            return is_same(self.path, output).then(|| self.path.to_owned());
        }
        // a new file would be read at the next start
        let name = output.file_name().unwrap_or_default().to_string_lossy();
        let is_within = || Some(future_path(output).ok()?.parent()? == self.path.canonicalize().ok()?);
        if !output.exists() && is_read(&name) && is_within() == Some(true) {
            return Some(output.to_owned());
        }
        let mut entries = fs::read_dir(self.path).into_iter().flatten().flatten();
        let found = entries.find(|entry| {
            is_read(&entry.file_name().to_string_lossy())
                && !entry.path().is_dir()
                && is_same(&entry.path(), output)
        });
        found.map(|entry| entry.path())
    }

    /// Returns true if the program writes the file.
    pub fn is_output(&self) -> bool {
        matches!(self.purpose, Purpose::Output | Purpose::WholeOutput | Purpose::OutputOrPipe)
    }

    /// Returns an error that names the option and the file.
    ///
    /// # Errors
    /// Always.
    pub fn refuse(&self, why: impl std::fmt::Display) -> Result<()> {
        Err(Error::input(format!("{} {}", self.option, self.path.display()), why))
    }
}

/// Refuses pipes and other special files, on which reading and writing would block, and two options
/// that name one file if it is written. Missing files and permissions are left to the code that
/// opens the file. Not collective.
///
/// # Errors
/// A file cannot be used as its option says.
pub fn check(files: &[FileOption<'_>]) -> Result<()> {
    files.iter().try_for_each(check_type)?;
    for (at, file) in files.iter().enumerate() {
        for other in &files[..at] {
            let (output, other) = if file.is_output() { (file, other) } else { (other, file) };
            if let (true, Some(path)) = (output.is_output(), other.same_as(output.path)) {
                return output.refuse(format!(
                    "{} {} is the same file, and writing would destroy its contents; give another name",
                    other.option,
                    path.display()
                ));
            }
        }
    }
    Ok(())
}

fn check_type(file: &FileOption<'_>) -> Result<()> {
    let Ok(metadata) = fs::metadata(file.path) else { return Ok(()) };
    let found = metadata.file_type();
    match file.purpose {
        _ if found.is_file() => Ok(()),
        Purpose::InputOrDirectory(_) if found.is_dir() => Ok(()),
        // /dev/null and terminals do not block
        Purpose::Output | Purpose::OutputOrPipe if found.is_char_device() => Ok(()),
        Purpose::OutputOrPipe if found.is_fifo() => check_reader(file),
        _ => file.refuse(format!("it is {}; give the name of a file", describe(found))),
    }
}

/// Refuses a pipe that no process reads: opening it would block until one does.
fn check_reader(file: &FileOption<'_>) -> Result<()> {
    match File::options().write(true).custom_flags(O_NONBLOCK).open(file.path) {
        Err(error) if error.raw_os_error() == Some(ENXIO) => file.refuse("it is a pipe that nobody reads"),
        Err(_) => Ok(()),
        Ok(opened) => {
            // a reader would take a close for the end of the data, so the pipe stays open until the
            // process exits
            std::mem::forget(opened);
            Ok(())
        }
    }
}

/// The values in `fcntl.h` and `errno.h` of Linux.
const O_NONBLOCK: i32 = 0o4000;
const ENXIO: i32 = 6;

fn describe(found: FileType) -> &'static str {
    match found {
        _ if found.is_dir() => "a directory",
        _ if found.is_fifo() => "a pipe",
        _ if found.is_socket() => "a socket",
        _ => "a device",
    }
}

/// Returns true if both paths are one file, or would be.
fn is_same(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => a.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino()),
        (Err(_), Err(_)) => matches!((future_path(a), future_path(b)), (Ok(a), Ok(b)) if a == b),
        _ => false,
    }
}

/// Returns the path that a file that does not exist yet would have, with links resolved.
fn future_path(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    // as many links as Linux follows
    for _ in 0..40 {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match fs::read_link(&path) {
            Ok(target) => path = parent.join(target),
            Err(_) => return Ok(parent.canonicalize()?.join(path.file_name().unwrap_or_default())),
        }
    }
    Err(io::Error::other("too many links"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn one_file_under_two_names_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("a"), "a").unwrap();
        fs::write(at("b"), "b").unwrap();
        fs::hard_link(at("a"), at("hard")).unwrap();
        symlink("a", at("soft")).unwrap();
        symlink("new", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        fs::create_dir(at("directory")).unwrap();
        fs::hard_link(at("a"), at("directory/train")).unwrap();
        let refused = |input: &str, output: &str| {
            let (input, output) = (at(input), at(output));
            let files = [
                FileOption::input_or_directory("--data", &input, |name| name == "train"),
                FileOption::whole_output("--export", &output),
            ];
            check(&files).is_err_and(|error| error.exit_code() == 2)
        };
        for (input, output) in [
            ("a", "a"),
            ("a", "hard"),
            ("a", "soft"),
            ("a", "directory/../a"),
            ("directory", "a"),
            ("[ac]", "a"),
            ("dir*/t*", "a"),
            ("n*", "new"),
        ] {
            assert!(refused(input, output), "{input} {output}");
        }
        fs::write(at("directory/other"), "a").unwrap();
        for (input, output) in [
            ("directory", "directory/other"),
            ("a", "b"),
            ("a", "new"),
            ("missing", "new"),
            ("directory", "b"),
            ("loop", "b"),
            ("b*", "a"),
            ("[", "a"),
        ] {
            assert!(!refused(input, output), "{input} {output}");
        }
        // neither exists yet
        let (new, dangling) = (at("new"), at("dangling"));
        assert!(
            check(&[FileOption::output("--metrics", &new), FileOption::output("--trace", &dangling)])
                .is_err()
        );
        // two files that are only read may be one, and /dev/null takes everything
        let a = at("a");
        assert!(check(&[FileOption::input("--init", &a), FileOption::input("--resume", &a)]).is_ok());
        let null = Path::new("/dev/null");
        assert!(check(&[FileOption::output("--metrics", null), FileOption::output("--trace", null)]).is_ok());
        // but a device that is replaced would be none any more
        let error = check(&[FileOption::whole_output("--export", null)]).expect_err("it is a device");
        assert!(error.to_string().contains("--export /dev/null"), "{error}");
    }
}
