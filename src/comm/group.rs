//! [`Group`]: MPI's communicator with the counters and plans that all operations on it share.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;

use super::algorithm::{Algorithm, Collective, NodePlace, Plan, Ranks, has_one_leader, plan};
use super::links::Links;
use super::mpi::{Handle, Transfers};
use super::nodes::{node_of, ranks_per_node};
use crate::memory::MOST_PEERS;
use crate::sums::Subtrees;

/// The largest tag that every MPI has (MPI-4.1 §9.1.2).
pub const LARGEST_TAG: i32 = 32_767;

/// The number of tags of collective operations on the private twin. Tags are used again after as many chunks,
/// so that operations under way at a time on a communicator must not have more.
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

/// The leader of each rank of a node.
type Leaders = Rc<[usize]>;

/// The ranks of this node, which map each other's device memory.
#[derive(Debug, Clone)]
pub(super) struct NodePeers {
    /// The ranks. Each of the other nodes has as many.
    pub(super) ranks: Range<usize>,
    /// For each of them, the one that leads its device, counted from the first: the same on every node.
    pub(super) leaders: Leaders,
    pub(super) num_nodes: usize,
}

impl NodePeers {
    /// Returns the place of rank `rank`, which is one of them.
    pub(super) fn place(&self, rank: usize) -> NodePlace<'_> {
        let NodePeers { ref ranks, ref leaders, num_nodes } = *self;
        NodePlace { leaders, rank: rank - ranks.start, node: ranks.start / ranks.len(), num_nodes }
    }
}

/// The number of changes of the devices when peers were found; if ranks of a node map each other's memory,
/// the peers of short operations and those of long ones.
type KnownPeers = (u64, Option<[NodePeers; 2]>);

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
    /// The number of ranks of each node, if that is the same and they follow each other.
    per_node: Cell<Option<usize>>,
    plans: RefCell<HashMap<(Collective, Algorithm, Subtrees), Rc<Plan>>>,
    peers: RefCell<Option<KnownPeers>>,
    /// The plans of messages between the leaders of different nodes.
    node_plans: RefCell<HashMap<(Collective, Algorithm), Rc<Plan>>>,
    next_tag: Cell<usize>,
    next_end_tag: Cell<usize>,
}

impl Group {
    pub(super) fn new(mpi: Handle, links: Links, routes: Rc<Routes>) -> Group {
        let in_job = mpi.ranks_in_job();
        let nodes: Vec<usize> =
            in_job.iter().map(|rank| rank.map_or(0, |rank| node_of(rank as usize))).collect();
        let per_node = Cell::new(ranks_per_node(&nodes));
        let (plans, node_plans, peers) = (RefCell::default(), RefCell::default(), RefCell::default());
        let nodes = RefCell::new(nodes);
        let [next_tag, next_end_tag] = [0; 2].map(Cell::new);
        Group {
            mpi,
            links,
            routes,
            in_job,
            nodes,
            per_node,
            plans,
            peers,
            node_plans,
            next_tag,
            next_end_tag,
        }
    }

    /// Returns the number in the job of rank `rank`.
    pub(super) fn in_job(&self, rank: usize) -> Option<usize> {
        self.in_job[rank].map(|rank| rank as usize)
    }

    /// Returns the node of rank `rank`.
    pub(super) fn node_of(&self, rank: usize) -> usize {
        self.nodes.borrow()[rank]
    }

    /// Returns the number of ranks of each node and that of the nodes, if there are several nodes with
    /// several ranks each, which follow each other.
    pub(super) fn levels(&self) -> Option<[usize; 2]> {
        let each = self.per_node.get().filter(|each| (2..self.mpi.size).contains(each))?;
        Some([each, self.mpi.size / each])
    }

    /// Returns the number of nodes that the group spans.
    pub(super) fn num_nodes(&self) -> usize {
        self.nodes.borrow().iter().collect::<HashSet<_>>().len()
    }

    /// Returns the peers in an operation on `bytes` of each rank, if ranks of a node map each other's device
    /// memory: the leader of each is the first that has the same device or, if the operation is short, the
    /// first of the node.
    pub(super) fn peers(&self, bytes: usize) -> Option<NodePeers> {
        let changes = self.routes.changes.get();
        let mut known = self.peers.borrow_mut();
        let peers = match &*known {
            Some((number, peers)) if *number == changes => peers,
            _ => &known.insert((changes, self.find_peers())).1,
        };
        peers.as_ref().map(|[short, long]| if has_one_leader(bytes) { short } else { long }.clone())
    }

    /// Finds the peers if every node has as many ranks, at least two, which follow each other, with devices
    /// in the same order.
    fn find_peers(&self) -> Option<[NodePeers; 2]> {
        let (size, devices) = (self.mpi.size, self.routes.devices.borrow());
        let each = self.per_node.get().filter(|each| (2..=MOST_PEERS).contains(each))?;
        if devices.is_empty() {
            return None;
        }
        let device = |rank: usize| self.in_job(rank).and_then(|rank| devices.get(rank));
        let leaders_from = |first: usize| -> Option<Vec<usize>> {
            let leader = |rank: usize| {
                let found = (first..=rank).find(|other| device(*other) == device(rank));
                found.filter(|_| device(rank).is_some())
            };
            (first..first + each).map(|rank| leader(rank).map(|leader| leader - first)).collect()
        };
        let leaders = leaders_from(0)?;
        if (0..size).step_by(each).any(|first| leaders_from(first).as_ref() != Some(&leaders)) {
            return None;
        }
        let first = self.mpi.rank / each * each;
        let peers = |leaders: Vec<usize>| NodePeers {
            ranks: first..first + each,
            leaders: leaders.into(),
            num_nodes: size / each,
        };
        Some([peers(vec![0; each]), peers(leaders)])
    }

    /// Returns this rank's plan of `collective` with the ranks in its place on the other nodes, with a sum of
    /// each. It is made at the first call and kept.
    pub(super) fn node_plan(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        peers: &NodePeers,
    ) -> Rc<Plan> {
        let mut plans = self.node_plans.borrow_mut();
        Rc::clone(plans.entry((collective, algorithm)).or_insert_with(|| {
            let (each, own) = (peers.ranks.len(), self.mpi.rank - peers.ranks.start);
            let (rank, subtrees) = (self.mpi.rank / each, Subtrees::one_each(peers.num_nodes));
            let nodes: Vec<usize> = (0..peers.num_nodes).collect();
            let plan = plan(collective, algorithm, Ranks { rank, subtrees, nodes: &nodes });
            Rc::new(plan.with_ranks(|node| node * each + own))
        }))
    }

    /// Returns true if this rank and rank `other` map each other's device memory.
    pub(super) fn maps(&self, other: usize) -> bool {
        let own = self.mpi.rank;
        !self.routes.devices.borrow().is_empty() && other != own && self.node_of(other) == self.node_of(own)
    }

    /// Pretends that the ranks are on these nodes, for tests.
    pub(super) fn set_nodes(&self, nodes: Vec<usize>) {
        self.per_node.set(ranks_per_node(&nodes));
        self.nodes.replace(nodes);
        self.plans.borrow_mut().clear();
        self.peers.replace(None);
        self.node_plans.borrow_mut().clear();
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
        debug_assert!(count <= NUM_TAGS, "every chunk of an operation has a tag of its own");
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
