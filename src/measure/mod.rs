//! What communication costs here: every operation run again and again, its time, its bandwidths, what computing hides of it, and
//! whether the values are right.
//!
//! The way of a measurement: a [`Subject`] is an operation on buffers of its own; a contest runs several of them in turns, so that
//! a machine that is slow for a while is slow for all, and takes of each sample the time of the slowest rank; what is made of the
//! samples is a [`Row`].

mod bench;
mod contest;
mod demo;
mod device;
mod host;
mod overlap;
mod report;
mod timing;

use std::ops::Range;

use clap::ValueEnum;

pub use bench::{Bench, DeviceBench, HostBench, Settings};
use contest::{Contender, contest};
pub use demo::demonstrate;
pub use device::DeviceSubject;
pub use host::HostSubject;
pub use overlap::{Computation, DeviceComputation, HostComputation};
pub use report::{Other, Row, header};
pub use timing::Times;

use crate::Result;
use crate::comm::{Algorithm, Choice, Collective};

/// An operation that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Measured {
    /// Every rank sends to the next and receives from the one before
    SendReceive,
    /// From rank 0 to all
    Broadcast,
    /// A part from rank 0 to each
    Scatter,
    /// A part from each to rank 0
    Gather,
    /// A part from each to all
    AllGather,
    /// A part from each to each
    AllToAll,
    /// The sum, on rank 0
    Reduce,
    /// The sum, on all
    AllReduce,
    /// A part of the sum on each
    ReduceScatter,
}

impl Measured {
    /// All of them.
    pub const ALL: [Measured; 9] = [
        Measured::SendReceive,
        Measured::Broadcast,
        Measured::Scatter,
        Measured::Gather,
        Measured::AllGather,
        Measured::AllToAll,
        Measured::Reduce,
        Measured::AllReduce,
        Measured::ReduceScatter,
    ];

    /// As on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Bus bandwidth over algorithm bandwidth, as nccl-tests define them (doc/PERFORMANCE.md there): the bytes that the busiest link
    /// must carry, over the size of the buffer.
    pub fn bus_factor(self, size: usize) -> f64 {
        let others = (size as f64 - 1.0) / size as f64;
        match self {
            Measured::SendReceive | Measured::Broadcast | Measured::Reduce => 1.0,
            Measured::AllReduce => 2.0 * others,
            _ => others,
        }
    }

    /// True where the buffer has a part for each rank.
    fn has_parts(self) -> bool {
        use Measured::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self, Scatter | Gather | AllGather | AllToAll | ReduceScatter)
    }

    /// Returns the operation that has plans, if it is one.
    pub fn collective(self) -> Option<Collective> {
        match self {
            Measured::Broadcast => Some(Collective::Broadcast { root: 0 }),
            Measured::AllGather => Some(Collective::AllGather),
            Measured::AllReduce => Some(Collective::AllReduce),
            Measured::ReduceScatter => Some(Collective::ReduceScatter),
            _ => None,
        }
    }

    /// What it does, in a few words.
    fn in_words(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    /// What of the buffers rank `rank` of `size` gives and gets, of as many elements.
    fn looked_at(self, rank: usize, size: usize) -> (Range<usize>, Range<usize>) {
        let own = rank..rank + 1;
        let sent = match self {
            Measured::Broadcast | Measured::Scatter if rank > 0 => 0..0,
            Measured::Gather | Measured::AllGather => own,
            _ => 0..size,
        };
        (sent, expected(self, rank, size, size).0)
    }

    /// The least number of elements that is at least `len` and can be done on `size` ranks.
    pub fn round_up(self, len: usize, size: usize) -> usize {
        if self.has_parts() { len.next_multiple_of(size) } else { len }
    }
}

/// How an operation is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// It returns when it is done; otherwise it is started, and waited for later.
    pub is_blocking: bool,
    /// What comes replaces what goes.
    pub is_in_place: bool,
}

impl Form {
    /// All forms.
    pub const ALL: [Form; 4] = [
        Form { is_blocking: true, is_in_place: false },
        Form { is_blocking: true, is_in_place: true },
        Form { is_blocking: false, is_in_place: false },
        Form { is_blocking: false, is_in_place: true },
    ];

    /// In a word each.
    pub fn words(self) -> (&'static str, &'static str) {
        let call = if self.is_blocking { "blocking" } else { "non-blocking" };
        (call, if self.is_in_place { "in place" } else { "out of place" })
    }
}

/// Work to be done while an operation is under way; it is given what moves the operation on.
pub type Meanwhile<'a> = &'a mut dyn FnMut(&mut dyn FnMut() -> Result<()>) -> Result<()>;

/// An operation on buffers of its own. Collective, all of it.
pub trait Subject {
    /// Puts fresh values into the buffers.
    ///
    /// # Errors
    /// They cannot be put there.
    fn fill(&mut self) -> Result<()>;

    /// Does it by `choice` from now on, where there is one.
    fn choose(&mut self, choice: Option<Choice>);

    /// What the last run was done by.
    fn algorithm(&self) -> Algorithm;

    /// Does it once, and `meanwhile` while it is under way, or afterwards if it is blocking.
    ///
    /// # Errors
    /// There is no memory for messages.
    fn run(&mut self, meanwhile: Meanwhile<'_>) -> Result<()>;

    /// How many of this rank's values are not what they should be after one run on fresh ones.
    ///
    /// # Errors
    /// The values cannot be read.
    fn wrong(&mut self) -> Result<u64>;
}

/// Element `at` of what rank `rank` has: small whole numbers, whose sums are exact in every format.
pub fn value(rank: usize, at: usize) -> f32 {
    ((rank * 3 + at) % 7 + 1) as f32
}

/// What is expected on rank `rank` of `size` after `operation` on buffers of `len` elements: where, and what. Nothing is expected
/// where MPI leaves it open.
pub fn expected(operation: Measured, rank: usize, size: usize, len: usize) -> (Range<usize>, Expectation) {
    let part = len / size;
    let own = rank * part..(rank + 1) * part;
    match operation {
        Measured::SendReceive => (0..len, Expectation::Of((rank + size - 1) % size)),
        Measured::Broadcast => (0..len, Expectation::Of(0)),
        Measured::Scatter => (own, Expectation::Of(0)),
        Measured::Gather if rank > 0 => (0..0, Expectation::Sum),
        Measured::Gather | Measured::AllGather => (0..len, Expectation::OwnerOfPart(part)),
        Measured::AllToAll => (0..len, Expectation::ForMe { part, rank }),
        Measured::Reduce if rank > 0 => (0..0, Expectation::Sum),
        Measured::Reduce | Measured::AllReduce => (0..len, Expectation::Sum),
        Measured::ReduceScatter => (own, Expectation::Sum),
    }
}

/// What an element should be.
#[derive(Debug, Clone, Copy)]
pub enum Expectation {
    /// What this rank has there.
    Of(usize),
    /// What the rank has there to whom the part of that length belongs.
    OwnerOfPart(usize),
    /// What the rank of the element's part had in the part for this rank.
    ForMe {
        /// The length of a part.
        part: usize,
        /// This rank.
        rank: usize,
    },
    /// The sum over all ranks.
    Sum,
}

impl Expectation {
    /// Element `at` on `size` ranks.
    pub fn at(self, at: usize, size: usize) -> f32 {
        match self {
            Expectation::Of(rank) => value(rank, at),
            Expectation::OwnerOfPart(part) => value(at / part, at),
            Expectation::ForMe { part, rank } => value(at / part, rank * part + at % part),
            Expectation::Sum => (0..size).map(|rank| value(rank, at)).sum(),
        }
    }
}

/// A number of bytes, such as `64`, `4KiB`, `16MiB` or `1GiB`.
///
/// # Errors
/// It is none.
pub fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("G", 30), ("M", 20), ("K", 10), ("", 0)];
    let (unit, shift) = units.into_iter().find(|(unit, _)| text.ends_with(unit)).unwrap_or_default();
    let number: usize =
        text[..text.len() - unit.len()].parse().map_err(|_| "a number such as 64, 4KiB or 16MiB")?;
    number.checked_mul(1 << shift).ok_or_else(|| "that is more than can be addressed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Expectation, Measured, expected, parse_bytes};

    #[test]
    fn sizes_in_words() {
        for (text, bytes) in [("0", 0), ("64", 64), ("4KiB", 4096), ("16M", 16 << 20), ("1GiB", 1 << 30)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "-1", "1.5MiB", "4kB", "99999999999GiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_busiest_link_carries_what_nccl_tests_say() {
        let factors = |size| Measured::ALL.map(|operation| operation.bus_factor(size));
        assert_eq!(factors(4), [1.0, 1.0, 0.75, 0.75, 0.75, 0.75, 1.0, 1.5, 0.75]);
        assert_eq!(Measured::AllReduce.bus_factor(1), 0.0);
    }

    #[test]
    fn every_rank_knows_what_to_expect() {
        let of = |operation, rank: usize| {
            let (range, expectation): (_, Expectation) = expected(operation, rank, 2, 4);
            range.map(|at| expectation.at(at, 2)).collect::<Vec<f32>>()
        };
        // rank 0 has 1 2 3 4, rank 1 has 4 5 6 7
        assert_eq!(of(Measured::SendReceive, 1), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(of(Measured::Scatter, 1), [3.0, 4.0]);
        assert_eq!(of(Measured::Gather, 0), [1.0, 2.0, 6.0, 7.0]);
        assert_eq!(of(Measured::AllToAll, 1), [3.0, 4.0, 6.0, 7.0]);
        assert_eq!(of(Measured::AllReduce, 0), [5.0, 7.0, 9.0, 11.0]);
        assert_eq!(of(Measured::ReduceScatter, 1), [9.0, 11.0]);
        assert!(of(Measured::Reduce, 1).is_empty());
    }
}
