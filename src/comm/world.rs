//! [`World`]: MPI, initialised once, finalised once, and aborted when a rank cannot continue.
#![allow(unsafe_code)]

use std::io::{self, Write};
use std::panic;
use std::process;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ::mpi::collective::{CommunicatorCollectives as _, Root as _, SystemOperation};
use ::mpi::environment::Universe;
use ::mpi::topology::Communicator as _;
use ::mpi::{Threading, ffi};

use super::Communicator;
use super::group::Routes;
use super::mpi::{yield_while_waiting, yields};
use super::nodes::{node_of, set_nodes};
use crate::{Error, Result};

/// This process's rank, for messages from code without a communicator; `usize::MAX` while MPI is
/// not initialised.
static RANK: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The job: all ranks that the launcher started together. A program started without a launcher is a
/// job of one rank.
///
/// MPI is finalised when the value is dropped, which is collective. Clones of its communicators, and those
/// made from them, must not outlive it: MPI ends a process that calls it afterwards.
pub struct World {
    communicator: Communicator,
    node: Communicator,
    num_core_sharers: usize,
    num_nodes: usize,
    _universe: Universe,
}

impl World {
    /// Initialises MPI with `MPI_THREAD_FUNNELED`: only the thread that calls this may communicate.
    /// Collective; once per process.
    ///
    /// From here on a panic on any rank prints `rank r: …` and ends the whole job with exit code 1,
    /// because a rank that unwound would wait in `MPI_Finalize` for the others, and they for it.
    ///
    /// # Errors
    /// MPI is initialised already, or offers less than `MPI_THREAD_FUNNELED`.
    pub fn start() -> Result<World> {
        let doing = "starting MPI";
        let (universe, provided) = ::mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| Error::failed(doing, "it has been started before in this process"))?;
        if provided < Threading::Funneled {
            let why = format!("it offers {provided:?}, but a program with a loader thread needs Funneled");
            return Err(Error::failed(doing, why));
        }
        let world = universe.world();
        RANK.store(world.rank() as usize, Ordering::Relaxed);
        install_panic_hook();

        let node = world.split_shared(world.rank());
        let mut nodes = vec![0_i32; world.size() as usize];
        let mut leader = world.rank();
        node.process_at_rank(0).broadcast_into(&mut leader);
        world.all_gather_into(&leader, &mut nodes[..]);
        set_nodes(nodes.into_iter().map(|leader| leader as usize).collect());
        let routes = Rc::new(Routes::new());
        let communicator = Communicator::new(world, 1, Rc::clone(&routes));
        let node = Communicator::new(node, 2, routes);
        let mut masks = vec![0_i64; node.size()];
        let own_mask = [allowed_cores()];
        node.all_gather(&own_mask, &mut masks)?;
        let num_core_sharers = masks.iter().filter(|mask| **mask == own_mask[0]).count();
        // the calls that are made depend on this flag, so it is equal on every rank
        let mut is_crowded = 0_u8;
        let crowded_here = u8::from(num_core_sharers > num_cores());
        universe.world().all_reduce_into(&crowded_here, &mut is_crowded, SystemOperation::max());
        yield_while_waiting(is_crowded == 1);
        Ok(World {
            num_nodes: (0..communicator.size()).filter(|rank| node_of(*rank) == *rank).count(),
            communicator,
            node,
            num_core_sharers,
            _universe: universe,
        })
    }

    /// Returns the communicator of all ranks of the job.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// Returns the communicator of the ranks of this node. Not collective.
    pub fn node_communicator(&self) -> &Communicator {
        &self.node
    }

    /// Returns this rank's number in the job. Not collective.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Returns the number of ranks in the job. Not collective.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Returns true on rank 0, which prints and writes files for the job. Not collective.
    pub fn is_root(&self) -> bool {
        self.communicator.is_root()
    }

    /// Returns this rank's number among the ranks of its node, from which its device is chosen. Not
    /// collective.
    pub fn local_rank(&self) -> usize {
        self.node.rank()
    }

    /// Returns the number of ranks on this node. Not collective.
    pub fn num_local_ranks(&self) -> usize {
        self.node.size()
    }

    /// Returns the default number of threads: one for every core that this rank may use within the
    /// launcher's binding. Cores that several ranks of a node may use are divided among them. Not
    /// collective.
    pub fn default_threads(&self) -> usize {
        (num_cores() / self.num_core_sharers).max(1)
    }

    /// Returns the number of cores that this rank may use, the launcher's binding included. Not
    /// collective.
    pub fn num_cores(&self) -> usize {
        num_cores()
    }

    /// Returns true if there are more ranks than cores somewhere in the job, so that waiting ranks
    /// yield their core, and blocking calls are started and waited for. Not collective.
    pub fn is_crowded(&self) -> bool {
        yields()
    }

    /// Leaves blocking calls and waiting to MPI from now on, even if there are more ranks than
    /// cores. For tools that test MPI. Collective.
    pub fn wait_inside_mpi(&self) {
        yield_while_waiting(false);
    }

    /// Returns the number of nodes that the job spans. Not collective.
    pub fn num_nodes(&self) -> usize {
        self.num_nodes
    }

    /// Returns the number of this rank's node, from 0, in the order of the nodes' first ranks. Not
    /// collective.
    pub fn node(&self) -> usize {
        let own = node_of(self.rank());
        (0..own).filter(|rank| node_of(*rank) == *rank).count()
    }

    /// Returns the name of this rank's node. Not collective.
    pub fn host_name(&self) -> String {
        host_name()
    }

    /// Returns the level of thread support that MPI grants. Not collective.
    pub fn thread_level(&self) -> String {
        format!("{:?}", ::mpi::environment::threading_support()).to_lowercase()
    }
}

/// Returns the name of this process's node.
pub(super) fn host_name() -> String {
    ::mpi::environment::processor_name().unwrap_or_default()
}

/// Returns the size of a job in words, such as "3 ranks on 1 node". Not collective.
pub fn ranks_on_nodes(ranks: usize, nodes: usize) -> String {
    let counted =
        |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    format!("{} on {}", counted(ranks, "rank"), counted(nodes, "node"))
}

/// Returns MPI's own name and version, for logs. Not collective.
pub fn library_version() -> String {
    let version = ::mpi::environment::library_version().unwrap_or_default();
    // "Open MPI v4.1.4, package: …" and "MPICH Version:\t4.0.2\n…"
    let first = version.split([',', '\n', '\0']).next().unwrap_or_default();
    first.replace("Version:", "").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns this process's rank in the job, or `None` before MPI is initialised. For messages from
/// anywhere.
pub fn rank_for_messages() -> Option<usize> {
    let rank = RANK.load(Ordering::Relaxed);
    (rank != usize::MAX).then_some(rank)
}

/// Returns the number of cores that this process may use.
fn num_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns a hash of the set of cores that the system lets this process run on; equal on all
/// processes if the system does not report it.
fn allowed_cores() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:")).unwrap_or_default();
    xxhash_rust::xxh3::xxh3_64(list.trim().as_bytes()) as i64
}

/// Ends the whole job at once with `code`, from any thread, without waiting for anyone
/// (`MPI_Abort`). If a rank merely exited, the launcher would end the others, and MPICH's would
/// then return the exit code of any rank. Not collective.
pub fn abort(code: u8) -> ! {
    // the last lines are still on their way through the launcher, and MPICH's drops them when the
    // job ends
    thread::sleep(LAST_WORDS);
    if rank_for_messages().is_none() || is_finalised() {
        // MPI cannot end the job, and before its initialisation the launcher takes this exit for the
        // end of the job; exit handlers could wait for MPI
        signal_hook::low_level::exit(i32::from(code));
    }
    // if the thread cannot be started, MPI alone ends the job
    let _ = thread::Builder::new().spawn(move || {
        thread::sleep(LONGEST_ABORT);
        signal_hook::low_level::exit(i32::from(code))
    });
    // SAFETY: MPI is initialised and was not finalised just before, and MPI_Abort may be called at any
    // time between the two. A watchdog, or a thread that panics, calls it beside the thread that
    // communicates, which MPI_THREAD_FUNNELED does not allow: the process is lost either way, and ends
    // whether the call returns or not.
    unsafe {
        ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, i32::from(code));
    }
    process::exit(i32::from(code))
}

/// Returns true once MPI is finalised.
fn is_finalised() -> bool {
    let mut flag = 0;
    // SAFETY: MPI_Finalized may be called at any time, from any thread (MPI-4.1 §11.4.1).
    unsafe { ffi::MPI_Finalized(&mut flag) };
    flag != 0
}

/// The time that a launcher gets to pass on the last lines of a rank.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The time that `MPI_Abort` gets: MPI itself may hang.
const LONGEST_ABORT: Duration = Duration::from_secs(5);

fn install_panic_hook() {
    panic::set_hook(Box::new(|information| {
        let rank = rank_for_messages().unwrap_or_default();
        // in one write, because several ranks may panic at once
        let _ = io::stderr().write_all(format!("rank {rank}: {information}\n").as_bytes());
        abort(1)
    }));
}

impl Drop for World {
    fn drop(&mut self) {
        // a panic after MPI_Finalize must not call MPI_Abort
        drop(panic::take_hook());
    }
}

#[cfg(test)]
mod tests {
    use super::ranks_on_nodes;

    #[test]
    fn a_single_rank_or_node_has_no_plural() {
        assert_eq!(ranks_on_nodes(1, 1), "1 rank on 1 node");
        assert_eq!(ranks_on_nodes(3, 2), "3 ranks on 2 nodes");
    }
}
