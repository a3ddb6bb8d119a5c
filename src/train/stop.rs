//! Requests to stop: signals at this rank, and the end of the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use crate::{Error, Result};

/// Signals closer together than this are one: launchers and batch systems often send the same one by two ways.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// Whether this rank has been asked to stop.
pub struct StopRequest {
    signalled: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl StopRequest {
    /// Listens for SIGTERM, SIGINT and SIGUSR1: the first is a request, a second one ends the process at once, as it does a
    /// program that does not listen. The request also comes with the `deadline`. Not collective.
    ///
    /// # Errors
    /// The system refuses.
    pub fn listen(deadline: Option<Instant>) -> Result<StopRequest> {
        let signalled = Arc::new(AtomicBool::new(false));
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1])
            .map_err(|error| Error::failed("listening for signals", error))?;
        let flag = Arc::clone(&signalled);
        thread::spawn(move || {
            let mut first: Option<Instant> = None;
            for signal in signals.forever() {
                match first {
                    None => {
                        first = Some(Instant::now());
                        flag.store(true, Ordering::Relaxed);
                        let name = signal_name(signal).unwrap_or("a signal");
                        log::info!("received {name}: stopping after the step; another stops at once");
                    }
                    Some(time) if time.elapsed() < ONE_REQUEST => {}
                    Some(_) => {
                        // it only fails for signals that have no default
                        let _ = emulate_default_handler(signal);
                    }
                }
            }
        });
        Ok(StopRequest { signalled, deadline })
    }

    /// True once this rank has been asked to stop. Not collective.
    pub fn is_made(&self) -> bool {
        self.signalled.load(Ordering::Relaxed) || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}
