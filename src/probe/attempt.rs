//! The ranks' side of a trial: runs the operation and checks its values.

use std::path::Path;

use super::{MemoryKind, Trial};
use crate::comm::{Algorithm, Choice, Operation, Transfers, World};
use crate::device::{Cuda, Precision};
use crate::measure::{CallForm, DeviceSubject, HostSubject, Subject};
use crate::{Error, Result};

/// The line that rank 0 prints after a success.
pub(super) const WORKS: &str = "the values are right";
/// The beginning of the line that rank 0 prints when the trial would need more memory than there
/// is.
pub(super) const LEFT_OUT: &str = "left out: ";

/// Runs `trial` with MPI's own operation and returns the line to print. Collective.
///
/// # Errors
/// The values are wrong, or the trial cannot be made.
pub fn attempt(world: &World, trial: Trial) -> Result<String> {
    let all = world.communicator();
    world.wait_inside_mpi();
    let needed = 4 * trial.bytes() * world.num_local_ranks();
    let mut is_enough = [u8::from(!trial.is_large || needed <= available_memory())];
    all.all_reduce(&mut is_enough, Operation::Min)?;
    if is_enough == [0] {
        return Ok(format!("{LEFT_OUT}it needs {} GiB of free memory on a node", needed >> 30));
    }
    let len = trial.operation.round_up(trial.bytes() / size_of::<f32>(), all.size());
    let forms = CallForm::ALL.into_iter().filter(|form| form.is_blocking == trial.is_blocking);
    for form in forms {
        match trial.memory {
            MemoryKind::Host => {
                if let Some(mut subject) = HostSubject::new(all, trial.operation, form, len)? {
                    return once(world, &mut subject);
                }
            }
            MemoryKind::Device => {
                all.set_transfers(Transfers::Aware);
                let device = Cuda::open(world.local_rank(), Precision::F32)?;
                let communicator = all.duplicate();
                if let Some(mut subject) =
                    DeviceSubject::new(&device, &communicator, trial.operation, form, len)?
                {
                    if trial.is_blocking {
                        subject.run_inside_mpi();
                    }
                    return once(world, &mut subject);
                }
            }
        }
    }
    Err(Error::failed(trial, "there is no such form of the operation"))
}

fn once(world: &World, subject: &mut dyn Subject) -> Result<String> {
    subject.fill()?;
    subject.run(Some(Choice::whole(Algorithm::Mpi)), &mut |test| test())?;
    let mut wrong = [subject.wrong()? as i64];
    world.communicator().all_reduce(&mut wrong, Operation::Sum)?;
    match wrong {
        [0] => Ok(WORKS.to_owned()),
        [wrong] => Err(Error::on_every_rank("comparing the values", format!("{wrong} elements are wrong"))),
    }
}

/// Returns the bytes of this node's memory that are available according to Linux and, under Slurm
/// and in containers, within the limits of this process's control group (version 2).
fn available_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<usize>().ok());
    let free = kibibytes.map_or(usize::MAX, |kibibytes| kibibytes << 10);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    // each of the enclosing groups may have a limit
    let limits = Path::new(group).ancestors().filter_map(|group| {
        let number = |file: &str| -> Option<usize> {
            let text = std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(group).join(file)).ok()?;
            text.trim().parse().ok()
        };
        // the page cache of files is freed when memory is needed
        let statistics =
            std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(group).join("memory.stat")).ok()?;
        let cached = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
        let used = number("memory.current")?.saturating_sub(cached.unwrap_or(0));
        Some(number("memory.max")?.saturating_sub(used))
    });
    limits.min().unwrap_or(usize::MAX).min(free)
}
