//! The decision whether ranks of a node map each other's device memory: by trial.

use crate::comm::World;
use crate::device::prelude::*;
use crate::device::{Cuda, CudaBuffer, PeerDirection, Role};
use crate::memory::MemoryHandle;
use crate::{Error, Result};

/// Lets ranks of the same node map each other's device memory if every rank can write to that of all others
/// on its node and read it, and finds in its own what they wrote: some machines with several GPUs map memory,
/// and lose what is written. Collective over the job, while no operation is under way.
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
    // the memory that is offered is never freed, whoever fails here
    let tried = offered.and_then(|(mut buffer, _)| {
        exchange(world, device, &mut buffer, &handles)?;
        Ok((buffer, device.device_number()?))
    });
    let (buffer, number) = all.agree(tried)?;
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

/// Writes this rank's value to its place in the memory of each other rank of the node, and reads it back.
fn exchange(world: &World, device: &Cuda, buffer: &mut CudaBuffer, handles: &[u8]) -> Result<()> {
    let own = world.local_rank();
    let (handles, _) = handles.as_chunks();
    for (rank, handle) in handles.iter().enumerate().filter(|(rank, _)| *rank != own) {
        device.copy_value(PeerDirection::To, handle, buffer, own)?;
        device.fill(device.view_mut(buffer, own..own + 1), 0.0);
        device.copy_value(PeerDirection::From, handle, buffer, own)?;
        device.read(device.view(buffer, own..own + 1), &mut |values| {
            let doing = || format!("reading the device memory of rank {rank} of this node from another rank");
            values.iter().try_for_each(|value| expect(*value, own, doing))
        })?;
    }
    Ok(())
}

/// Checks that all ranks of the node have written their values to this rank's memory.
fn check(world: &World, device: &Cuda, buffer: &CudaBuffer) -> Result<()> {
    device.read(device.view(buffer, 0..world.num_local_ranks()), &mut |values| {
        values.iter().enumerate().try_for_each(|(rank, value)| {
            let doing = || format!("writing from rank {rank} of this node to the device memory of another");
            expect(*value, rank, doing)
        })
    })
}

/// Checks that `value` is the one that `rank` writes.
fn expect(value: f32, rank: usize, doing: impl Fn() -> String) -> Result<()> {
    if value == value_of(rank) {
        return Ok(());
    }
    Err(Error::failed(doing(), format!("it has the value {value} there, not {}", value_of(rank))))
}
