//! The memory that a run needs, said before it is allocated, and the memory that it reached.
//!
//! Every rank computes its [`Footprint`] and those of the layouts that need less, and all ranks
//! exchange them with the limits of their nodes, so that all come to the same conclusion.

use std::path::{Path, PathBuf};

use super::options::{DeviceChoice, TrainOptions, name_of};
use crate::comm::{Communicator, Grid, World};
use crate::nn::Model;
use crate::parallel::data::SyncSettings;
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::pipeline::footprint::{Footprint, FootprintSettings};
use crate::parallel::zero::{Accumulation, Gathering, ZeroStage};
use crate::{Error, Result};

/// The check of the memory of a job, and what all ranks agreed on.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryPlan {
    /// The time for which gathered parameters are kept in stage 3.
    pub(super) gathering: Gathering,
}

/// A way to need less memory, with the option that chooses it.
struct Candidate {
    option: String,
    sync: SyncSettings,
    recompute: bool,
}

/// Returns megabytes for messages.
fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

impl MemoryPlan {
    /// Computes the memory that every rank needs to train `model` as `plan` and `options` say, logs
    /// that of the fullest rank, and refuses what does not fit into the memory of a node.
    /// Collective.
    ///
    /// # Errors
    /// The ranks of a node need more than it has, or one rank needs more than its limit: the same
    /// error on every rank, with both numbers and the next layout that would fit.
    pub(super) fn check(
        world: &World,
        grid: &Grid,
        model: &Model,
        plan: &ParallelPlan,
        options: &TrainOptions,
    ) -> Result<MemoryPlan> {
        let layout = grid.all.agree(Layout::new(model, grid.shape, grid.all.rank(), plan))?;
        let (_, stage_rank, _) = grid.shape.coordinates(grid.all.rank());
        let footprint = |candidate: &Candidate, gathering| {
            let settings = FootprintSettings {
                shape: grid.shape,
                stage_rank,
                batch_size: options.batch_size,
                sync: candidate.sync,
                num_slots: options.optimizer.settings().num_slots(),
                gathering,
            };
            Footprint::new(
                &layout,
                &ParallelPlan { recompute: candidate.recompute, ..plan.clone() },
                &settings,
            )
        };
        let candidates = candidates(grid, plan, options);
        // rank 0 copies the whole state for a checkpoint
        let copies = 1 + options.optimizer.settings().num_slots();
        let writes = options.checkpoints.checkpoint_dir.is_some() && world.is_root();
        let copy = if writes { copies * model.num_parameters() * size_of::<f32>() } else { 0 };
        let own = footprint(&candidates[0], Gathering::Pass);
        let kept = footprint(&candidates[0], Gathering::Step);
        let mut needs = vec![own.total() + copy, kept.total() + copy];
        let others = candidates[1..].iter().map(|candidate| footprint(candidate, Gathering::Pass).total());
        needs.extend(others.map(|total| total + copy));
        let mut job = Job::exchange(world, &needs)?;
        job.log(own, copy, &grid.all)?;
        if options.machine.device != DeviceChoice::Cpu {
            job.lift_limits();
        }
        if job.fits(0).is_ok() {
            let has_passes = plan.schedule.num_micro_batches > 1 && kept.total() > own.total();
            let keeps = has_passes && options.zero.0 == Some(ZeroStage::Parameters) && job.fits(1).is_ok();
            let gathering = if keeps { Gathering::Step } else { Gathering::Pass };
            if has_passes && options.zero.0 == Some(ZeroStage::Parameters) {
                let often = if keeps { "step" } else { "micro-batch and pass" };
                log::info!("every bucket of parameters is gathered once a {often}");
            }
            return Ok(MemoryPlan { gathering });
        }
        let why = job.fits(0).err().unwrap_or_default();
        let next = (1..candidates.len()).find(|number| job.fits(number + 1).is_ok());
        let way_out = match next {
            Some(number) => format!("{} would fit", candidates[number].option),
            None => "no stage of ZeRO makes it fit; use more nodes, or a smaller model".to_owned(),
        };
        Err(Error::Agreed { message: format!("planning the memory: {why}; {way_out}"), exit_code: 2 })
    }
}

/// Returns the settings of `options`, and then those that need less memory, each with its options.
fn candidates(grid: &Grid, plan: &ParallelPlan, options: &TrainOptions) -> Vec<Candidate> {
    let (sync, recompute) = (options.sync_settings(), plan.recompute);
    let mut all = vec![Candidate { option: String::new(), sync, recompute }];
    let mut add = |option, sync, recompute| all.push(Candidate { option, sync, recompute });
    let stages = [ZeroStage::Slots, ZeroStage::Gradients, ZeroStage::Parameters];
    let stages: Vec<_> = stages.into_iter().filter(|_| grid.shape.data > 1).collect();
    for &stage in &stages {
        let sync = SyncSettings { zero: Some(stage), ..sync };
        add(format!("--zero {}", name_of(&stage)), sync, recompute);
    }
    if let (Some(&stage), true) = (stages.last(), plan.schedule.num_micro_batches > 1) {
        let sync = SyncSettings { zero: Some(stage), accumulation: Accumulation::Parts, ..sync };
        add(format!("--zero {} --accumulate parts", name_of(&stage)), sync, recompute);
    }
    all
}

/// The memory of all ranks and nodes of a job, in bytes.
struct Job {
    /// For each rank, its node, its memory at the start, its own limit and that of its node, and its
    /// needs.
    ranks: Vec<Vec<i64>>,
}

const NODE: usize = 0;
const AT_START: usize = 1;
const OWN_LIMIT: usize = 2;
const NODE_LIMIT: usize = 3;
const NEEDS: usize = 4;

impl Job {
    /// Exchanges the needs of all ranks and the limits of their nodes. Collective.
    fn exchange(world: &World, needs: &[usize]) -> Result<Job> {
        let clamp = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX / 1024);
        let mut own = vec![
            clamp(world.node()),
            clamp(status_bytes("VmRSS:").unwrap_or(0)),
            address_space_left().map_or(-1, clamp),
            node_limit().map_or(-1, clamp),
        ];
        own.extend(needs.iter().map(|bytes| clamp(*bytes)));
        let mut all = vec![0; own.len() * world.size()];
        world.communicator().all_gather(&own, &mut all)?;
        Ok(Job { ranks: all.chunks_exact(own.len()).map(<[i64]>::to_vec).collect() })
    }

    /// Removes the limits of ranks and nodes, for runs whose memory is that of GPUs: these refuse
    /// what they do not have when it is allocated.
    fn lift_limits(&mut self) {
        for own in &mut self.ranks {
            (own[OWN_LIMIT], own[NODE_LIMIT]) = (-1, -1);
        }
    }

    /// Logs the memory of the fullest rank, whose footprint its own rank sends to all. Collective.
    fn log(&self, own: Footprint, copy: usize, all: &Communicator) -> Result<()> {
        let need = |rank: &usize| self.ranks[*rank][NEEDS];
        let fullest = (0..self.ranks.len()).max_by_key(|rank| (need(rank), std::cmp::Reverse(*rank)));
        let Footprint { parameters, gradients, slots, activations, micro_batch, messages } = own;
        let mut terms = [parameters, gradients, slots, activations, micro_batch, messages, copy]
            .map(|bytes| bytes as i64);
        all.broadcast(&mut terms, fullest.unwrap_or_default())?;
        let [parameters, gradients, slots, activations, micro_batch, messages, copy] =
            terms.map(|bytes| megabytes(bytes as usize));
        log::info!(
            "memory of the fullest rank, in MB: parameters {parameters:.1}, gradients {gradients:.1}, \
             optimizer {slots:.1}, activations {activations:.1} ({micro_batch:.1} a micro-batch), messages \
             {messages:.1}, copy for checkpoints {copy:.1}; {:.1} in all, beside {:.1} at the start",
            parameters + gradients + slots + activations + messages + copy,
            megabytes(self.ranks[fullest.unwrap_or_default()][AT_START] as usize)
        );
        Ok(())
    }

    /// Returns the reason why need number `number` does not fit, if it does not.
    fn fits(&self, number: usize) -> std::result::Result<(), String> {
        for (rank, own) in self.ranks.iter().enumerate() {
            let (need, limit) = (own[NEEDS + number], own[OWN_LIMIT]);
            if limit >= 0 && need > limit {
                return Err(format!(
                    "rank {rank} needs {:.0} MB, but may allocate {:.0} MB more (ulimit -v)",
                    megabytes(need as usize),
                    megabytes(limit as usize)
                ));
            }
            let same = self.ranks.iter().filter(|other| other[NODE] == own[NODE]);
            let (mut sum, mut count) = (0, 0);
            for other in same {
                sum += other[NEEDS + number] + other[AT_START];
                count += 1;
            }
            let limit = own[NODE_LIMIT];
            if limit >= 0 && sum > limit {
                return Err(format!(
                    "the {count} ranks of node {} need {:.0} MB, but it has {:.0} MB for them",
                    own[NODE],
                    megabytes(sum as usize),
                    megabytes(limit as usize)
                ));
            }
        }
        Ok(())
    }
}

/// Returns the bytes of a line of `/proc/self/status`, if the system reports it.
fn status_bytes(name: &str) -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kibibytes = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"))?;
    Some(kibibytes.parse::<usize>().ok()? * 1024)
}

/// Returns the peak memory of this process, in megabytes, if the system reports it.
pub(super) fn peak_memory_mb() -> Option<f64> {
    status_bytes("VmHWM:").map(megabytes)
}

/// Logs the peak memory of the fullest rank. Collective.
pub(super) fn log_reached(world: &World) -> Result<()> {
    let own = [status_bytes("VmHWM:").unwrap_or(0) as i64];
    let mut all = vec![0; world.size()];
    world.communicator().all_gather(&own, &mut all)?;
    if let Some((rank, peak)) = all.iter().enumerate().max_by_key(|(_, peak)| **peak) {
        log::info!("memory reached: {:.1} MB, by rank {rank}", megabytes(*peak as usize));
    }
    Ok(())
}

/// Returns the bytes that this process may still map, if that is limited.
fn address_space_left() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(status_bytes("VmSize:")?))
}

/// Returns the memory of this node, or of this job's part of it, in bytes, if the system reports it.
fn node_limit() -> Option<usize> {
    let total = crate::memory::total_bytes();
    [total, cgroup_limit()].into_iter().flatten().min()
}

/// Returns the smallest limit of the control groups of this process (version 2, or the memory
/// controller of version 1).
fn cgroup_limit() -> Option<usize> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group: PathBuf = Path::new(root).join(path.trim_start_matches('/'));
        let above = group.ancestors().take_while(|folder| folder.starts_with(root));
        let read =
            |folder: &Path| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse::<usize>().ok();
        limits.extend(above.filter_map(read));
    }
    limits.into_iter().min()
}
