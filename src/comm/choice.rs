//! Which algorithm does an operation: on a device's memory by reasoning, on the host's by what was measured with `collectives --compare`,
//! 2 to 4 ranks on two cores with 2 MiB of cache each, Open MPI 4.1.4 (times for 2 ranks). Where nothing is said MPI's own is as fast as
//! anything here.
//!
//! (Where ranks are more than cores, MPI's own blocking calls become started ones, whose sums may have another order.)
//!
//! | all-reduce of | MPI's own, blocking | chunks of 1 MiB | MPI's own, started | everything at once | chunks of 1 MiB |
//! |---|---|---|---|---|---|
//! | 16 KiB | | | 12 µs | 7 µs | 11 µs |
//! | 256 KiB | 52 µs | | 79 µs | 47 µs | 49 µs |
//! | 4 MiB | 0.37 ms | 0.41 ms | 1.4 ms | 0.87 ms | 0.61 ms |
//! | 16 MiB | 3.5 ms | 2.9 ms | 9.3 ms | 4.4 ms | 2.9 ms |
//! | 64 MiB | 33 ms | 10 ms | 79 ms | 18 ms | 11 ms |
//! | 256 MiB | 127 ms | 42 ms | | | |
//!
//! Open MPI's reductions allocate their scratch afresh for each call and pay for its page faults; chunks that stay in the caches need
//! little, and need it once. The reduce-scatter of MPI's own takes two to eight times as long as the pairwise exchange, but for the
//! shortest buffers.

use super::algorithm::{Algorithm, Collective};
use super::waiting::yields;

/// An algorithm, and into chunks of how many bytes it cuts a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The most bytes of a chunk.
    pub chunk: usize,
}

/// Half of a core's second cache, as cores go.
const CHUNK: usize = 1 << 20;

impl Choice {
    /// `algorithm` on whole buffers.
    pub fn whole(algorithm: Algorithm) -> Choice {
        Choice { algorithm, chunk: usize::MAX }
    }
}

/// For reduce-scatters and all-gathers that are started: one round, which needs no attention.
pub(super) fn started() -> Choice {
    Choice::whole(Algorithm::Pairwise)
}

/// The most ranks of which each sends to each in an all-reduce: beyond, the number of messages counts for more than how often each value
/// travels. By reasoning: nobody has measured it.
const MOST_STRAIGHT: usize = 64;

/// For an all-reduce of `bytes` in rank order, up to [`MOST_STRAIGHT`] ranks: at once if a rank receives at most `most_at_once`, else in
/// chunks. Beyond, sums of bfloat16, which these algorithms round in every round, are not to be expected: only tensor ranks form such.
fn all_reduce_in_order(bytes: usize, size: usize, most_at_once: usize, chunk: usize) -> Choice {
    match (bytes, size > MOST_STRAIGHT) {
        (..=65_536, true) => Choice::whole(Algorithm::Doubling),
        (_, true) => Choice { algorithm: Algorithm::Halving, chunk },
        (_, false) if bytes * (size - 1) <= most_at_once => Choice::whole(Algorithm::Direct),
        (_, false) => Choice { algorithm: Algorithm::Pairwise, chunk },
    }
}

/// For an all-reduce of `bytes` that is started.
pub(super) fn started_all_reduce(bytes: usize, size: usize) -> Choice {
    all_reduce_in_order(bytes, size, if size == 2 { 2 << 20 } else { 32 << 10 }, CHUNK)
}

/// For a blocking all-reduce of `bytes`.
pub(super) fn all_reduce(bytes: usize, size: usize) -> Choice {
    if bytes < 12 << 20 || size > MOST_STRAIGHT {
        Choice::whole(Algorithm::Mpi)
    } else {
        Choice { algorithm: Algorithm::Pairwise, chunk: CHUNK }
    }
}

/// For a blocking reduce-scatter of `bytes`, in rank order, for which two ranks need not care.
pub(super) fn reduce_scatter(bytes: usize, size: usize) -> Choice {
    if size == 2 && bytes <= 4096 && !yields() { Choice::whole(Algorithm::Mpi) } else { started() }
}

/// For a blocking broadcast of `bytes`.
pub(super) fn broadcast(bytes: usize) -> Choice {
    // above, what counts bytes in a C int fails, and a datatype of pieces takes a path that few have tried
    if bytes < 1 << 31 {
        Choice::whole(Algorithm::Mpi)
    } else {
        Choice { algorithm: Algorithm::Chain, chunk: 64 << 20 }
    }
}

/// For buffers of `bytes` on a device, which MPI reads and writes there: one round while a message costs more than its bytes, then part by
/// part, in chunks large enough that their number does not show and small enough that one is added up while the next travels.
pub(super) fn on_device(collective: Collective, bytes: usize, size: usize) -> Choice {
    chunked(collective, bytes, size, (256 << 10, (bytes / 8).max(4 << 20)))
}

/// For buffers of `bytes` on a device that go through the host: in chunks, of which one is copied while another travels, with parts that are
/// worth a copy of their own.
pub(super) fn staged(collective: Collective, bytes: usize, size: usize) -> Choice {
    chunked(collective, bytes, size, (32 << 10, (4 << 20).max(size << 18)))
}

fn chunked(
    collective: Collective,
    bytes: usize,
    size: usize,
    (most_at_once, chunk): (usize, usize),
) -> Choice {
    match collective {
        Collective::AllReduce => all_reduce_in_order(bytes, size, most_at_once, chunk),
        Collective::Broadcast { .. } if bytes <= 256 << 10 => Choice::whole(Algorithm::Tree),
        Collective::Broadcast { .. } => Choice { algorithm: Algorithm::Chain, chunk },
        _ => Choice { algorithm: Algorithm::Pairwise, chunk },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_ranks_do_not_send_to_each_other_all() {
        let algorithm = |bytes, size| started_all_reduce(bytes, size).algorithm;
        assert_eq!([2, 3, 64].map(|size| algorithm(4, size)), [Algorithm::Direct; 3]);
        assert_eq!([2, 3, 64].map(|size| algorithm(25 << 20, size)), [Algorithm::Pairwise; 3]);
        for size in [65, 1000] {
            for choose in [on_device, staged] {
                assert_eq!(choose(Collective::AllReduce, 4, size).algorithm, Algorithm::Doubling);
                assert_eq!(choose(Collective::AllReduce, 25 << 20, size).algorithm, Algorithm::Halving);
            }
            assert_eq!(
                [4, 25 << 20].map(|bytes| algorithm(bytes, size)),
                [Algorithm::Doubling, Algorithm::Halving]
            );
        }
    }
}
