//! The room that a node has for the buffers of its ranks.

use crate::comm::World;
use crate::memory::{free_bytes, megabytes};
use crate::{Error, Result};

/// Refuses `option`, with which each of `ranks` of a node's ranks, or all if they are fewer, takes `bytes`,
/// if they take more than is free: Linux would grant it, and later kill the process that uses it. Collective.
///
/// # Errors
/// A node does not have that much free memory: the same error on every rank.
pub fn check_room_of_ranks(world: &World, option: &str, bytes: usize, ranks: usize) -> Result<()> {
    let ranks = ranks.min(world.num_local_ranks());
    let wanted = bytes.saturating_mul(ranks);
    let room = match free_bytes() {
        Some(free) if wanted > free => {
            let why = format!(
                "the buffers of {ranks} ranks on {} take {:.1} MB; give a smaller size: {:.1} MB are free",
                world.host_name(),
                megabytes(wanted),
                megabytes(free)
            );
            Err(Error::input(option, why))
        }
        _ => Ok(()),
    };
    world.communicator().agree(room)
}
