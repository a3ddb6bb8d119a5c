//! [`Communicator`]: a group of ranks that exchange typed messages and run collective operations.

mod collective;
mod peers;
mod pending;
mod point_to_point;
mod reduction;

use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use ::mpi::topology::SimpleCommunicator;

use super::algorithm::{Algorithm, Call, Choice, Collective, choose, choose_in_levels};
use super::engine;
use super::group::{Group, LARGEST_TAG, Routes};
use super::links::Links;
use super::mpi::{Handle, Mode, Transfers, yields};
use crate::memory::{Buffer, ElementType};
use crate::sums::Subtrees;
use crate::trace::{self, Flight, Name, Span};
use crate::{Error, Result};

pub use pending::Pending;

/// A group of ranks, numbered from 0 to `size − 1`.
///
/// Operations are blocking unless their name begins with `start_`. "Collective" means that every
/// rank of the group calls it, in the same order relative to the group's other collective
/// operations, with the same root, operation and lengths. Lengths and ranks are checked before MPI
/// is called; an error that MPI itself finds ends the job. A clone is the same communicator of MPI, and must
/// not be used after the [`World`](crate::comm::World), whose end finalises MPI.
///
/// Collective operations that are under way at a time on one communicator must not have more than 28,672
/// chunks together, because every chunk has a tag of its own; one operation has at most 4,096. Nor may more
/// than 4,096 messages of device memory that receivers map be on their way from one rank.
#[derive(Clone)]
pub struct Communicator {
    group: Rc<Group>,
    /// The choice for every operation that has a plan for it, instead of the fastest one.
    choice: Option<Choice>,
    /// The route of device buffers, if not the job's.
    transfers: Option<Transfers>,
    /// The sums that the ranks add up, if not one of each rank.
    subtrees: Option<Subtrees>,
}

impl Communicator {
    /// Wraps a communicator that was not split from another; `name` identifies its operations in
    /// traces, and all communicators of the job share the `routes`. Collective.
    pub(super) fn new(communicator: SimpleCommunicator, name: u64, routes: Rc<Routes>) -> Communicator {
        Communicator::of(Group::new(Handle::new(communicator), Links::new(name), routes))
    }

    fn of(group: Group) -> Communicator {
        Communicator { group: Rc::new(group), choice: None, transfers: None, subtrees: None }
    }

    /// Returns this process's number in the group. Not collective.
    pub fn rank(&self) -> usize {
        self.group.mpi.rank
    }

    /// Returns the number of ranks in the group. Not collective.
    pub fn size(&self) -> usize {
        self.group.mpi.size
    }

    /// Returns true on rank 0, which prints and writes files for the group. Not collective.
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the number of nodes that the group spans. Not collective.
    pub fn num_nodes(&self) -> usize {
        self.group.num_nodes()
    }

    /// Returns the node of a rank of the group, as the number of a rank. Not collective.
    pub fn node_of(&self, rank: usize) -> usize {
        self.group.node_of(rank)
    }

    /// Makes a communicator of the ranks that pass the same `color`, ordered by `key`, then by rank
    /// (`MPI_Comm_split`, MPI-4.1 §7.4.2). Collective.
    ///
    /// # Errors
    /// `color` or `key` is above 2³¹ − 1.
    pub fn split(&self, color: usize, key: usize) -> Result<Communicator> {
        let number = |value: usize, name: &str| {
            i32::try_from(value).map_err(|_| {
                Error::failed("splitting a communicator", format!("{name} {value} is above 2³¹ − 1"))
            })
        };
        let part = self.group.mpi.split(number(color, "the color")?, number(key, "the key")?);
        let routes = Rc::clone(&self.group.routes);
        Ok(Communicator::of(Group::new(part, self.group.links.split(color), routes)))
    }

    /// Makes another communicator of the same ranks, whose messages are never matched with messages
    /// of this one (`MPI_Comm_dup`, MPI-4.1 §7.4.2). Collective, while no operation is under way
    /// that needs this rank to advance it.
    pub fn duplicate(&self) -> Communicator {
        let (links, routes) = (self.group.links.split(0), Rc::clone(&self.group.routes));
        Communicator::of(Group::new(self.group.mpi.duplicate(), links, routes))
    }

    /// Allocates words that all ranks of the group share; they must be on one node. Collective.
    pub(in crate::comm) fn shared_words(&self, num_words: usize) -> &'static [AtomicU64] {
        self.group.mpi.allocate_shared(num_words)
    }

    /// Returns this communicator with `choice` for every operation that has a plan for it or, with
    /// [`Algorithm::Mpi`], that MPI provides. For benchmarks and tests. Not collective, but all
    /// ranks must use the same choice.
    pub fn using(&self, choice: Choice) -> Communicator {
        Communicator { group: Rc::clone(&self.group), choice: Some(choice), ..*self }
    }

    /// Returns this communicator with device buffers staged through the host. For benchmarks and
    /// tests. Not collective, but both ends of a message, and all ranks of a collective operation, must
    /// use it.
    pub fn through_host(&self) -> Communicator {
        let transfers = Some(Transfers::Staged);
        Communicator { group: Rc::clone(&self.group), transfers, ..*self }
    }

    /// Returns this communicator with canonical sums for the started sums in place: the buffer of every
    /// rank holds as many arrays of equal length as the rank with the most has `subtrees`, the first of
    /// which are the sums of its own. The total is left in the first array. Blocking operations stay as
    /// they are. Not collective, but all ranks must pass equal ones.
    ///
    /// # Panics
    /// They are for another number of ranks.
    pub fn with_subtrees(&self, subtrees: Subtrees) -> Communicator {
        assert_eq!(subtrees.num_ranks(), self.size(), "a sum has parts on every rank");
        Communicator { group: Rc::clone(&self.group), subtrees: Some(subtrees), ..*self }
    }

    /// Returns the sums that the ranks add up: one of each rank, unless
    /// [`Communicator::with_subtrees`] said otherwise. Not collective.
    fn subtrees(&self) -> Subtrees {
        self.subtrees.unwrap_or_else(|| Subtrees::one_each(self.size()))
    }

    /// Returns the algorithm and chunk size by which `collective` is done on `len` elements of type
    /// `element`. Not collective.
    pub fn choice(&self, collective: Collective, call: Call, len: usize, element: ElementType) -> Choice {
        let is_on_host = matches!(call, Call::Blocking | Call::Started);
        let has_mpi = match collective {
            // MPI counts a part in a C int, and in place it would write the part to the start of
            // the buffer
            Collective::ReduceScatter => is_on_host && len / self.size() <= self.group.mpi.limit(),
            // MPI cannot sum bfloat16
            Collective::AllReduce => element != ElementType::Bf16,
            _ => true,
        };
        let is_mapped = !is_on_host && len > 0 && self.maps_peers_in(collective, element);
        let is_reduction = matches!(collective, Collective::AllReduce | Collective::ReduceScatter);
        let has_order = self.subtrees.is_some() && is_reduction && call != Call::Blocking;
        let sums_in_levels = self.sums_within_nodes(element);
        let can = |choice: &Choice| match choice.algorithm {
            Algorithm::Mpi => has_mpi && !has_order,
            Algorithm::Ipc => is_mapped,
            Algorithm::Direct | Algorithm::Pairwise => choice.algorithm.plans(collective),
            Algorithm::TwoLevel if has_order => choice.algorithm.plans(collective) && sums_in_levels,
            algorithm => algorithm.plans(collective) && !has_order,
        };
        let by_messages = || {
            let (bytes, size) = (len * element.bytes(), self.size());
            let levels = self.group.levels().filter(|_| !is_reduction || sums_in_levels);
            let levels = levels.and_then(|levels| choose_in_levels(collective, call, bytes, levels));
            levels.unwrap_or_else(|| choose(collective, call, bytes, size))
        };
        let fastest = || if is_mapped { Choice::whole(Algorithm::Ipc) } else { by_messages() };
        let choice = self.choice.filter(can).unwrap_or_else(fastest);
        if can(&choice) { choice } else { Choice { algorithm: Algorithm::Pairwise, ..choice } }
    }

    /// Returns true if the sum of each node is a subtree of the sum over all ranks, so that nodes may form
    /// theirs first: they have a power of two of ranks, with a sum each. Sums in bfloat16 would be rounded
    /// once more.
    fn sums_within_nodes(&self, element: ElementType) -> bool {
        let has_subtrees = self.group.levels().is_some_and(|[each, _]| each.is_power_of_two());
        has_subtrees && self.subtrees().is_one_each() && element != ElementType::Bf16
    }

    /// Returns the way in which operations on a buffer of type `B` are started. Not collective.
    pub fn call_on<B: Buffer>(&self) -> Call {
        match self.transfers() {
            _ if B::IS_ON_HOST => Call::Started,
            Transfers::Aware => Call::CudaAware,
            Transfers::Staged => Call::Staged,
        }
    }

    /// Sets the route of device buffers for all communicators of the job; initially it is through
    /// the host. Collective over the job, while no operation is under way.
    pub fn set_transfers(&self, transfers: Transfers) {
        self.group.routes.transfers.set(transfers);
    }

    /// Returns the route of device buffers. Not collective.
    pub fn transfers(&self) -> Transfers {
        self.transfers.unwrap_or(self.group.routes.transfers.get())
    }

    /// Pretends that MPI counts only up to `limit`, for tests.
    #[doc(hidden)]
    pub fn set_message_limit(&self, limit: usize) {
        self.group.mpi.set_limit(limit);
    }

    /// Pretends that the ranks are on these nodes, for tests. Collective.
    #[doc(hidden)]
    pub fn set_nodes(&self, nodes: Vec<usize>) {
        self.group.set_nodes(nodes);
    }

    /// Broadcasts the root's `bytes`, of any length, and returns them on every rank. On other ranks
    /// `bytes` is ignored. Collective.
    ///
    /// # Errors
    /// `root` is out of range.
    pub fn broadcast_bytes(&self, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        let mut length = [bytes.len() as i64];
        self.broadcast(&mut length, root)?;
        bytes.resize(length[0] as usize, 0);
        self.broadcast(&mut bytes, root)?;
        Ok(bytes)
    }

    /// Makes a blocking MPI call or, if there are more ranks than cores, starts it and waits for
    /// it, because some MPIs spin inside blocking calls.
    fn block_on(&self, call: impl FnOnce(&Handle, Mode<'_>)) {
        let mpi = &self.group.mpi;
        if yields() {
            let mut requests = mpi.requests();
            call(mpi, Mode::Started(&mut requests));
            engine::wait_all(&mut requests);
        } else {
            call(mpi, Mode::Blocking);
        }
    }

    /// Begins the span of the next collective operation, of `bytes` on this rank.
    fn collective_span(&self, name: Name, bytes: usize) -> Span {
        trace::communication(name, bytes, self.group.links.collective(), None)
    }

    /// Begins the flight of the next collective operation, of `bytes` on this rank.
    fn collective_flight(&self, name: Name, bytes: usize) -> Flight {
        Flight::start(name, bytes, self.group.links.collective(), None)
    }
}

/// Checks before MPI is called, because an error that MPI finds ends the job.
impl Communicator {
    fn check_peer(&self, doing: &str, peer: usize, tag: i32) -> Result<()> {
        if peer >= self.size() {
            let why = format!("there is no rank {peer} in a communicator of {}", self.size());
            return Err(Error::failed(doing, why));
        }
        if !(0..=LARGEST_TAG).contains(&tag) {
            return Err(Error::failed(doing, format!("tag {tag} is not between 0 and {LARGEST_TAG}")));
        }
        Ok(())
    }

    fn check_root(&self, doing: &str, root: usize) -> Result<()> {
        self.check_peer(doing, root, 0)
    }

    fn check_parts(&self, doing: &str, whole: usize, part: usize) -> Result<()> {
        if whole != part * self.size() {
            let size = self.size();
            let why = format!("{whole} elements are not {size} parts of {part}, one for each rank");
            return Err(Error::failed(doing, why));
        }
        Ok(())
    }

    fn check_equal(&self, doing: &str, send: usize, receive: usize) -> Result<()> {
        if send != receive {
            let why = format!("{send} elements to send, room for {receive} to receive");
            return Err(Error::failed(doing, why));
        }
        Ok(())
    }

    fn check_divisible(&self, doing: &str, whole: usize) -> Result<()> {
        self.check_parts(doing, whole, whole / self.size())
    }

    fn check_all_to_all(&self, send: usize, receive: usize) -> Result<()> {
        self.check_equal("all-to-all", send, receive)?;
        self.check_divisible("all-to-all", send)
    }
}
