//! Log lines on stderr: time, level, step, message. Rank 0 logs; other ranks log only warnings and
//! errors, prefixed with their rank.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use env_logger::{Builder, Env, Target};
use log::LevelFilter;

use super::{CommonOptions, progress};
use crate::comm::{World, rank_for_messages};

/// The step that log lines name; `u64::MAX` before training.
static STEP: AtomicU64 = AtomicU64::new(u64::MAX);

/// Sets the step that log lines name.
pub fn set_step(step: u64) {
    STEP.store(step, Ordering::Relaxed);
}

/// Starts logging. On rank 0 `RUST_LOG` overrides `options`; other ranks log from level warn. Not
/// collective; once per process.
pub fn start(world: &World, options: &CommonOptions) {
    let level = match options {
        _ if !world.is_root() => LevelFilter::Warn,
        CommonOptions { quiet: true, .. } => LevelFilter::Warn,
        CommonOptions { verbose: 0, .. } => LevelFilter::Info,
        CommonOptions { verbose: 1, .. } => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    let mut builder = Builder::new();
    builder.filter_level(level);
    if world.is_root() {
        builder.parse_env(Env::default());
    }
    builder.format(|buffer, record| {
        let step = STEP.load(Ordering::Relaxed);
        let step = if step == u64::MAX { String::new() } else { format!(" step {step}") };
        let rank = rank_for_messages().filter(|rank| *rank > 0);
        let rank = rank.map(|rank| format!(" rank {rank}")).unwrap_or_default();
        let colon = if rank.is_empty() && step.is_empty() { "" } else { ":" };
        writeln!(
            buffer,
            "{} {:<5}{rank}{step}{colon} {}",
            humantime::format_rfc3339_seconds(SystemTime::now()),
            record.level(),
            record.args()
        )
    });
    builder.target(Target::Pipe(Box::new(AboveTheBar)));
    // a second program in the same process, as in tests, keeps the first logger
    let _ = builder.try_init();
}

/// A writer to stderr, above the progress bar while there is one.
struct AboveTheBar;

impl Write for AboveTheBar {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        if !progress::print_above(text.trim_end_matches('\n')) {
            io::stderr().write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
