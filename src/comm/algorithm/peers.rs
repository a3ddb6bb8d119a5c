//! The division of an operation on device memory that all ranks map among the leaders of the devices.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::Collective;
use crate::memory::{PeerWork, PeerWorkKind};

/// The elements of which a leader has a whole number, so that its accesses are aligned.
const UNIT: usize = 1024;

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
) -> SmallVec<[PeerWork; 1]> {
    let size = leaders.len();
    let owned = |kind: fn(usize) -> PeerWorkKind| {
        let part = len / size;
        let of = move |owner: usize| PeerWork { range: owner * part..(owner + 1) * part, kind: kind(owner) };
        (0..size).filter(|owner| leaders[*owner] == rank).map(of).collect()
    };
    let shared = |kind| match share(len, leaders, rank) {
        Some(range) => smallvec![PeerWork { range, kind }],
        None => SmallVec::new(),
    };
    match collective {
        Collective::AllReduce => shared(PeerWorkKind::Sum { into: 0..size }),
        Collective::Broadcast { root } => shared(PeerWorkKind::Copy { from: root }),
        Collective::ReduceScatter => owned(|owner| PeerWorkKind::Sum { into: owner..owner + 1 }),
        Collective::AllGather => owned(|owner| PeerWorkKind::Copy { from: owner }),
    }
}

/// Returns the share of rank `rank` in `len` elements, if it leads a device. The first leader has the
/// largest.
pub(in crate::comm) fn share(len: usize, leaders: &[usize], rank: usize) -> Option<Range<usize>> {
    let leads = |rank: &usize| leaders[*rank] == *rank;
    let num = (0..leaders.len()).filter(leads).count();
    let bound = |number: usize| (number * len.div_ceil(num)).next_multiple_of(UNIT).min(len);
    let number = (0..rank).filter(leads).count();
    leads(&rank).then(|| bound(number)..if number + 1 == num { len } else { bound(number + 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the work of all ranks on small buffers and returns them.
    fn run(collective: Collective, len: usize, leaders: &[usize]) -> Vec<Vec<u64>> {
        let size = leaders.len();
        let before: Vec<Vec<u64>> =
            (0..size).map(|rank| (0..len).map(|at| 1 << rank | (at as u64) << 20).collect()).collect();
        let mut after = before.clone();
        for rank in 0..size {
            for PeerWork { range, kind } in peer_work(collective, len, leaders, rank) {
                assert_eq!(leaders[rank], rank, "leaders alone work");
                for at in range {
                    match &kind {
                        PeerWorkKind::Sum { into } => {
                            let sum = before.iter().map(|buffer| buffer[at] & 0xfffff).sum::<u64>();
                            into.clone().for_each(|rank| after[rank][at] = (at as u64) << 20 | sum);
                        }
                        PeerWorkKind::Copy { from } => {
                            after.iter_mut().for_each(|buffer| buffer[at] = before[*from][at]);
                        }
                    }
                }
            }
        }
        after
    }

    #[test]
    fn leaders_do_all_the_work_once() {
        let all_leaders: [&[usize]; 4] = [&[0, 0], &[0, 1, 2], &[0, 1, 0, 1], &[0, 0, 2, 2, 2]];
        for leaders in all_leaders {
            let size = leaders.len();
            for part in [0, 1, 7, 1000] {
                let len = part * size;
                let all = (1_u64 << size) - 1;
                let values = |of: &dyn Fn(usize) -> u64| -> Vec<u64> {
                    (0..len).map(|at| (at as u64) << 20 | of(at)).collect()
                };
                assert_eq!(run(Collective::AllReduce, len, leaders), vec![values(&|_| all); size]);
                let gathered = values(&|at| 1 << (at / part));
                assert_eq!(run(Collective::AllGather, len, leaders), vec![gathered; size]);
                for root in 0..size {
                    let sent = vec![values(&|_| 1 << root); size];
                    assert_eq!(run(Collective::Broadcast { root }, len, leaders), sent);
                }
                for (rank, found) in run(Collective::ReduceScatter, len, leaders).iter().enumerate() {
                    let expected = values(&|at| if at / part == rank { all } else { 1 << rank });
                    assert_eq!(*found, expected, "rank {rank}");
                }
            }
        }
    }
}
