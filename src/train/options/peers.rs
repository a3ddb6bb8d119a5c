//! The decision whether ranks of a node map each other's device memory: by trial.

use crate::comm::World;
use crate::device::prelude::*;
use crate::device::{Cuda, CudaBuffer, Role};
use crate::memory::MemoryHandle;
use crate::{Error, Result};

/// Lets ranks of the same node map each other's device memory if every rank can write to that of all others
/// on its node, and finds there what they wrote: some machines with several GPUs map memory, and lose what is
/// written. Collective over the job, while no operation is under way.
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
    let written = offered.and_then(|(buffer, _)| {
        write(world, device, &buffer, &handles)?;
        Ok((buffer, device.device_number()?))
    });
    // nobody gives the memory back, or looks at it, before all have written
    let (buffer, number) = all.agree(written)?;
    all.agree(check(world, device, &buffer))?;
    let mut bytes = vec![0; size_of::<u128>() * all.size()];
    all.all_gather(&number.to_ne_bytes(), &mut bytes)?;
    let (numbers, _) = bytes.as_chunks();
    all.set_devices(numbers.iter().map(|number| u128::from_ne_bytes(*number)).collect());
    Ok(())
}

/// The value that a rank of a node writes.
fn value_of(rank: usize) -> f32 {
    rank as f32 + 1.0
}

/// Returns a buffer with a place for each rank of the node, and the handle of its memory; this rank's place
/// has its value.
fn offer(world: &World, device: &Cuda) -> Result<(CudaBuffer, MemoryHandle)> {
    let (own, num) = (world.local_rank(), world.num_local_ranks());
    let mut buffer = device.allocate(num, Role::Exact)?;
    device.fill(device.view_mut(&mut buffer, 0..num), 0.0);
    device.fill(device.view_mut(&mut buffer, own..own + 1), value_of(own));
    let handle = device.memory_handle(&buffer)?;
    Ok((buffer, handle))
}

/// Writes this rank's value to its place in the memory of each other rank of the node.
fn write(world: &World, device: &Cuda, buffer: &CudaBuffer, handles: &[u8]) -> Result<()> {
    let own = world.local_rank();
    let (handles, _) = handles.as_chunks();
    let others = handles.iter().enumerate().filter(|(rank, _)| *rank != own);
    others.into_iter().try_for_each(|(_, handle)| device.copy_value_to(handle, buffer, own))
}

/// Checks that all ranks of the node have written their values to this rank's memory.
fn check(world: &World, device: &Cuda, buffer: &CudaBuffer) -> Result<()> {
    device.read(device.view(buffer, 0..world.num_local_ranks()), &mut |values| {
        let wrong = values.iter().enumerate().find(|(rank, value)| **value != value_of(*rank));
        wrong.map_or(Ok(()), |(rank, value)| {
            let doing = format!("writing from rank {rank} of this node to the device memory of another");
            Err(Error::failed(doing, format!("it has the value {value} there, not {}", value_of(rank))))
        })
    })
}
