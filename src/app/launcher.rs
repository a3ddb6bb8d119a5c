//! Checks that the job has the size that the launcher gave it.
//!
//! If MPI and the launcher are incompatible (`srun` with the wrong `--mpi`, the `mpiexec` of
//! another MPI), each of the N processes becomes a job of one rank, and N serial runs go unnoticed.
//! So a job of one rank looks up in the environment how many processes were started.

use std::env;

use crate::comm::{World, library_version};
use crate::{Error, Result};

/// The variables in which launchers set the number of processes. That of an `mpiexec` takes
/// precedence over Slurm's, which counts the whole allocation there; under `srun` it counts the
/// step.
const NUM_TASKS: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];

/// Refuses a job of one rank that the launcher started as one of several. Not collective.
///
/// # Errors
/// The launcher has started several processes, and MPI sees one.
pub(super) fn check(world: &World) -> Result<()> {
    check_size(world.size(), |name| env::var(name).ok(), &library_version())
}

fn check_size(size: usize, variable: impl Fn(&str) -> Option<String>, library: &str) -> Result<()> {
    let announced = NUM_TASKS.iter().find_map(|name| Some((name, variable(name)?.parse::<usize>().ok()?)));
    match announced {
        Some((name, number)) if size == 1 && number > 1 => {
            let doing = "joining the job";
            let way_out = format!(
                "srun --mpi=list shows what Slurm offers (pmix for Open MPI, pmi2 for MPICH), and mpiexec \
                 must be that of {library}; for a run on one rank, unset {name}"
            );
            Err(Error::input(
                doing,
                format!("{name} says {number} processes, but MPI sees this one only; {way_out}"),
            ))
        }
        _ => Ok(()),
    }
}

/// The variables in which launchers set the number of the processes that they have just started. A
/// batch script's environment does not have them.
const STARTED: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// Returns true if a launcher says that this process is one of several. Not collective.
pub(super) fn announces_several() -> bool {
    let number = |name: &str| env::var(name).ok()?.parse::<usize>().ok();
    STARTED.iter().find_map(|name| number(name)).is_some_and(|number| number > 1)
}

/// The variables in which launchers set a process's rank; some hold wrong values.
const RANKS: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"];

/// Returns this process's rank according to the launcher, for messages printed before MPI has
/// started.
pub(super) fn announced_rank() -> Option<usize> {
    RANKS.iter().find_map(|name| env::var(name).ok()?.parse().ok())
}

/// Returns true on exactly one of several processes that do not see each other, the one that may
/// print.
pub(super) fn speaks() -> bool {
    // some of the variables are wrong, depending on the launcher, but on one process only they are
    // all 0
    RANKS.iter().filter_map(|name| env::var(name).ok()).all(|rank| rank == "0")
}

#[cfg(test)]
mod tests {
    use super::check_size;

    #[test]
    fn a_job_of_one_is_refused_where_several_were_started() {
        let check = |size, variables: &[(&str, &str)]| {
            let find =
                |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, v)| (*v).to_owned());
            check_size(size, find, "MPI 1.0").map_err(|error| error.to_string())
        };
        assert!(check(1, &[]).is_ok());
        assert!(check(4, &[("SLURM_NTASKS", "4")]).is_ok());
        let wrong = check(1, &[("SLURM_NTASKS", "4")]).unwrap_err();
        assert!(wrong.contains("SLURM_NTASKS says 4 processes") && wrong.contains("--mpi"), "{wrong}");
        assert!(check(1, &[("PMI_SIZE", "3")]).is_err());
        // one rank by mpiexec, or a step of one task, in an allocation of four
        assert!(check(1, &[("SLURM_NTASKS", "4"), ("OMPI_COMM_WORLD_SIZE", "1")]).is_ok());
        assert!(check(1, &[("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")]).is_ok());
    }
}
