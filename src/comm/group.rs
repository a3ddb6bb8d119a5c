//! [`Group`]: MPI's communicator with the counters and plans that all operations on it share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::algorithm::{Algorithm, Collective, Plan, Ranks, plan};
use super::links::Links;
use super::mpi::{Handle, Transfers};
use super::nodes::node_of;
use crate::memory::MOST_PEERS;
use crate::sums::Subtrees;

/// The largest tag that every MPI has (MPI-4.1 §9.1.2).
pub const LARGEST_TAG: i32 = 32_767;

/// The number of tags that every MPI has.
const NUM_TAGS: usize = LARGEST_TAG as usize + 1;

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

/// The leader of each rank, if all ranks map each other's memory, with the number of changes when it was
/// found.
type Leaders = (u64, Option<Rc<[usize]>>);

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
    leaders: RefCell<Option<Leaders>>,
    next_tag: Cell<usize>,
}

impl Group {
    pub(super) fn new(mpi: Handle, links: Links, routes: Rc<Routes>) -> Group {
        let in_job = mpi.ranks_in_job();
        let nodes = in_job.iter().map(|rank| rank.map_or(0, |rank| node_of(rank as usize))).collect();
        let (plans, leaders, next_tag) = (RefCell::default(), RefCell::default(), Cell::new(0));
        Group { mpi, links, routes, in_job, nodes: RefCell::new(nodes), plans, leaders, next_tag }
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

    /// Returns for each rank the first that has the same device, if all ranks map each other's device
    /// memory.
    pub(super) fn leaders(&self) -> Option<Rc<[usize]>> {
        let changes = self.routes.changes.get();
        let mut known = self.leaders.borrow_mut();
        match &*known {
            Some((number, leaders)) if *number == changes => leaders.clone(),
            _ => known.insert((changes, self.find_leaders())).1.clone(),
        }
    }

    fn find_leaders(&self) -> Option<Rc<[usize]>> {
        let (size, devices) = (self.mpi.size, self.routes.devices.borrow());
        if devices.is_empty() || !(2..=MOST_PEERS).contains(&size) || self.num_nodes() > 1 {
            return None;
        }
        let device = |rank: usize| self.in_job(rank).and_then(|rank| devices.get(rank));
        let leader = |rank: usize| (0..size).find(|other| device(*other) == device(rank));
        (0..size).map(|rank| device(rank).and_then(|_| leader(rank))).collect()
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

    /// Returns tag `number` modulo the number of tags.
    pub(super) fn tag(number: usize) -> i32 {
        (number % NUM_TAGS) as i32
    }
}
