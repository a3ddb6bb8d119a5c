//! The cost of communication: every operation is run repeatedly to measure its time, its bandwidths
//! and the part of its time that computation hides, and to check its values.
//!
//! A [`Subject`] is an operation with its buffers. A contest runs several subjects alternately, so
//! that a temporary slowdown of the machine affects all of them. The time of a sample is that of
//! the slowest rank. The samples become a [`Row`]. `operations/` has one file per operation, with
//! everything that is specific to it.

mod bench;
mod buffers;
mod contender;
mod contest;
mod demo;
mod device;
mod host;
mod operation;
mod operations;
mod overlap;
mod report;
mod room;
mod timing;

pub use bench::{Bench, BenchSettings, DeviceBench, HostBench};
pub use demo::demonstrate;
pub use device::DeviceSubject;
pub use host::HostSubject;
pub use operation::{Measured, MeasuredOperation};
pub use operations::{OPERATIONS, operation_named};
pub use report::{Other, Row, header};
pub use room::{Shortage, check_node_room, node_shortage};

use crate::Result;
use crate::comm::{Algorithm, Choice};

/// The way in which an operation is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallForm {
    /// True if the call returns when the operation is complete; otherwise it is started, and waited
    /// for later.
    pub is_blocking: bool,
    /// True if the result replaces the values that are sent.
    pub is_in_place: bool,
}

impl CallForm {
    /// All forms.
    pub const ALL: [CallForm; 4] = [
        CallForm { is_blocking: true, is_in_place: false },
        CallForm { is_blocking: true, is_in_place: true },
        CallForm { is_blocking: false, is_in_place: false },
        CallForm { is_blocking: false, is_in_place: true },
    ];

    /// Returns the call and the place of the result in words.
    pub fn words(self) -> (&'static str, &'static str) {
        let call = if self.is_blocking { "blocking" } else { "non-blocking" };
        (call, if self.is_in_place { "in place" } else { "out of place" })
    }
}

/// Work to be done while an operation is under way. Its argument tests the operation, which
/// advances it.
pub type Meanwhile<'a> = &'a mut dyn FnMut(&mut dyn FnMut() -> Result<()>) -> Result<()>;

/// An operation with its buffers. [`Subject::run`] is collective.
pub trait Subject {
    /// Writes fresh values to the buffers.
    ///
    /// # Errors
    /// The values cannot be written to the device.
    fn fill(&mut self) -> Result<()>;

    /// Runs the operation once, by `choice` if there is one, and `meanwhile` while it is under way,
    /// or afterwards if it is blocking. Returns the algorithm that was used.
    ///
    /// # Errors
    /// There is no memory for messages.
    fn run(&mut self, choice: Option<Choice>, meanwhile: Meanwhile<'_>) -> Result<Algorithm>;

    /// Counts this rank's values that are not as expected after one run on fresh ones.
    ///
    /// # Errors
    /// The values cannot be read from the device.
    fn wrong(&mut self) -> Result<u64>;
}

/// Returns element `at` of the values of rank `rank`: whole numbers that differ between ranks. The sum over
/// consecutive ranks is the difference of two numbers below 13, so that sums over any number of ranks are
/// exact in every format.
fn value(rank: usize, at: usize) -> f32 {
    up_to(rank + 1, at) - up_to(rank, at)
}

/// Returns the sum of element `at` of the values of ranks 0 to `num_ranks` - 1.
fn sum_of_values(num_ranks: usize, at: usize) -> f32 {
    up_to(num_ranks, at) - up_to(0, at)
}

/// Returns a whole number below 13 whose differences between neighbouring ranks are the values.
fn up_to(rank: usize, at: usize) -> f32 {
    ((2 * rank * rank + 5 * rank + at * (rank + 1) + rank / 13 * (at / 13 + 1)) % 13) as f32
}

/// Parses a number of bytes, such as `64`, `4KiB`, `16MiB` or `1GiB`.
///
/// # Errors
/// The text is not such a number; the message says what was expected.
pub fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("G", 30), ("M", 20), ("K", 10), ("", 0)];
    let (unit, shift) = units.into_iter().find(|(unit, _)| text.ends_with(unit)).unwrap_or_default();
    let number: usize =
        text[..text.len() - unit.len()].parse().map_err(|_| "a number such as 64, 4KiB or 16MiB")?;
    number.checked_mul(1 << shift).ok_or_else(|| "that is more than can be addressed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{parse_bytes, sum_of_values, value};

    #[test]
    fn sums_of_values_fit_every_format_and_tell_ranks_apart() {
        let sums = |num_ranks: usize| {
            (0..50).map(|at| (0..num_ranks).map(|rank| value(rank, at)).sum::<f32>()).collect::<Vec<_>>()
        };
        // bf16 holds all whole numbers up to 256
        for num_ranks in (1..200).chain([500, 1024, 4096]) {
            assert!(sums(num_ranks).iter().all(|sum| sum.abs() < 13.0));
            assert_eq!(sums(num_ranks), (0..50).map(|at| sum_of_values(num_ranks, at)).collect::<Vec<_>>());
            let num_zeros = sums(num_ranks).iter().filter(|sum| **sum == 0.0).count();
            assert!(num_zeros <= 25 || num_ranks % 169 == 0, "{num_zeros} zeros with {num_ranks} ranks");
        }
        let values = |rank: usize| (0..50).map(|at| value(rank, at)).collect::<Vec<_>>();
        assert!((1..50).all(|rank| values(rank) != values(0) && values(rank + 5) != values(5)));
    }

    #[test]
    fn sizes_in_words() {
        for (text, bytes) in [("0", 0), ("64", 64), ("4KiB", 4096), ("16M", 16 << 20), ("1GiB", 1 << 30)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "-1", "1.5MiB", "4kB", "99999999999GiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
