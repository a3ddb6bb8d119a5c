//! The choice of an algorithm: for device memory by reasoning, for host memory by measurement with
//! `collectives --compare`, 2 to 4 ranks on two cores with 2 MiB of cache each, Open MPI 4.1.4
//! (times for 2 ranks). In cells without a number MPI's own operation is as fast as anything here.
//!
//! Where ranks are more than cores, MPI's blocking calls become started ones, whose sums may have
//! another order.
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
//! Open MPI's reductions allocate their scratch memory afresh for each call and pay for its page
//! faults; chunks that stay in the caches need little, and need it once. MPI's own reduce-scatter
//! takes two to eight times as long as the pairwise exchange, but for the shortest buffers.

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

/// Half of a core's second cache, as cores go.
const CHUNK: usize = 1 << 20;

impl Choice {
    /// Chooses `algorithm` on whole buffers.
    pub fn whole(algorithm: Algorithm) -> Choice {
        Choice { algorithm, chunk: usize::MAX }
    }
}

/// Chooses for a buffer of `bytes` on `size` ranks.
pub(in crate::comm) fn choose(collective: Collective, call: Call, bytes: usize, size: usize) -> Choice {
    match (call, collective) {
        (Call::Blocking, Collective::AllReduce) => all_reduce(bytes, size),
        (Call::Blocking, Collective::ReduceScatter) => reduce_scatter(bytes, size),
        (Call::Blocking, Collective::Broadcast { .. }) => broadcast(bytes),
        (Call::Blocking, Collective::AllGather) | (Call::Started, Collective::Broadcast { .. }) => {
            Choice::whole(Algorithm::Mpi)
        }
        (Call::Started, Collective::AllReduce) => {
            all_reduce_in_order(bytes, size, if size == 2 { 2 << 20 } else { 32 << 10 }, CHUNK)
        }
        // one round, which needs no attention
        (Call::Started, _) => Choice::whole(Algorithm::Pairwise),
        // one round while a message costs more than its bytes, then part by part, in chunks large
        // enough that their number does not show and small enough that one is added up while the
        // next travels
        (Call::CudaAware, _) => chunked(collective, bytes, size, 256 << 10, (bytes / 8).max(4 << 20)),
        // in chunks, of which one is copied while another travels, with parts that are worth a copy
        // of their own
        (Call::Staged, _) => chunked(collective, bytes, size, 32 << 10, (4 << 20).max(size << 18)),
    }
}

/// The most ranks of which each sends to each in an all-reduce. Beyond, the number of messages
/// counts for more than how often each value travels. Chosen by reasoning; nobody has measured it.
const MOST_DIRECT: usize = 64;

/// Chooses for an all-reduce of `bytes` in rank order, up to [`MOST_DIRECT`] ranks: direct if a
/// rank receives at most `most_direct_bytes`, else in chunks. The algorithms beyond round bfloat16
/// in every round, but only tensor ranks form such sums, and they are few.
fn all_reduce_in_order(bytes: usize, size: usize, most_direct_bytes: usize, chunk: usize) -> Choice {
    match (bytes, size > MOST_DIRECT) {
        (..=65_536, true) => Choice::whole(Algorithm::Doubling),
        (_, true) => Choice { algorithm: Algorithm::Halving, chunk },
        (_, false) if bytes * (size - 1) <= most_direct_bytes => Choice::whole(Algorithm::Direct),
        (_, false) => Choice { algorithm: Algorithm::Pairwise, chunk },
    }
}

fn all_reduce(bytes: usize, size: usize) -> Choice {
    if bytes < 12 << 20 || size > MOST_DIRECT {
        Choice::whole(Algorithm::Mpi)
    } else {
        Choice { algorithm: Algorithm::Pairwise, chunk: CHUNK }
    }
}

/// Chooses for sums in rank order, which two ranks form in any case.
fn reduce_scatter(bytes: usize, size: usize) -> Choice {
    let is_short = size == 2 && bytes <= 4096 && !yields();
    Choice::whole(if is_short { Algorithm::Mpi } else { Algorithm::Pairwise })
}

fn broadcast(bytes: usize) -> Choice {
    // above, code that counts bytes in a C int fails, and a datatype of pieces takes a path that
    // few have tried
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
    chunk: usize,
) -> Choice {
    match collective {
        Collective::AllReduce => all_reduce_in_order(bytes, size, most_direct_bytes, chunk),
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
        let algorithm = |call, bytes, size| choose(Collective::AllReduce, call, bytes, size).algorithm;
        assert_eq!([2, 3, 64].map(|size| algorithm(Call::Started, 4, size)), [Algorithm::Direct; 3]);
        let long = [2, 3, 64].map(|size| algorithm(Call::Started, 25 << 20, size));
        assert_eq!(long, [Algorithm::Pairwise; 3]);
        for size in [65, 1000] {
            for call in [Call::Started, Call::CudaAware, Call::Staged] {
                assert_eq!(algorithm(call, 4, size), Algorithm::Doubling);
                assert_eq!(algorithm(call, 25 << 20, size), Algorithm::Halving);
            }
        }
    }
}
