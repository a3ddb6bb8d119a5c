//! Operations on device memory that the ranks of a node map.

use std::rc::Rc;

use super::Communicator;
use crate::comm::algorithm::{Call, Collective, Cut, choose_in_order, largest_share, node_work};
use crate::comm::engine::{AcrossNodes, AcrossShare, Task};
use crate::memory::ElementType;

impl Communicator {
    /// Lets ranks of the same node map each other's device memory
    /// ([`Algorithm::Ipc`](crate::comm::Algorithm::Ipc)) from now on, in all communicators of the job: rank r
    /// of the job computes on device `devices[r]`, a number that devices of a node do not share. With an
    /// empty list they no longer do. Collective over the job, while no operation is under way.
    pub fn set_devices(&self, devices: Vec<u128>) {
        self.group.routes.set_devices(devices);
    }

    /// Returns true if all ranks map each other's device memory. Not collective.
    pub fn maps_peers(&self) -> bool {
        self.transfers.is_none() && self.group.peers(0).is_some_and(|peers| peers.num_nodes == 1)
    }

    /// Returns true if the ranks of each node map each other's device memory, on one node or on several. Not
    /// collective.
    pub fn has_peers(&self) -> bool {
        self.transfers.is_none() && self.group.peers(0).is_some()
    }

    /// Returns true if `collective` is done in device memory that the ranks of each node map.
    ///
    /// Between nodes, sums are so only in `f32` and on nodes of a power of two of ranks: then the sum of a
    /// node is a subtree of the sum in the order of [`Subtrees`](crate::sums::Subtrees), which nothing rounds
    /// to a shorter type.
    pub(super) fn maps_peers_in(&self, collective: Collective, element: ElementType) -> bool {
        let Some(peers) = self.group.peers(0).filter(|_| self.transfers.is_none()) else { return false };
        let is_sum = matches!(collective, Collective::AllReduce | Collective::ReduceScatter);
        let is_subtree = element == ElementType::F32 && peers.ranks.len().is_power_of_two();
        peers.num_nodes == 1 || !is_sum || is_subtree
    }

    /// Returns the work of this rank in device memory that the ranks of its node map.
    pub(super) fn by_peers(
        &self,
        collective: Collective,
        call: Call,
        len: usize,
        element: ElementType,
    ) -> Task {
        let peers = self.group.peers(len * element.bytes());
        let peers = peers.expect("ranks that map each other's memory have leaders");
        if peers.num_nodes == 1 {
            return Task::Peers { collective, peers, across: None };
        }
        let (place, of_nodes) = (peers.place(self.rank()), collective.of_nodes(peers.ranks.len()));
        let node_len = place.node_len(collective, len);
        let num_shares = if collective.is_owned() { place.num_nodes } else { 1 };
        // all leaders choose for the largest share, so that all ranks know the number of its chunks
        let largest = largest_share(node_len, place.leaders);
        let bytes = largest * num_shares * element.bytes();
        let choice = choose_in_order(of_nodes, call, bytes, place.num_nodes);
        let plan = self.group.node_plan(of_nodes, choice.algorithm, &peers);
        let chunk = choice.chunk / element.bytes();
        let cut = |share: usize| Cut::new(share * num_shares, plan.parts, chunk, of_nodes.is_owned());
        let num_tags = cut(largest).chunks();
        let share = node_work(collective, len, place).map(|work| {
            let (start, share_len) = (work.share.start, work.share.len());
            let gap = if collective.is_owned() { node_len - share_len } else { 0 };
            let cut = cut(share_len).starting_at(start).with_gaps(gap);
            let [send_range, receive_range] = of_nodes.ranges(place.node, place.num_nodes, len);
            Rc::new(AcrossShare { work, plan: plan.clone(), cut, send_range, receive_range })
        });
        Task::Peers { collective, peers, across: Some(AcrossNodes { share, num_tags }) }
    }
}
