//! [`Group`]: MPI's communicator with the counters and plans that all operations on it share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::algorithm::{Algorithm, Collective, Plan, Ranks, has_one_leader, plan};
use super::links::Links;
use super::mpi::{Handle, Transfers};
use super::nodes::node_of;
use crate::memory::MOST_PEERS;
use crate::sums::Subtrees;

/// The largest tag that every MPI has (MPI-4.1 §9.1.2).
pub const LARGEST_TAG: i32 = 32_767;

/// The number of tags of collective operations on the private twin.
const NUM_TAGS: usize = LARGEST_TAG as usize + 1 - NUM_END_TAGS;

/// The number of tags by which receivers tell senders that they have copied a message: the last ones.
const NUM_END_TAGS: usize = 4096;

/// The routes of device buffers, the same for all communicators of the job.
pub(super) struct Routes {
    /// The route through MPI.
    pub(super) transfers: Cell<Transfers>,
    /// The device of each rank of the job, if ranks of a node map each other's device memory.
    devices: RefCell<Vec<u128>>,
    /// The number of times that the devices were set.
    changes: Cell<u64>,
}

impl Routes {
    pub(super) fn new() -> Routes {
        let (devices, changes) = (RefCell::default(), Cell::new(0));
        Routes { transfers: Cell::new(Transfers::Staged), devices, changes }
    }

    pub(super) fn set_devices(&self, devices: Vec<u128>) {
        self.devices.replace(devices);
        self.changes.set(self.changes.get() + 1);
    }
}

/// The leader of each rank.
type Leaders = Rc<[usize]>;

/// The number of changes of the devices when leaders were found; if all ranks map each other's memory, the
/// leaders of short operations and those of long ones.
type KnownLeaders = (u64, Option<[Leaders; 2]>);

/// A group of ranks: MPI's communicator, and the counters and plans that its operations share.
pub(super) struct Group {
    pub(super) mpi: Handle,
    /// The names of messages and operations in traces.
    pub(super) links: Links,
    pub(super) routes: Rc<Routes>,
    /// For each rank of the group, its number in the job.
    in_job: Vec<Option<i32>>,
    /// The node of each rank of the group.
    nodes: RefCell<Vec<usize>>,
    plans: RefCell<HashMap<(Collective, Algorithm, Subtrees), Rc<Plan>>>,
    leaders: RefCell<Option<KnownLeaders>>,
    next_tag: Cell<usize>,
    next_end_tag: Cell<usize>,
}

impl Group {
    pub(super) fn new(mpi: Handle, links: Links, routes: Rc<Routes>) -> Group {
        let in_job = mpi.ranks_in_job();
        let nodes = in_job.iter().map(|rank| rank.map_or(0, |rank| node_of(rank as usize))).collect();
        let (plans, leaders, nodes) = (RefCell::default(), RefCell::default(), RefCell::new(nodes));
        let [next_tag, next_end_tag] = [0; 2].map(Cell::new);
        Group { mpi, links, routes, in_job, nodes, plans, leaders, next_tag, next_end_tag }
    }

    /// Returns the number in the job of rank `rank`.
    pub(super) fn in_job(&self, rank: usize) -> Option<usize> {
        self.in_job[rank].map(|rank| rank as usize)
    }

    /// Returns the node of rank `rank`.
    pub(super) fn node_of(&self, rank: usize) -> usize {
        self.nodes.borrow()[rank]
    }

    /// Returns the number of nodes that the group spans.
    pub(super) fn num_nodes(&self) -> usize {
        self.nodes.borrow().iter().collect::<HashSet<_>>().len()
    }

    /// Returns the leaders in an operation on `bytes` of each rank, if all ranks map each other's device
    /// memory: for each rank the first that has the same device or, if the operation is short, rank 0.
    pub(super) fn leaders(&self, bytes: usize) -> Option<Leaders> {
        let changes = self.routes.changes.get();
        let mut known = self.leaders.borrow_mut();
        let leaders = match &*known {
            Some((number, leaders)) if *number == changes => leaders,
            _ => &known.insert((changes, self.find_leaders())).1,
        };
        leaders.as_ref().map(|[short, long]| Rc::clone(if has_one_leader(bytes) { short } else { long }))
    }

    fn find_leaders(&self) -> Option<[Leaders; 2]> {
        let (size, devices) = (self.mpi.size, self.routes.devices.borrow());
        if devices.is_empty() || !(2..=MOST_PEERS).contains(&size) || self.num_nodes() > 1 {
            return None;
        }
        let device = |rank: usize| self.in_job(rank).and_then(|rank| devices.get(rank));
        let leader = |rank: usize| (0..size).find(|other| device(*other) == device(rank));
        let long: Option<Leaders> = (0..size).map(|rank| device(rank).and_then(|_| leader(rank))).collect();
        Some([vec![0; size].into(), long?])
    }

    /// Returns true if this rank and rank `other` map each other's device memory.
    pub(super) fn maps(&self, other: usize) -> bool {
        let own = self.mpi.rank;
        !self.routes.devices.borrow().is_empty() && other != own && self.node_of(other) == self.node_of(own)
    }

    /// Pretends that the ranks are on these nodes, for tests.
    pub(super) fn set_nodes(&self, nodes: Vec<usize>) {
        self.nodes.replace(nodes);
        self.plans.borrow_mut().clear();
        self.leaders.replace(None);
    }

    /// Returns this rank's plan, which adds up `subtrees`. It is made at the first call and kept.
    pub(super) fn plan(&self, collective: Collective, algorithm: Algorithm, subtrees: Subtrees) -> Rc<Plan> {
        let mut plans = self.plans.borrow_mut();
        let ranks = Ranks { rank: self.mpi.rank, subtrees, nodes: &self.nodes.borrow() };
        let entry = plans.entry((collective, algorithm, subtrees));
        Rc::clone(entry.or_insert_with(|| Rc::new(plan(collective, algorithm, ranks))))
    }

    /// Reserves tags for the chunks of a collective operation, which every rank starts in the same
    /// order.
    pub(super) fn take_tags(&self, count: usize) -> usize {
        self.next_tag.replace((self.next_tag.get() + count) % NUM_TAGS)
    }

    /// Returns a tag for the end of a message that this rank sends.
    pub(super) fn take_end_tag(&self) -> i32 {
        let number = self.next_end_tag.get();
        self.next_end_tag.set((number + 1) % NUM_END_TAGS);
        (NUM_TAGS + number) as i32
    }

    /// Returns tag `number` modulo the number of tags.
    pub(super) fn tag(number: usize) -> i32 {
        (number % NUM_TAGS) as i32
    }
}
