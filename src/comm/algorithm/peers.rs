//! The division of an operation on device memory that all ranks of a node map among the leaders of the
//! devices.
//!
//! Across nodes, every leader has a share of the elements. It first leaves in its own buffer what its node
//! sends of them: sums over the node, or the parts of the node's ranks. Then it runs the operation by
//! messages with the leaders in its place on the other nodes, and last it copies what has arrived to the
//! ranks of its node. So a value travels between two nodes once, whatever the number of their ranks. No
//! other leader reads or writes the elements of a share.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{Collective, common};
use crate::memory::{PeerWork, PeerWorkKind};

/// The elements of which a leader has a whole number, so that its accesses are aligned.
const UNIT: usize = 1024;

/// Pieces of work that follow each other.
pub(in crate::comm) type PeerWorks = SmallVec<[PeerWork; 1]>;

/// The place of a rank on its node, and that of the node among all.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) struct NodePlace<'a> {
    /// The leader of each rank of the node, counted from the first.
    pub(in crate::comm) leaders: &'a [usize],
    /// The rank, counted in the same way.
    pub(in crate::comm) rank: usize,
    pub(in crate::comm) node: usize,
    pub(in crate::comm) num_nodes: usize,
}

/// The work of a leader in an operation across nodes.
#[derive(Debug, Clone)]
pub(in crate::comm) struct NodeWork {
    /// Its share of the elements. If parts belong to ranks, it has such a share of the parts of each node,
    /// and this is that of the first node.
    pub(in crate::comm) share: Range<usize>,
    /// The work before the messages.
    pub(in crate::comm) before: PeerWorks,
    /// The work after the messages.
    pub(in crate::comm) after: PeerWorks,
}

/// Returns true if one rank does all the work of an operation on `bytes` of each rank: if it is short, the
/// messages of more leaders would take longer than the work. The limit is estimated, not measured.
pub(in crate::comm) fn has_one_leader(bytes: usize) -> bool {
    bytes < 256 << 10
}

/// Returns the work of rank `rank` in `collective` on `len` elements; `leaders` has the leader of each
/// rank. Parts that belong to a rank are its leader's work; the elements of other operations are divided
/// equally. No two pieces of work write the same elements of a buffer, nor does one write what another
/// reads.
pub(in crate::comm) fn peer_work(
    collective: Collective,
    len: usize,
    leaders: &[usize],
    rank: usize,
) -> PeerWorks {
    let (size, all) = (leaders.len(), 0..leaders.len());
    let owned = |kind: &dyn Fn(usize) -> PeerWorkKind| {
        let part = len / size;
        let of = |owner: usize| PeerWork { range: owner * part..(owner + 1) * part, kind: kind(owner) };
        (0..size).filter(|owner| leaders[*owner] == rank).map(of).collect()
    };
    let shared = |kind| match share(len, leaders, rank) {
        Some(range) => smallvec![PeerWork { range, kind }],
        None => SmallVec::new(),
    };
    match collective {
        Collective::AllReduce => shared(PeerWorkKind::Sum { into: all }),
        Collective::Broadcast { root } => shared(PeerWorkKind::Copy { from: root, into: all }),
        Collective::ReduceScatter => owned(&|owner| PeerWorkKind::Sum { into: owner..owner + 1 }),
        Collective::AllGather => owned(&|owner| PeerWorkKind::Copy { from: owner, into: all.clone() }),
    }
}

/// Returns the work of the rank at `place` in `collective` on `len` elements across several nodes, if it
/// leads a device.
pub(in crate::comm) fn node_work(
    collective: Collective,
    len: usize,
    place: NodePlace<'_>,
) -> Option<NodeWork> {
    let NodePlace { leaders, rank, node, num_nodes } = place;
    let (size, all) = (leaders.len(), 0..leaders.len());
    let node_len = place.node_len(collective, len);
    let share = share(node_len, leaders, rank)?;
    let on_node = |node: usize| node * node_len + share.start..node * node_len + share.end;
    // in one piece, if the share is all of a node's elements
    let on_nodes = |nodes: Range<usize>| -> SmallVec<[Range<usize>; 1]> {
        match share.len() == node_len {
            true => smallvec![nodes.start * node_len..nodes.end * node_len],
            false => nodes.map(on_node).collect(),
        }
    };
    let sum = |range| PeerWork { range, kind: PeerWorkKind::Sum { into: rank..rank + 1 } };
    let copy = |range| PeerWork { range, kind: PeerWorkKind::Copy { from: rank, into: all.clone() } };
    // the share's elements that belong to a rank of this node
    let owned = |owner: usize, kind: PeerWorkKind| {
        let (first, part) = (node * node_len, node_len / size);
        let range = common(&on_node(node), &(first + owner * part..first + (owner + 1) * part));
        PeerWork { range, kind }
    };
    let (before, after) = match collective {
        Collective::AllReduce => (smallvec![sum(on_node(0))], smallvec![copy(on_node(0))]),
        Collective::Broadcast { root } if root / size == node => {
            let kind = PeerWorkKind::Copy { from: root % size, into: all.clone() };
            (smallvec![PeerWork { range: on_node(0), kind }], SmallVec::new())
        }
        Collective::Broadcast { .. } => (SmallVec::new(), smallvec![copy(on_node(0))]),
        Collective::ReduceScatter => {
            let others = all.clone().filter(|owner| *owner != rank);
            let to = |owner| owned(owner, PeerWorkKind::Copy { from: rank, into: owner..owner + 1 });
            (on_nodes(0..num_nodes).into_iter().map(sum).collect(), others.map(to).collect())
        }
        Collective::AllGather => {
            let others = on_nodes(0..node).into_iter().chain(on_nodes(node + 1..num_nodes));
            let to_all = |owner| owned(owner, PeerWorkKind::Copy { from: owner, into: all.clone() });
            (all.clone().map(to_all).collect(), others.map(copy).collect())
        }
    };
    Some(NodeWork { share, before, after })
}

impl NodePlace<'_> {
    /// Returns the number of elements of which leaders have shares in `collective` on `len` elements: those
    /// of the parts of one node, if parts belong to ranks.
    pub(in crate::comm) fn node_len(&self, collective: Collective, len: usize) -> usize {
        if collective.is_owned() { len / self.num_nodes } else { len }
    }
}

/// Returns the share of rank `rank` in `len` elements, if it leads a device. The first leader has the
/// largest.
fn share(len: usize, leaders: &[usize], rank: usize) -> Option<Range<usize>> {
    let leads = |rank: &usize| leaders[*rank] == *rank;
    let num = (0..leaders.len()).filter(leads).count();
    let bound = |number: usize| (number * len.div_ceil(num)).next_multiple_of(UNIT).min(len);
    let number = (0..rank).filter(leads).count();
    leads(&rank).then(|| bound(number)..if number + 1 == num { len } else { bound(number + 1) })
}

/// Returns the most elements of a leader's share in `len`, that of the first.
pub(in crate::comm) fn largest_share(len: usize, leaders: &[usize]) -> usize {
    share(len, leaders, 0).map_or(0, |share| share.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits of an element that say which ranks' values it is the sum of; those above are its position.
    const RANKS: u64 = (1 << 20) - 1;

    /// Does `work` on the buffers of the ranks of a node, and marks the elements that it writes in `written`:
    /// each is written once.
    fn work_on(buffers: &mut [Vec<u64>], written: &mut [Vec<bool>], work: &[PeerWork]) {
        for PeerWork { range, kind } in work {
            for at in range.clone() {
                let (into, value) = match kind {
                    PeerWorkKind::Sum { into } => {
                        let sum = buffers.iter().map(|buffer| buffer[at] & RANKS).sum::<u64>();
                        (into, buffers[0][at] & !RANKS | sum)
                    }
                    PeerWorkKind::Copy { from, into } => (into, buffers[*from][at]),
                };
                for rank in into.clone() {
                    assert!(!written[rank][at], "element {at} of rank {rank} is written twice");
                    written[rank][at] = true;
                    buffers[rank][at] = value;
                }
            }
        }
    }

    /// Runs `collective` by the messages of leaders, which are these `buffers` of every node, on the elements
    /// of a share, which `elements` returns for each node.
    fn exchange(
        collective: Collective,
        buffers: &mut [&mut Vec<u64>],
        elements: impl Fn(usize) -> Range<usize>,
    ) {
        let before: Vec<Vec<u64>> = buffers.iter().map(|buffer| buffer.to_vec()).collect();
        let sum =
            |at: usize| before[0][at] & !RANKS | before.iter().map(|buffer| buffer[at] & RANKS).sum::<u64>();
        for node in 0..before.len() {
            for (own, into) in buffers.iter_mut().enumerate() {
                match collective {
                    Collective::AllReduce => elements(0).for_each(|at| into[at] = sum(at)),
                    Collective::Broadcast { root } => elements(0).for_each(|at| into[at] = before[root][at]),
                    Collective::ReduceScatter => elements(own).for_each(|at| into[at] = sum(at)),
                    Collective::AllGather => elements(node).for_each(|at| into[at] = before[node][at]),
                }
            }
        }
    }

    /// Runs the work of all ranks of `num_nodes` nodes on small buffers and returns these. Leaders take turns
    /// in both orders, for none may depend on another.
    fn run(collective: Collective, len: usize, leaders: &[usize], num_nodes: usize) -> Vec<Vec<u64>> {
        let ascending: Vec<usize> = (0..leaders.len()).collect();
        let descending: Vec<usize> = ascending.iter().rev().copied().collect();
        let buffers = run_in_order(collective, len, leaders, num_nodes, &ascending);
        assert_eq!(buffers, run_in_order(collective, len, leaders, num_nodes, &descending));
        buffers
    }

    fn run_in_order(
        collective: Collective,
        len: usize,
        leaders: &[usize],
        num_nodes: usize,
        order: &[usize],
    ) -> Vec<Vec<u64>> {
        let size = leaders.len();
        let value = |rank: usize, at: usize| 1 << rank | (at as u64) << 20;
        let mut buffers: Vec<Vec<u64>> =
            (0..num_nodes * size).map(|rank| (0..len).map(|at| value(rank, at)).collect()).collect();
        // by the work before the messages, and by that after them
        let mut written = [(); 2].map(|()| vec![vec![false; len]; num_nodes * size]);
        if num_nodes == 1 {
            for &rank in order {
                let work = peer_work(collective, len, leaders, rank);
                assert!(work.is_empty() || leaders[rank] == rank, "leaders alone work");
                work_on(&mut buffers, &mut written[0], &work);
            }
            return buffers;
        }
        let place = |node: usize, rank: usize| NodePlace { leaders, rank, node, num_nodes };
        let node_len = place(0, 0).node_len(collective, len);
        for &rank in order {
            let works: Vec<Option<NodeWork>> =
                (0..num_nodes).map(|node| node_work(collective, len, place(node, rank))).collect();
            assert!(works.iter().all(|work| work.is_some() == (leaders[rank] == rank)));
            let works: Vec<NodeWork> = works.into_iter().flatten().collect();
            let Some(NodeWork { share, .. }) = works.first() else { continue };
            let nodes = buffers.chunks_mut(size).zip(written[0].chunks_mut(size));
            nodes.zip(&works).for_each(|((buffers, written), work)| work_on(buffers, written, &work.before));
            let mut own: Vec<&mut Vec<u64>> = buffers.iter_mut().skip(rank).step_by(size).collect();
            let elements = |node: usize| node * node_len + share.start..node * node_len + share.end;
            exchange(collective.of_nodes(size), &mut own, elements);
            let nodes = buffers.chunks_mut(size).zip(written[1].chunks_mut(size));
            nodes.zip(&works).for_each(|((buffers, written), work)| work_on(buffers, written, &work.after));
        }
        buffers
    }

    #[test]
    fn leaders_do_all_the_work_once() {
        let all_leaders: [&[usize]; 4] = [&[0, 0], &[0, 1, 2], &[0, 1, 0, 1], &[0, 0, 2, 2, 2]];
        for (leaders, num_nodes) in all_leaders.iter().flat_map(|leaders| [1, 2, 3].map(|num| (leaders, num)))
        {
            let size = leaders.len() * num_nodes;
            for part in [0, 1, 7, 1000] {
                let len = part * size;
                let all = (1_u64 << size) - 1;
                let values = |of: &dyn Fn(usize) -> u64| -> Vec<u64> {
                    (0..len).map(|at| (at as u64) << 20 | of(at)).collect()
                };
                let run = |collective| run(collective, len, leaders, num_nodes);
                assert_eq!(run(Collective::AllReduce), vec![values(&|_| all); size]);
                let gathered = values(&|at| 1 << (at / part));
                assert_eq!(run(Collective::AllGather), vec![gathered; size]);
                for root in 0..size {
                    assert_eq!(run(Collective::Broadcast { root }), vec![values(&|_| 1 << root); size]);
                }
                for (rank, found) in run(Collective::ReduceScatter).iter().enumerate() {
                    let own = rank * part..(rank + 1) * part;
                    assert_eq!(found[own.clone()], values(&|_| all)[own.clone()], "rank {rank}");
                    let kept = |at: usize| own.contains(&at) || found[at] & RANKS == 1 << rank;
                    assert!(
                        num_nodes > 1 || (0..len).all(kept),
                        "a node's leader writes owners' parts alone"
                    );
                }
            }
        }
    }
}
