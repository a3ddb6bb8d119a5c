//! [`Interrupt`]: signals that end the program, which ends its job first.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register_conditional_default, register_usize};
use signal_hook::low_level::emulate_default_handler;

/// The signals SIGINT and SIGTERM. A job is in a process group of its own, so that a terminal does not
/// interrupt it with the program, and a batch system may not know it.
pub(super) struct Interrupt {
    /// No job is running: a signal ends the program at once.
    is_idle: Arc<AtomicBool>,
    /// The signal that has arrived while a job was running, or 0.
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// Returns the signals of this process, to which it listens from the first call on.
    pub(super) fn of_process() -> &'static Interrupt {
        static OF_PROCESS: OnceLock<Interrupt> = OnceLock::new();
        OF_PROCESS.get_or_init(|| {
            let (is_idle, signal) = (Arc::new(AtomicBool::new(true)), Arc::default());
            for number in [SIGINT, SIGTERM] {
                // where the system refuses this, the signal keeps its default action
                let _ = register_conditional_default(number, Arc::clone(&is_idle));
                let _ = register_usize(number, Arc::clone(&signal), number as usize);
            }
            Interrupt { is_idle, signal }
        })
    }

    /// Runs `work`, which starts a job and looks at [`Interrupt::has_come`] until the job ends. If a signal
    /// has come, its default action then ends the program.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_idle.store(false, Ordering::SeqCst);
        let done = work();
        self.is_idle.store(true, Ordering::SeqCst);
        if self.has_come() {
            // this fails only for signals that have no default action
            let _ = emulate_default_handler(self.signal.load(Ordering::SeqCst) as i32);
        }
        done
    }

    /// Returns true if a signal has come that will end the program.
    pub(super) fn has_come(&self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
    }
}
