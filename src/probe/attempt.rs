//! The ranks' side of a trial: runs the operation and checks its values.

use super::{MemoryKind, Trial};
use crate::comm::{Algorithm, Choice, Operation, Transfers, World};
use crate::device::{Cuda, Precision};
use crate::measure::{CallForm, DeviceSubject, HostSubject, Subject, node_shortage};
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
    let shortage = if trial.is_large { node_shortage(world, 4 * trial.bytes())? } else { None };
    // the largest need of a node that has too little
    let mut needed_where_short = [shortage.map_or(0, |shortage| shortage.needed as i64)];
    all.all_reduce(&mut needed_where_short, Operation::Max)?;
    if needed_where_short != [0] {
        return Ok(format!(
            "{LEFT_OUT}it needs {} GiB of free memory on a node",
            needed_where_short[0] >> 30
        ));
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
                let subject =
                    all.agree(DeviceSubject::new(&device, &communicator, trial.operation, form, len));
                // memory that a GPU does not have is an error of the input; what else fails is told
                if trial.is_large && subject.as_ref().is_err_and(|error| error.exit_code() == 2) {
                    let gibibytes = trial.bytes() >> 30;
                    return Ok(format!(
                        "{LEFT_OUT}a GPU has no room for the buffers of its ranks, of {gibibytes} GiB each"
                    ));
                }
                if let Some(mut subject) = subject? {
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
