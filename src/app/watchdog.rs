//! A watchdog: ends a job that stands still, after every rank has said where it stands.
//!
//! A rank that hangs takes the others with it, for they wait for it: within a step every rank stands still. So each has a
//! watchdog of its own, which needs no messages; each says where its rank is, leaves the others time to do so too, and then
//! aborts the job. No collective, nothing of MPI but `MPI_Abort`, which may hang too: then the process ends, and the launcher ends
//! the job.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::{launcher, say};
use crate::comm::{abort, rank_for_messages};
use crate::trace;

/// Looks a limit.
const LOOKS: u32 = 50;

/// How long a watchdog waits for those of the other ranks, at most.
const LONGEST_GRACE: Duration = Duration::from_secs(60);

/// Watches the thread that calls this: if it neither begins nor ends any operation for `limit`, this rank prints which it is in,
/// with step, peer and bytes, and ends with exit code 1. Not collective, but all ranks had better do it.
pub(super) fn watch(limit: Duration) {
    trace::watch();
    thread::spawn(move || {
        let pause = (limit / LOOKS).min(Duration::from_secs(1));
        let mut progress = trace::place().progress;
        let (mut still, mut since) = (Duration::ZERO, SystemTime::now());
        loop {
            let look = Instant::now();
            thread::sleep(pause);
            // a job that was suspended stood still as a whole, so a long look counts as two
            still += look.elapsed().min(2 * pause);
            let place = trace::place();
            if place.progress != progress {
                (progress, still, since) = (place.progress, Duration::ZERO, SystemTime::now());
            } else if still >= limit {
                let rank = rank_for_messages().or_else(launcher::announced_rank).unwrap_or_default();
                let (limit_words, since) =
                    (humantime::format_duration(limit), humantime::format_rfc3339_seconds(since));
                say(&format!(
                    "rank {rank}: no progress for {limit_words} (--watchdog), since {since}: {place}"
                ));
                thread::sleep((limit / 4).min(LONGEST_GRACE));
                abort(1);
            }
        }
    });
}
