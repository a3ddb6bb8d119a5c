//! Names of messages and collective operations in traces, the same on all ranks that take part.
//!
//! Every rank counts the groups that it makes, the collective operations of each group, and the
//! messages of each pair of ranks and tag. MPI orders all of these in the same way on all ranks, so
//! an operation gets the same number everywhere.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_64;

use crate::trace;

/// The counters of one communicator.
pub(super) struct Links {
    group: u64,
    num_groups: Cell<u64>,
    num_collectives: Cell<u64>,
    num_messages: RefCell<HashMap<[u64; 3], u64>>,
}

impl Links {
    /// Makes the counters of a communicator that is not part of another; `group` names it.
    pub(super) fn new(group: u64) -> Links {
        Links {
            group,
            num_groups: Cell::new(0),
            num_collectives: Cell::new(0),
            num_messages: RefCell::default(),
        }
    }

    /// Makes the counters of the part `color` of this communicator. Collective.
    pub(super) fn split(&self, color: usize) -> Links {
        self.num_groups.set(self.num_groups.get() + 1);
        Links::new(name(&[self.group, self.num_groups.get(), color as u64]))
    }

    /// Returns the name of the next collective operation; 0 while nothing is recorded. Collective.
    pub(super) fn collective(&self) -> i64 {
        if !trace::is_on() {
            return 0;
        }
        self.num_collectives.set(self.num_collectives.get() + 1);
        name(&[self.group, self.num_collectives.get()]) as i64
    }

    /// Returns the name of the next message with `tag` from rank `from` to rank `to`; 0 while
    /// nothing is recorded.
    pub(super) fn message(&self, from: usize, to: usize, tag: i32) -> i64 {
        if !trace::is_on() {
            return 0;
        }
        let key = [from as u64, to as u64, tag as u64];
        let mut num_messages = self.num_messages.borrow_mut();
        let count = num_messages.entry(key).or_default();
        *count += 1;
        name(&[self.group, key[0], key[1], key[2], *count]) as i64
    }
}

fn name(numbers: &[u64]) -> u64 {
    xxh3_64(bytemuck::cast_slice(numbers)) | 1
}

#[cfg(test)]
mod tests {
    use super::Links;

    #[test]
    fn parts_have_names_of_their_own_that_all_their_ranks_share() {
        let ranks = [Links::new(1), Links::new(1), Links::new(1)];
        let groups: Vec<u64> =
            ranks.iter().zip([0, 0, 1]).map(|(links, color)| links.split(color).group).collect();
        let again: Vec<u64> = ranks.iter().map(|links| links.split(0).group).collect();
        assert_eq!(groups[0], groups[1]);
        assert!(groups[2] != groups[0] && again[0] != groups[0] && again[0] == again[2]);
        assert_eq!(ranks[0].collective(), 0, "nothing is recorded");
    }
}
