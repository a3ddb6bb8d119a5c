//! [`StateWriter`]: all ranks write the state of a run, while they train.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::collect::{CollectedState, StateCollector, connect};
use super::copy::StateCopy;
use super::provide::Providing;
use crate::Result;
use crate::checkpoint::{Contents, Writer, Written};
use crate::comm::{self, Communicator, Grid};
use crate::device::Device;
use crate::parallel::data::StateParts;
use crate::train::trainer::Trainer;

/// The time without progress after which a rank that ends no longer waits for the others.
const PATIENCE: Duration = Duration::from_secs(30);

/// The time between two looks at messages.
const PAUSE: Duration = Duration::from_micros(200);

/// A rank's part in writing the parameters and slots of a run, one file after the other.
pub(super) struct StateWriter {
    all: Communicator,
    role: WriterRole,
}

enum WriterRole {
    /// Rank 0.
    Root(Box<RootWriter>),
    /// Every other rank.
    Provider(Rc<RefCell<Providing>>),
}

/// The thread that writes, and the messages for it.
struct RootWriter {
    writer: Writer<CollectedState>,
    /// The source of the values before the first file; later the writer has it.
    state: Option<CollectedState>,
    collector: Rc<RefCell<StateCollector>>,
}

impl StateWriter {
    /// Allocates memory for copies of the state: `parts` says which rank provides what of the
    /// parameters and of `num_slots` slots. The newest `keep` files of a directory stay (all if
    /// that is 0). Collective, because all ranks must have the memory.
    ///
    /// # Errors
    /// A rank does not have enough memory: the same error on every rank.
    pub(super) fn new(
        grid: &Grid,
        parts: &Arc<StateParts>,
        num_slots: usize,
        keep: usize,
    ) -> Result<StateWriter> {
        let all = grid.channels.checkpoints.clone();
        let copy = grid.all.agree(StateCopy::new(parts, all.rank(), num_slots))?;
        let role = if all.is_root() {
            let (state, collector) = connect(all.clone(), parts, copy);
            let collector = Rc::new(RefCell::new(collector));
            WriterRole::Root(Box::new(RootWriter {
                writer: Writer::new(keep),
                state: Some(state),
                collector,
            }))
        } else {
            WriterRole::Provider(Rc::new(RefCell::new(Providing::new(all.clone(), copy))))
        };
        Ok(StateWriter { all, role })
    }

    /// Copies the state of `trainer` and starts to write it as `contents` to `path`.
    /// [`StateWriter::wait`] must come first. Collective.
    ///
    /// # Errors
    /// The transfer from the device failed, or rank 0 cannot start a thread (one rank alone).
    pub(super) fn start<D: Device>(
        &mut self,
        trainer: &Trainer<'_, D>,
        path: PathBuf,
        contents: Contents,
    ) -> Result<()> {
        match &mut self.role {
            WriterRole::Root(root) => {
                let RootWriter { writer, state, collector } = &mut **root;
                let mut own = state.take().or_else(|| writer.take()).expect("no thread has the source");
                own.copy.fill(trainer)?;
                collector.borrow_mut().begin();
                comm::attach(collector);
                writer.start(path, contents, own).inspect_err(|_| collector.borrow_mut().end())
            }
            WriterRole::Provider(providing) => {
                let mut own = providing.borrow_mut();
                own.copy.fill(trainer)?;
                own.begin();
                comm::attach(providing);
                Ok(())
            }
        }
    }

    /// Starts to write the last file again, after a failure. [`StateWriter::wait`] must come first.
    /// Collective.
    ///
    /// # Errors
    /// Rank 0 cannot start a thread.
    pub(super) fn try_again(&mut self) -> Result<()> {
        match &mut self.role {
            WriterRole::Root(root) => {
                let RootWriter { writer, collector, .. } = &mut **root;
                collector.borrow_mut().begin();
                comm::attach(collector);
                writer.try_again().inspect_err(|_| collector.borrow_mut().end())
            }
            WriterRole::Provider(providing) => {
                providing.borrow_mut().begin();
                comm::attach(providing);
                Ok(())
            }
        }
    }

    /// Returns the outcome of the last file, once, on rank 0, when it is written. Not collective.
    pub(super) fn poll(&mut self) -> Option<Result<Written>> {
        let WriterRole::Root(root) = &mut self.role else { return None };
        root.writer.poll()
    }

    /// Waits for the file that is being written, if there is one, and returns its outcome on rank 0
    /// unless [`StateWriter::poll`] has. Collective: rank 0 tells the others whenever its thread
    /// makes progress, so that no watchdog mistakes the wait for a hang.
    ///
    /// # Errors
    /// None but those of a broadcast.
    pub(super) fn wait(&mut self) -> Result<Option<Result<Written>>> {
        let mut gets_on = vec![1_u8];
        while gets_on[0] == 1 {
            if let WriterRole::Root(root) = &self.role {
                gets_on[0] = u8::from(root.writer.wait_for_progress(&mut || comm::advance_for(PAUSE)));
            }
            // started, because a rank must not block while rank 0 waits for its parts
            let mut broadcast = self.all.start_broadcast(gets_on, 0)?;
            while !broadcast.test() {
                thread::yield_now();
            }
            gets_on = broadcast.wait();
        }
        let outcome = self.poll();
        while !self.is_done() {
            comm::advance();
            thread::yield_now();
        }
        Ok(outcome)
    }

    /// Returns true if no message of the last file is under way.
    fn is_done(&self) -> bool {
        match &self.role {
            WriterRole::Root(root) => !root.writer.is_busy() && root.collector.borrow().is_done(),
            WriterRole::Provider(providing) => providing.borrow().is_done(),
        }
    }

    /// Waits for the file that is being written, as long as the ranks make progress: for a rank that
    /// ends, perhaps alone. Not collective.
    pub(super) fn drain(&mut self) {
        let (mut last, mut since) = (self.progress(), Instant::now());
        while !self.is_done() && since.elapsed() < PATIENCE {
            comm::advance_for(PAUSE);
            // a failure is reported by what ends the rank
            let _ = self.poll();
            let now = self.progress();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
    }

    fn progress(&self) -> u64 {
        match &self.role {
            WriterRole::Root(root) => root.writer.progress(),
            WriterRole::Provider(providing) => providing.borrow().num_requests(),
        }
    }
}

impl Drop for StateWriter {
    /// Blocks until the last file is written, so that it is whole however the run ends.
    fn drop(&mut self) {
        self.drain();
    }
}
