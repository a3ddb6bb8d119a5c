//! The room that a node has for the buffers of its ranks.

use crate::comm::{Operation, World};
use crate::memory::{free_bytes, megabytes};
use crate::{Error, Result};

/// Refuses `option`, with which this rank takes `bytes`, if the ranks of a node take more than is free there:
/// Linux would grant it, and later kill a process that uses it. Collective.
///
/// # Errors
/// A node does not have that much free memory: the same error on every rank.
pub fn check_node_room(world: &World, option: &str, bytes: usize) -> Result<()> {
    // an `f64` holds these numbers, and a sum of them that is too large
    let mut wanted = [bytes as f64];
    world.node_communicator().all_reduce(&mut wanted, Operation::Sum)?;
    let room = match free_bytes() {
        Some(free) if wanted[0] > free as f64 => {
            let why = format!(
                "the buffers on {} take {:.1} MB, and {:.1} MB are free; give a smaller size",
                world.host_name(),
                wanted[0] / 1e6,
                megabytes(free)
            );
            Err(Error::input(option, why))
        }
        _ => Ok(()),
    };
    world.communicator().agree(room)
}
