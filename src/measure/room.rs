//! The room that a node has for the buffers of its ranks.

use crate::comm::{Operation, World};
use crate::memory::{free_bytes, megabytes};
use crate::{Error, Result};

/// The memory that a node lacks.
#[derive(Debug, Clone, Copy)]
pub struct Shortage {
    /// The bytes that its ranks take.
    pub needed: f64,
    /// The bytes that are free there.
    pub free: usize,
}

/// Returns what this node lacks if its ranks take `bytes` each, which may differ, or `None`. Collective over
/// the node.
///
/// # Errors
/// A message failed.
pub fn node_shortage(world: &World, bytes: usize) -> Result<Option<Shortage>> {
    // an `f64` holds these numbers, and a sum of them that is too large
    let mut needed = [bytes as f64];
    world.node_communicator().all_reduce(&mut needed, Operation::Sum)?;
    let [needed] = needed;
    let shortage = free_bytes().map(|free| Shortage { needed, free });
    Ok(shortage.filter(|shortage| shortage.needed > shortage.free as f64))
}

/// Refuses `option`, with which this rank takes `bytes`, if the ranks of a node take more than is free there:
/// Linux would grant it, and later kill a process that uses it. Collective.
///
/// # Errors
/// A node does not have that much free memory: the same error on every rank.
pub fn check_node_room(world: &World, option: &str, bytes: usize) -> Result<()> {
    let room = match node_shortage(world, bytes)? {
        Some(Shortage { needed, free }) => {
            let why = format!(
                "the buffers on {} take {:.1} MB, and {:.1} MB are free; give a smaller size",
                world.host_name(),
                needed / 1e6,
                megabytes(free)
            );
            Err(Error::input(option, why))
        }
        None => Ok(()),
    };
    world.communicator().agree(room)
}
