//! Log lines on stderr: time, level, step, message. Rank 0 speaks; other ranks only to warn, with their number in front.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use env_logger::{Builder, Env, Target};
use log::LevelFilter;

use super::{CommonOptions, progress};
use crate::comm::{World, rank_for_messages};

/// The step that log lines name; `u64::MAX` before training.
static STEP: AtomicU64 = AtomicU64::new(u64::MAX);

/// Says which step is being done.
pub fn set_step(step: u64) {
    STEP.store(step, Ordering::Relaxed);
}

/// Starts logging. On rank 0 `RUST_LOG` overrides `options`; the others only warn. Not collective; once per process.
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
            clock(SystemTime::now()),
            record.level(),
            record.args()
        )
    });
    builder.target(Target::Pipe(Box::new(AboveTheBar)));
    // a second program in the same process, as in tests, keeps the first logger
    let _ = builder.try_init();
}

/// Stderr, or the lines above the progress bar while there is one.
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

/// `2026-01-31T12:34:56Z`.
pub(super) fn clock(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // the calendar of H. Hinnant, "chrono-compatible low-level date algorithms", for days since 1970
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_clock_knows_leap_years() {
        let at = |seconds| clock(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59Z");
    }
}
