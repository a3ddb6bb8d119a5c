//! The progress bar, on the terminal that the job was started from.
//!
//! A launcher reads its ranks' stderr through a pipe, so no rank has a terminal of its own. Rank 0
//! therefore looks for the launcher's: if the stderr of the process that started it is a terminal
//! of this machine, the bar is drawn there.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, stderr};
use std::path::PathBuf;
use std::sync::Mutex;

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The condition under which the bar is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ProgressMode {
    /// If the job was started from a terminal
    Auto,
    /// Never
    Never,
}

/// The bar on screen, for log lines to be printed above it.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Redraws per second.
const RATE: u8 = 10;

/// A progress bar that may be invisible.
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Creates a bar over `num_steps` steps, of which `done` were done before. It is invisible
    /// unless `speaks`, which only one rank may pass, and `mode` finds a terminal.
    pub fn new(done: u64, num_steps: u64, speaks: bool, mode: ProgressMode) -> Progress {
        let target = if speaks && mode == ProgressMode::Auto { target() } else { None };
        let bar = target.map(|target| {
            let template = "{bar:32} {pos}/{len} steps  {msg}  {per_sec:.dim}  {eta} left";
            let style =
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::with_draw_target(Some(num_steps), target)
                .with_style(style.progress_chars("━╸ "));
            // steps done before say nothing about the rate
            bar.set_position(done);
            bar.tick();
            bar.reset_eta();
            bar
        });
        if let (Ok(mut shared), Some(bar)) = (BAR.lock(), &bar) {
            *shared = Some(bar.clone());
        }
        Progress { bar }
    }

    /// Moves the bar to `step`; `message` is called only if there is a bar.
    pub fn set(&self, step: u64, message: impl FnOnce() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_message(message());
            bar.set_position(step);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            if let Ok(mut shared) = BAR.lock() {
                *shared = None;
            }
        }
    }
}

/// Prints `line` above the bar; returns false if there is none.
pub(super) fn print_above(line: &str) -> bool {
    match BAR.lock().ok().as_deref() {
        Some(Some(bar)) => {
            bar.println(line);
            true
        }
        _ => false,
    }
}

fn target() -> Option<ProgressDrawTarget> {
    if stderr().is_terminal() {
        return Some(ProgressDrawTarget::stderr_with_hz(RATE));
    }
    let terminal = launcher_terminal()?;
    let write = OpenOptions::new().write(true).open(&terminal).ok()?;
    let read = File::open(&terminal).ok()?;
    Some(ProgressDrawTarget::term(Term::read_write_pair(read, write), RATE))
}

/// Returns the terminal of the launcher's stderr. The launcher is the nearest ancestor process with
/// the name of one.
fn launcher_terminal() -> Option<PathBuf> {
    const LAUNCHERS: [&str; 7] =
        ["mpiexec", "mpirun", "orterun", "prterun", "mpiexec.hydra", "hydra_pmi_proxy", "srun"];
    let mut process = std::os::unix::process::parent_id();
    for _ in 0..4 {
        let name = std::fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
        if !LAUNCHERS.iter().any(|launcher| launcher.starts_with(name.trim()) && !name.trim().is_empty()) {
            return None;
        }
        let terminal = std::fs::read_link(format!("/proc/{process}/fd/2")).ok();
        let is_terminal =
            |path: &PathBuf| path.starts_with("/dev/pts") || path.to_string_lossy().starts_with("/dev/tty");
        if let Some(terminal) = terminal.filter(is_terminal) {
            return Some(terminal);
        }
        process = parent_of(process)?;
    }
    None
}

fn parent_of(process: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}
