//! The options of checkpoints and of stopping in time.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;

use crate::app::parse_time;
use crate::{Error, Result};

/// The interval between checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Every {
    /// A number of steps.
    Steps(u64),
    /// A time.
    Time(Duration),
}

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Every, String> {
        let expected = || "expected a number of steps such as 500, or a time such as 10m, above 0".to_owned();
        match text.parse() {
            Ok(0) => Err(expected()),
            Ok(steps) => Ok(Every::Steps(steps)),
            Err(_) => parse_time(text).map(Every::Time).map_err(|_| expected()),
        }
    }
}

/// The checkpoint that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest sound checkpoint of the directory, if there is one.
    Auto,
    /// No checkpoint.
    Never,
    /// A file, or the newest sound checkpoint of a directory.
    From(PathBuf),
}

impl FromStr for Resume {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<Resume, Self::Err> {
        Ok(match text {
            "auto" => Resume::Auto,
            "never" => Resume::Never,
            path => Resume::From(path.into()),
        })
    }
}

/// The options of checkpoints and of stopping in time.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Checkpoints")]
pub struct CheckpointOptions {
    /// Directory for checkpoints, created if it is missing; with it, SIGTERM, SIGINT or SIGUSR1 at
    /// any rank stops all ranks after the current step, with a checkpoint and exit code 75
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,

    /// Steps (500) or time (10m) between checkpoints; there is always one at the end
    #[arg(long, value_name = "N|TIME", default_value = "10m", requires = "checkpoint_dir")]
    pub checkpoint_every: Every,

    /// Number of newest checkpoints to keep, fewer if the disk is full; 0 for all
    #[arg(long, value_name = "K", default_value_t = 3, requires = "checkpoint_dir")]
    pub keep: usize,

    /// Resume from the newest sound checkpoint in --checkpoint-dir if there is one (auto), or from
    /// this file or directory, or start anew (never)
    #[arg(long, value_name = "auto|never|PATH", default_value = "auto")]
    pub resume: Resume,

    /// Start with the weights of this file (from --export, a checkpoint, or any HDF5 file with
    /// /model/NAME), unless a run is resumed
    #[arg(long, value_name = "FILE")]
    pub init: Option<PathBuf>,

    /// Write the weights alone to this file at the end
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,

    /// Stop this long after the start, such as 55m, as after a signal
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "checkpoint_dir")]
    pub time_limit: Option<Duration>,

    /// Stop this long before Slurm ends the job, such as 2m, as after a signal
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "checkpoint_dir")]
    pub stop_before: Option<Duration>,

    /// Shortest time of a step, such as 20ms, so that tests of signals and limits take equally long on
    /// every machine
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Machine")]
    pub pace: Option<Duration>,
}

impl CheckpointOptions {
    /// Returns true if the run may write checkpoints or resume from one.
    pub fn are_wanted(&self) -> bool {
        self.checkpoint_dir.is_some() || matches!(self.resume, Resume::From(_))
    }

    /// Returns true if the run may write files of the network.
    pub fn writes_networks(&self) -> bool {
        self.checkpoint_dir.is_some() || self.export.is_some()
    }

    /// Returns the files and directories that must exist, each with the option that names it.
    pub fn inputs(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let resume = match &self.resume {
            Resume::From(path) => Some(("--resume", path.as_path())),
            Resume::Auto | Resume::Never => None,
        };
        resume.into_iter().chain(self.init.as_deref().map(|path| ("--init", path)))
    }

    /// Returns the time at which a run that began at `start` must stop, the earlier of two: --time-limit
    /// after `start`, and --stop-before ahead of the end that Slurm has set. Not collective.
    ///
    /// # Errors
    /// There is a --stop-before, but Slurm does not say how much time is left, or less is left.
    pub fn deadline(&self, start: Instant) -> Result<Option<Instant>> {
        let limit = self.time_limit.and_then(|limit| start.checked_add(limit));
        let Some(before) = self.stop_before else { return Ok(limit) };
        let fail = |why: String| Err(Error::input("--stop-before", why));
        let Some(left) = slurm_time_left() else {
            return fail(
                "Slurm does not say how much time is left (is this a Slurm job?); give --time-limit".into(),
            );
        };
        let Some(left) = left else { return Ok(limit) };
        if left <= before {
            let words = humantime::format_duration;
            return fail(format!("it is {}, but Slurm leaves the job {}", words(before), words(left)));
        }
        let end = Instant::now().checked_add(left - before);
        Ok(limit.into_iter().chain(end).min())
    }
}

/// Returns the time that Slurm leaves this job; `Some(None)` if there is no limit, `None` if Slurm
/// does not say.
fn slurm_time_left() -> Option<Option<Duration>> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?.as_secs();
    // set from Slurm 23.02 on
    if let Some(end) = std::env::var("SLURM_JOB_END_TIME").ok().and_then(|end| end.parse::<u64>().ok()) {
        return Some(Some(Duration::from_secs(end.saturating_sub(now))));
    }
    let job = std::env::var("SLURM_JOB_ID").ok()?;
    let output = std::process::Command::new("squeue").args(["-h", "-j", &job, "-o", "%L"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if text == "UNLIMITED" { Some(None) } else { slurm_time(&text).map(Some) }
}

/// Parses `[days-][[hours:]minutes:]seconds`, as `squeue` writes times.
fn slurm_time(text: &str) -> Option<Duration> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let parts: Option<Vec<u64>> = clock.split(':').map(|part| part.parse().ok()).collect();
    let parts = parts.filter(|parts| parts.len() <= 3)?;
    let seconds = parts.iter().fold(0, |sum, part| sum * 60 + part);
    Some(Duration::from_secs(days.parse::<u64>().ok()? * 86_400 + seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_steps_or_times() {
        assert_eq!("50".parse(), Ok(Every::Steps(50)));
        assert_eq!("10m".parse(), Ok(Every::Time(Duration::from_secs(600))));
        for wrong in ["0", "", "0s", "-5", "ten", "1.5", "10M"] {
            assert!(wrong.parse::<Every>().unwrap_err().contains("such as 500"), "{wrong}");
        }
        assert_eq!("never".parse(), Ok(Resume::Never));
        assert_eq!("a/b.h5".parse(), Ok(Resume::From("a/b.h5".into())));
    }

    #[test]
    fn times_as_slurm_writes_them() {
        let seconds = |text| slurm_time(text).map(|time| time.as_secs());
        assert_eq!(seconds("59"), Some(59));
        assert_eq!(seconds("6:59"), Some(419));
        assert_eq!(seconds("1:00:00"), Some(3600));
        assert_eq!(seconds("2-03:04:05"), Some(2 * 86_400 + 3 * 3600 + 4 * 60 + 5));
        assert_eq!(seconds("INVALID"), None);
        assert_eq!(seconds(""), None);
    }
}
