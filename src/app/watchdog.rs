//! A watchdog that ends a job without progress after every rank has reported where it is.
//!
//! A rank that hangs blocks the others, which wait for it: within a step no rank makes progress. So
//! each rank has a watchdog of its own, which needs no messages. Each reports the spans that its
//! rank is in, leaves the others time to do so too, and then aborts the job. The only MPI function
//! that it calls is `MPI_Abort`, which may hang too; in that case the process exits, and the
//! launcher ends the job.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::launcher;
use super::output::say;
use crate::comm::{abort, rank_for_messages};
use crate::trace;

/// Checks per limit.
const CHECKS: u32 = 50;

/// The longest time that a watchdog leaves the other ranks for their reports.
const LONGEST_GRACE: Duration = Duration::from_secs(60);

/// Watches the calling thread: if it neither begins nor ends any span for `limit`, this rank prints
/// the spans that it is in, with step, peer and bytes, and exits with code 1. Not collective, but
/// it must be called on every rank to be useful.
pub(super) fn watch(limit: Duration) {
    trace::watch();
    thread::spawn(move || {
        let pause = (limit / CHECKS).clamp(Duration::from_millis(1), Duration::from_secs(1));
        let mut progress = trace::current_spans().progress;
        let (mut still, mut since) = (Duration::ZERO, SystemTime::now());
        loop {
            let check = Instant::now();
            thread::sleep(pause);
            // a suspended job made no progress as a whole, so a long pause counts at most twice
            still += check.elapsed().min(2 * pause);
            let spans = trace::current_spans();
            if spans.progress != progress {
                (progress, still, since) = (spans.progress, Duration::ZERO, SystemTime::now());
            } else if still >= limit {
                let rank = rank_for_messages().or_else(launcher::announced_rank).unwrap_or_default();
                let (limit_words, since) =
                    (humantime::format_duration(limit), humantime::format_rfc3339_seconds(since));
                say(&format!(
                    "rank {rank}: no progress for {limit_words} (--watchdog), since {since}: {spans}"
                ));
                thread::sleep((limit / 4).min(LONGEST_GRACE));
                abort(1);
            }
        }
    });
}
