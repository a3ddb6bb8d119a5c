//! Requests to stop: signals at this rank, and its deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use crate::{Error, Result};

/// Signals closer together than this count as one: launchers and batch systems often send the same
/// request in two ways.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// The requests to stop that this rank has received.
pub struct StopRequest {
    signalled: Arc<AtomicBool>,
    /// The run has ended, and there is nothing left to stop.
    over: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl StopRequest {
    /// Listens for SIGTERM, SIGINT and SIGUSR1. The first signal is a request; the same signal once more
    /// ends the process at once, as it would without the handlers. Another signal is the same request: a
    /// batch system sends SIGTERM at the time limit after its warning, and then leaves some seconds in
    /// which a checkpoint may be completed. Not collective.
    ///
    /// # Errors
    /// The system refuses to install the handlers.
    pub fn listen() -> Result<StopRequest> {
        let (signalled, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1])
            .map_err(|error| Error::failed("listening for signals", error))?;
        let (flag, is_over) = (Arc::clone(&signalled), Arc::clone(&over));
        thread::spawn(move || {
            let (mut first, mut after): (Option<(Instant, i32)>, Option<Instant>) = (None, None);
            for signal in signals.forever() {
                // the same request may arrive late in another way; a repeated signal is deliberate
                if is_over.load(Ordering::Relaxed)
                    && after.get_or_insert_with(Instant::now).elapsed() < ONE_REQUEST
                {
                    continue;
                }
                match first {
                    None => {
                        first = Some((Instant::now(), signal));
                        flag.store(true, Ordering::Relaxed);
                        let name = signal_name(signal).unwrap_or("a signal");
                        log::info!(
                            "received {name}: stopping after the step; {name} once more stops at once"
                        );
                    }
                    Some((time, before)) if signal != before || time.elapsed() < ONE_REQUEST => {}
                    Some(_) => {
                        // this fails only for signals that have no default action
                        let _ = emulate_default_handler(signal);
                    }
                }
            }
        });
        Ok(StopRequest { signalled, over, deadline: None })
    }

    /// Adds a request at the `deadline`. Not collective.
    pub fn at(self, deadline: Option<Instant>) -> StopRequest {
        StopRequest { deadline, ..self }
    }

    /// Marks the run as ended, with its checkpoint: signals that arrive later, perhaps for the
    /// second time, do not change its exit code. Not collective.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Returns true once this rank has been asked to stop. Not collective.
    pub fn is_made(&self) -> bool {
        self.signalled.load(Ordering::Relaxed)
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}
