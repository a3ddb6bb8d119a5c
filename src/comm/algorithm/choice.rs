//! The choice of an algorithm and a chunk size. The limits for host memory were measured with
//! `collectives --compare` on 2 to 4 ranks, two cores with 2 MiB of cache each, and Open MPI 4.1.4; the times
//! below are for 2 ranks. In cells without a number, MPI's own operation is as fast as any algorithm of this
//! crate.
//!
//! If there are more ranks than cores, non-blocking MPI calls replace the blocking ones, and may
//! sum in another order.
//!
//! | all-reduce of | MPI's own, blocking | chunks of 1 MiB | MPI's own, started | direct | chunks of 1 MiB |
//! |---|---|---|---|---|---|
//! | 16 KiB | | | 12 µs | 7 µs | 11 µs |
//! | 256 KiB | 52 µs | | 79 µs | 47 µs | 49 µs |
//! | 4 MiB | 0.37 ms | 0.41 ms | 1.4 ms | 0.87 ms | 0.61 ms |
//! | 16 MiB | 3.5 ms | 2.9 ms | 9.3 ms | 4.4 ms | 2.9 ms |
//! | 64 MiB | 33 ms | 10 ms | 79 ms | 18 ms | 11 ms |
//! | 256 MiB | 127 ms | 42 ms | | | |
//!
//! Open MPI's reductions allocate new scratch memory in each call and pay for its page faults.
//! Chunks that stay in the caches need little scratch memory, which is allocated once. MPI's own
//! reduce-scatter takes two to eight times as long as the pairwise exchange, except for the
//! shortest buffers.
//!
//! The limits for device memory were measured in the same way, with 2 and 4 ranks that share one H200 without
//! MPS (Multi-Process Service). Chunks are of 16 MiB where MPI reads the memory of the GPU ("aware"), and of
//! 4 MiB where values travel through the host ("staged"); milliseconds on 2 and on 4 ranks:
//!
//! | all-reduce of | aware, direct | aware, chunks | staged, direct | staged, chunks |
//! |---|---|---|---|---|
//! | 64 KiB | 0.45, 1.15 | 0.60, 1.70 | 0.05, 0.09 | 0.05, 0.08 |
//! | 1 MiB | 0.45, 1.15 | 0.87, 1.72 | 0.39, 1.16 | 0.37, 0.60 |
//! | 16 MiB | 0.67, 1.47 | 0.94, 1.87 | 6.3, 24 | 5.4, 7.4 |
//! | 64 MiB | 0.89, 2.27 | 1.96, 4.07 | 37, 103 | 27, 32 |
//!
//! On a shared GPU a message from its memory costs 0.45 ms, whatever its length, because the processes take
//! turns. Ranks with GPUs of their own, on one node or on several, have not been measured: on more than two
//! of them, the direct algorithm sends more bytes, so only a short buffer takes it. A broadcast on 4 ranks
//! takes 0.47 ms as a tree and 0.50 as a chain for 16 MiB (aware), 1.5 and 1.7 ms for 4 MiB, 6.7 and 5.4 ms
//! for 16 MiB (staged).
//!
//! [`Algorithm::Ring`] is never chosen here: it is for comparison only
//! ([`Communicator::using`](crate::comm::Communicator::using)).
//!
//! Between nodes the network is the bottleneck, and [`Algorithm::TwoLevel`] sends a value to another node
//! once, not once for each rank there. On two nodes with a link of 2 Gbit/s between them (emulated with
//! network namespaces on two cores), 16 MiB and 256 KiB took milliseconds:
//!
//! | started | ranks a node | pairwise | two levels |
//! |---|---|---|---|
//! | reduce-scatter | 2 | 74, 1.1 | 35, 0.6 |
//! | | 4 | 142, 2.1 | 52, 0.5 |
//! | all-gather | 2 | 70, 1.1 | 35, 0.5 |
//! | | 4 | 142, 2.1 | 79, 0.5 |
//! | all-reduce | 2 | 146, 2.1 | 71, 1.0 |
//! | | 4 | 322, 4.3 | 137, 1.0 |
//!
//! Of 4 KiB a reduce-scatter took 0.13 ms in place of 0.06 on two ranks a node, an all-reduce as long as
//! [`Algorithm::Direct`]. Nodes of up to [`MOST_DIRECT`] ranks, and as many nodes, are assumed, not measured.

use super::plan::{Algorithm, Collective};
use crate::comm::mpi::yields;

/// An algorithm, and the size of the chunks into which it cuts a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The most bytes of a chunk.
    pub chunk: usize,
}

/// The way in which an operation is called, and the memory that it works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Host memory; the call returns when the operation is complete on this rank.
    Blocking,
    /// Host memory; the operation is started and waited for later.
    Started,
    /// Device memory that MPI reads and writes.
    CudaAware,
    /// Device memory whose values travel through the host.
    Staged,
}

/// Half of the L2 cache of a typical core, in bytes.
const CHUNK: usize = 1 << 20;

/// The choice for a reduce-scatter of host memory: chunks add as they arrive and bound the inbox, whose
/// memory is kept for the next operation; shorter ones would need more attention.
const SCATTERED: Choice = Choice { algorithm: Algorithm::Pairwise, chunk: 2 * CHUNK };

impl Choice {
    /// Returns the choice of `algorithm` without chunks.
    pub fn whole(algorithm: Algorithm) -> Choice {
        Choice { algorithm, chunk: usize::MAX }
    }
}

/// Returns the choice for a buffer of `bytes` on `size` ranks.
pub(in crate::comm) fn choose(collective: Collective, call: Call, bytes: usize, size: usize) -> Choice {
    match (call, collective) {
        (Call::Blocking, Collective::AllReduce) => all_reduce(bytes, size),
        (Call::Blocking, Collective::ReduceScatter) => reduce_scatter(bytes, size),
        (Call::Blocking | Call::Started, Collective::Broadcast { .. }) => broadcast(bytes),
        (Call::Blocking, Collective::AllGather) => Choice::whole(Algorithm::Mpi),
        (Call::Started, Collective::AllReduce) => {
            all_reduce_in_order(bytes, size, if size == 2 { 2 << 20 } else { 32 << 10 }, CHUNK)
        }
        (Call::Started, Collective::ReduceScatter) => SCATTERED,
        // one round, which MPI completes by itself
        (Call::Started, _) => Choice::whole(Algorithm::Pairwise),
        // one round while latency dominates, and on two ranks, where it sends no more bytes than two rounds;
        // then part by part, in few chunks, whose number costs more than sums that wait for the last
        (Call::CudaAware, _) => {
            let most_direct_bytes = if size == 2 { 64 << 20 } else { 256 << 10 };
            chunked(collective, bytes, size, most_direct_bytes, 16 << 20, (bytes / 4).max(16 << 20))
        }
        // in chunks, so that one is copied while another travels, with parts large enough to be
        // worth one copy each
        (Call::Staged, _) => chunked(collective, bytes, size, 64 << 10, 4 << 20, (4 << 20).max(size << 18)),
    }
}

/// Up to this many bytes, rounds cost more than what crosses between nodes.
const SHORT: usize = 16 << 10;

/// The fewest bytes of a part in a chunk that goes in two levels.
const PART: usize = 16 << 10;

/// Returns the choice for a buffer of `bytes` of host memory, on as many ranks a node and nodes as `levels`
/// says, if its operation goes in two levels.
pub(in crate::comm) fn choose_in_levels(
    collective: Collective,
    call: Call,
    bytes: usize,
    levels: [usize; 2],
) -> Option<Choice> {
    let goes = match (call, collective) {
        (Call::Blocking, Collective::AllReduce) => bytes >= BY_MPI,
        (Call::Started, Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather) => {
            bytes > SHORT
        }
        _ => false,
    };
    let are_few = levels.iter().all(|num| *num <= MOST_DIRECT);
    let chunk = CHUNK.max(levels.iter().product::<usize>() * PART);
    (goes && are_few).then_some(Choice { algorithm: Algorithm::TwoLevel, chunk })
}

/// Returns the choice for a buffer of `bytes` on `size` ranks among the algorithms that sum in the order of
/// [`Subtrees`](crate::sums::Subtrees), for device memory.
pub(in crate::comm) fn choose_in_order(
    collective: Collective,
    call: Call,
    bytes: usize,
    size: usize,
) -> Choice {
    let choice = choose(collective, call, bytes, size);
    match choice.algorithm {
        Algorithm::Doubling | Algorithm::Halving => Choice { algorithm: Algorithm::Pairwise, ..choice },
        _ => choice,
    }
}

/// The most ranks on which every rank sends to every other in an all-reduce. On more ranks, the
/// number of messages matters more than the number of times that each value is sent. Estimated, not
/// measured.
const MOST_DIRECT: usize = 64;

/// Returns the choice for an all-reduce of `bytes`. Up to [`MOST_DIRECT`] ranks it sums in one
/// order: directly if a rank receives at most `most_direct_bytes`, else in chunks. The algorithms
/// for more ranks round bfloat16 in every round; only tensor ranks form such sums, and they are
/// few.
fn all_reduce_in_order(bytes: usize, size: usize, most_direct_bytes: usize, chunk: usize) -> Choice {
    match (bytes, size > MOST_DIRECT) {
        (..=65_536, true) => Choice::whole(Algorithm::Doubling),
        (_, true) => Choice { algorithm: Algorithm::Halving, chunk },
        (_, false) if bytes * (size - 1) <= most_direct_bytes => Choice::whole(Algorithm::Direct),
        (_, false) => Choice { algorithm: Algorithm::Pairwise, chunk },
    }
}

/// Blocking all-reduces of fewer bytes are MPI's own.
const BY_MPI: usize = 12 << 20;

fn all_reduce(bytes: usize, size: usize) -> Choice {
    if bytes < BY_MPI || size > MOST_DIRECT {
        Choice::whole(Algorithm::Mpi)
    } else {
        Choice { algorithm: Algorithm::Pairwise, chunk: CHUNK }
    }
}

/// Returns the choice for a blocking reduce-scatter that sums in one order, as MPI does on two ranks.
fn reduce_scatter(bytes: usize, size: usize) -> Choice {
    let is_short = size == 2 && bytes <= 4096 && !yields();
    if is_short { Choice::whole(Algorithm::Mpi) } else { SCATTERED }
}

/// Returns the choice for a broadcast of host memory.
fn broadcast(bytes: usize) -> Choice {
    // from 2 GiB on, code that counts bytes in a C int fails, and derived datatypes take paths that
    // are seldom tested
    if bytes < 1 << 31 {
        Choice::whole(Algorithm::Mpi)
    } else {
        Choice { algorithm: Algorithm::Chain, chunk: 64 << 20 }
    }
}

fn chunked(
    collective: Collective,
    bytes: usize,
    size: usize,
    most_direct_bytes: usize,
    most_tree_bytes: usize,
    chunk: usize,
) -> Choice {
    match collective {
        Collective::AllReduce => all_reduce_in_order(bytes, size, most_direct_bytes, chunk),
        Collective::Broadcast { .. } if bytes <= most_tree_bytes => Choice::whole(Algorithm::Tree),
        Collective::Broadcast { .. } => Choice { algorithm: Algorithm::Chain, chunk },
        _ => Choice { algorithm: Algorithm::Pairwise, chunk },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_buffers_of_the_host_are_cut_in_chunks() {
        for call in [Call::Blocking, Call::Started] {
            let scattered = choose(Collective::ReduceScatter, call, 64 << 20, 4);
            assert_eq!(scattered, Choice { algorithm: Algorithm::Pairwise, chunk: 2 << 20 });
            let sent = |bytes| choose(Collective::Broadcast { root: 0 }, call, bytes, 4);
            assert_eq!(sent((2 << 30) - 1), Choice::whole(Algorithm::Mpi));
            assert_eq!(sent(2 << 30), Choice { algorithm: Algorithm::Chain, chunk: 64 << 20 });
        }
    }

    #[test]
    fn long_sums_between_nodes_go_in_two_levels() {
        let chunk =
            |call, bytes, levels| Some(choose_in_levels(Collective::AllReduce, call, bytes, levels)?.chunk);
        assert_eq!(chunk(Call::Started, 25 << 20, [2, 3]), Some(1 << 20));
        assert_eq!(chunk(Call::Started, 25 << 20, [64, 64]), Some(64 << 20));
        assert_eq!(chunk(Call::Blocking, 25 << 20, [2, 3]), Some(1 << 20));
        for (call, bytes) in [(Call::Started, 16 << 10), (Call::Blocking, 1 << 20), (Call::Staged, 25 << 20)]
        {
            assert_eq!(chunk(call, bytes, [2, 3]), None);
        }
        for levels in [[65, 2], [2, 65]] {
            assert_eq!(chunk(Call::Started, 25 << 20, levels), None);
        }
    }

    #[test]
    fn many_ranks_do_not_send_to_each_other_all() {
        let algorithm = |call, bytes, size| choose(Collective::AllReduce, call, bytes, size).algorithm;
        assert_eq!([2, 3, 64].map(|size| algorithm(Call::Started, 4, size)), [Algorithm::Direct; 3]);
        let long = [2, 3, 64].map(|size| algorithm(Call::Started, 25 << 20, size));
        assert_eq!(long, [Algorithm::Pairwise; 3]);
        let on_devices = |call, size| [32 << 10, 1 << 20, 25 << 20].map(|bytes| algorithm(call, bytes, size));
        assert_eq!(on_devices(Call::CudaAware, 2), [Algorithm::Direct; 3]);
        let (direct, pairwise) = (Algorithm::Direct, Algorithm::Pairwise);
        assert_eq!(on_devices(Call::CudaAware, 4), [direct, pairwise, pairwise]);
        assert_eq!(on_devices(Call::Staged, 2), [direct, pairwise, pairwise]);
        for size in [65, 1000] {
            for call in [Call::Started, Call::CudaAware, Call::Staged] {
                assert_eq!(algorithm(call, 4, size), Algorithm::Doubling);
                assert_eq!(algorithm(call, 25 << 20, size), Algorithm::Halving);
                for bytes in [4, 25 << 20] {
                    let in_order = choose_in_order(Collective::AllReduce, call, bytes, size);
                    assert_eq!(in_order.algorithm, Algorithm::Pairwise);
                }
            }
        }
    }
}
