//! The decision whether ranks of a node map each other's device memory: by trial.

use crate::comm::World;
use crate::device::prelude::*;
use crate::device::{Cuda, CudaBuffer, Role};
use crate::memory::MemoryHandle;
use crate::{Error, Result};

/// Lets ranks of the same node map each other's device memory if every rank can read that of all others on
/// its node. Collective over the job, while no operation is under way.
///
/// # Errors
/// A rank cannot, for instance because containers or the driver forbid it: the same error on every rank.
/// Values then travel by MPI.
pub fn map_peers(world: &World, device: &Cuda) -> Result<()> {
    let all = world.communicator();
    let offered = offer(world, device);
    let mut handles = vec![0; size_of::<MemoryHandle>() * world.num_local_ranks()];
    let handle = offered.as_ref().map_or([0; 64], |(_, handle)| *handle);
    world.node_communicator().all_gather(&handle, &mut handles)?;
    // nobody gives the memory back before all have read it
    let number = offered.and_then(|(buffer, _)| {
        check(world, device, &handles)?;
        Ok((buffer, device.device_number()?))
    });
    let (_buffer, number) = all.agree(number)?;
    let mut bytes = vec![0; size_of::<u128>() * all.size()];
    all.all_gather(&number.to_ne_bytes(), &mut bytes)?;
    let (numbers, _) = bytes.as_chunks();
    all.set_devices(numbers.iter().map(|number| u128::from_ne_bytes(*number)).collect());
    Ok(())
}

/// The value that a rank of a node offers.
fn value_of(rank: usize) -> f32 {
    rank as f32 + 1.0
}

/// Returns a buffer with this rank's value, and the handle of its memory.
fn offer(world: &World, device: &Cuda) -> Result<(CudaBuffer, MemoryHandle)> {
    let mut buffer = device.allocate(1, Role::Exact)?;
    device.fill(device.view_mut(&mut buffer, 0..1), value_of(world.local_rank()));
    let handle = device.memory_handle(&buffer)?;
    Ok((buffer, handle))
}

/// Reads the values of the other ranks of the node.
fn check(world: &World, device: &Cuda, handles: &[u8]) -> Result<()> {
    let (handles, _) = handles.as_chunks();
    for (rank, handle) in handles.iter().enumerate().filter(|(rank, _)| *rank != world.local_rank()) {
        let (found, expected) = (device.first_value_at(handle)?, value_of(rank));
        if found != expected {
            let doing = format!("reading the device memory of rank {rank} of this node");
            return Err(Error::failed(doing, format!("it has the value {found}, not {expected}")));
        }
    }
    Ok(())
}
