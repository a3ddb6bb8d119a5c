//! The memory that a run needs, logged before it is allocated, and the memory that it reached.
//!
//! Every rank computes its [`Footprint`] and those of the layouts that need less, and all ranks
//! exchange them with the limits of their nodes, so that all come to the same conclusion.

use super::checkpoints;
use super::options::{OrAuto, TrainOptions, name_of};
use crate::comm::{Communicator, Grid, World};
use crate::memory::{kibibytes, limit_bytes, megabytes};
use crate::nn::{Model, TensorSpec};
use crate::parallel::audit;
use crate::parallel::data::{StateParts, SyncSettings};
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::pipeline::footprint::{Footprint, FootprintSettings};
use crate::parallel::schedule::PipelineScheduleKind;
use crate::parallel::zero::{Accumulation, Gathering, ZeroStage};
use crate::{Error, Result};

/// The decisions of all ranks about the memory of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryPlan {
    /// The time for which gathered parameters are kept in stage 3.
    pub(super) gathering: Gathering,
}

/// The causes of needs that are known once the samples and the file to start with have been found.
#[derive(Debug, Clone, Copy)]
pub(super) struct StartNeeds {
    /// The most samples of a batch.
    pub(super) batch_size: usize,
    /// The bytes of samples that the ranks of a node share, on the first of them; 0 on the others.
    pub(super) shared_bytes: usize,
    /// True if the run starts with the tensors of a file, of which every rank holds one at a time as a whole.
    pub(super) restores: bool,
}

/// A way to need less memory, with the option that chooses it.
struct Candidate {
    option: String,
    sync: SyncSettings,
    plan: ParallelPlan,
}

impl MemoryPlan {
    /// Computes the memory that every rank needs to train `model` as `plan` and `options` say, with
    /// what its `start` takes, logs that of the fullest rank, and refuses what does
    /// not fit into the memory of a node if it is `on_host`. Collective.
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
        start: StartNeeds,
        on_host: bool,
    ) -> Result<MemoryPlan> {
        let StartNeeds { batch_size, shared_bytes, restores } = start;
        let layout = grid.all.agree(Layout::new(model, grid.shape, grid.all.rank(), plan))?;
        let (_, stage_rank, _) = grid.shape.coordinates(grid.all.rank());
        let num_slots = options.optimizer.settings().num_slots();
        let shape = grid.shape;
        let footprint = |sync, gathering, plan: &ParallelPlan| {
            let settings = FootprintSettings { shape, stage_rank, batch_size, sync, num_slots, gathering };
            Footprint::new(&layout, plan, &settings)
        };
        let sync = options.sync_settings();
        let parts = grid.all.agree(StateParts::new(model, shape, plan, sync))?;
        let num_sections = match &options.checkpoints {
            checkpoints if checkpoints.checkpoint_dir.is_some() => 1 + num_slots,
            checkpoints => usize::from(checkpoints.export.is_some()),
        };
        let audits = match options.audit.settings() {
            Some(_) => audit::needed_bytes(model, plan, shape, sync, batch_size)?,
            None => 0,
        };
        let written = copies(&parts, world, num_sections);
        let more = [if restores { written.max(restored(&layout, model)) } else { written }, audits];
        let candidates = candidates(grid, plan, options, batch_size / shape.data);
        let footprints = [Gathering::Pass, Gathering::Step].map(|until| footprint(sync, until, plan));
        let others = candidates.iter().map(|other| footprint(other.sync, Gathering::Pass, &other.plan));
        let needs = footprints
            .into_iter()
            .chain(others)
            .map(|footprint| more.iter().fold(footprint.total(), |sum, more| sum.saturating_add(*more)));
        let needs: Vec<usize> = needs.collect();
        let job = Job::exchange(world, &needs, shared_bytes, on_host)?;
        let in_parts = sync.zero.is_some_and(ZeroStage::divides_parameters) && shape.data > 1;
        let has_passes = in_parts && plan.schedule.num_micro_batches > 1 && job.differ(0, 1);
        let gathering = if has_passes && job.misfit(1).is_none() { Gathering::Step } else { Gathering::Pass };
        let chosen = usize::from(gathering == Gathering::Step);
        job.log(chosen, footprints[chosen], more, &grid.all)?;
        let Some(misfit) = job.misfit(chosen) else {
            if has_passes {
                let often = if gathering == Gathering::Step { "step" } else { "micro-batch and pass" };
                log::info!("every bucket of parameters is gathered once a {often}");
            }
            return Ok(MemoryPlan { gathering });
        };
        let node = grid.all.broadcast_bytes(world.host_name().into_bytes(), misfit.rank)?;
        let why = misfit.words(&String::from_utf8_lossy(&node));
        let next = (0..candidates.len()).find(|number| job.misfit(number + footprints.len()).is_none());
        let way_out = match next {
            Some(number) => format!("{} would fit", candidates[number].option),
            None => "more nodes, a smaller --batch-size or a smaller model would need less".to_owned(),
        };
        Err(Error::input_on_every_rank("planning the memory", format!("{why}; {way_out}")))
    }
}

/// Returns the bytes that this rank needs to write `num_sections` of the parameters and slots: a
/// copy of its parts, and on rank 0 the bundles that are on their way.
fn copies(parts: &StateParts, world: &World, num_sections: usize) -> usize {
    let own: usize = (0..parts.bundles().len()).map(|bundle| parts.len_of(bundle, world.rank())).sum();
    let num_bundles = match (num_sections, world.is_root(), world.size()) {
        (0, ..) | (_, false, _) => 0,
        (_, true, 1) => 1,
        (_, true, _) => 1 + checkpoints::AHEAD,
    };
    let values = own.saturating_mul(num_sections).saturating_add(num_bundles * parts.largest_bundle());
    values.saturating_mul(size_of::<f32>())
}

/// Returns the bytes that this rank needs for the largest tensor of a file that it reads: the whole tensor,
/// and the part that the rank keeps of it.
fn restored(layout: &Layout, model: &Model) -> usize {
    let part = |number: usize| {
        let own = layout.tensors.iter().filter(|(other, _)| *other == number);
        own.map(|(_, shard)| shard.num_elements()).max().unwrap_or(0)
    };
    let values = |(number, spec): (usize, &TensorSpec)| spec.num_elements().saturating_add(part(number));
    let largest = model.tensors.iter().enumerate().map(values).max().unwrap_or(0);
    largest.saturating_mul(size_of::<f32>())
}

/// The most that the number of micro-batches is multiplied by to need less memory.
const MOST_CUTS: usize = 64;

/// Returns settings that need less memory than those of `plan` and `options`, the faster ones first. A
/// replica has `share` of the samples of a batch.
fn candidates(grid: &Grid, plan: &ParallelPlan, options: &TrainOptions, share: usize) -> Vec<Candidate> {
    let with = |option: &str, options: TrainOptions| {
        let plan = ParallelPlan { recompute: options.recompute, ..plan.clone() };
        Candidate { option: option.to_owned(), sync: options.sync_settings(), plan }
    };
    let mut all = Vec::new();
    let stages: &[ZeroStage] = match grid.shape.data {
        1 => &[],
        _ => &[ZeroStage::Slots, ZeroStage::Gradients, ZeroStage::Parameters],
    };
    // the default number of micro-batches depends on the stage, and the needs are those of the present number
    let num_micro_batches = plan.schedule.num_micro_batches;
    let is_fixed = options.micro_batches.is_some() || num_micro_batches == 1;
    let keeping = if is_fixed { String::new() } else { format!(" --micro-batches {num_micro_batches}") };
    // replicas that hold only a part of the parameters are not compared, and the option would be refused
    let is_compared = options.given.has("check-replicas") && options.check_replicas > 0;
    let uncompared = if is_compared { " --check-replicas 0" } else { "" };
    for stage in stages {
        let keeping = if stage.divides_gradients() { &keeping } else { "" };
        let uncompared = if stage.divides_parameters() { uncompared } else { "" };
        let option = format!("--zero {}{keeping}{uncompared}", name_of(stage));
        all.push(with(&option, TrainOptions { zero: OrAuto(Some(*stage)), ..options.clone() }));
    }
    let sequential = |number| PipelineScheduleKind::Sequential.generate(1, 1, number).ok();
    // a schedule from a file, or of several stages, has its own number
    let is_sequential = sequential(num_micro_batches).is_some_and(|schedule| schedule == plan.schedule);
    if is_sequential && plan.expected_bubble.is_none() {
        let numbers = std::iter::successors(Some(2), |factor| Some(2 * factor))
            .take_while(|factor| *factor <= MOST_CUTS)
            .map(|factor| factor * num_micro_batches);
        for schedule in numbers.take_while(|number| *number <= share).map_while(sequential) {
            let option = format!("--micro-batches {}", schedule.num_micro_batches);
            let same = with(&option, options.clone());
            all.push(Candidate { plan: ParallelPlan { schedule, ..same.plan }, ..same });
        }
    }
    let recomputing = TrainOptions { recompute: true, ..options.clone() };
    all.push(with("--recompute", recomputing.clone()));
    if !stages.is_empty() {
        let least = TrainOptions { zero: OrAuto(Some(ZeroStage::Parameters)), ..recomputing };
        all.push(with(&format!("--zero 3{keeping}{uncompared} --recompute"), least.clone()));
        if num_micro_batches > 1 {
            let least = TrainOptions { accumulate: Accumulation::Parts, ..least };
            let option = format!("--zero 3{keeping}{uncompared} --accumulate parts --recompute");
            all.push(with(&option, least));
        }
    }
    all
}

/// The memory of all ranks and nodes of a job, in bytes.
struct Job {
    ranks: Vec<RankMemory>,
}

/// The memory of a rank, in bytes.
struct RankMemory {
    /// The number of the rank's node.
    node: i64,
    /// The memory that the rank takes before training.
    at_start: i64,
    /// The memory that the rank may still allocate, if that is limited.
    own_limit: Option<i64>,
    /// The memory that all ranks of the node may take together, if that is known.
    node_limit: Option<i64>,
    /// The memory that training needs in addition, for each layout that is considered.
    needs: Vec<i64>,
}

impl Job {
    /// Exchanges the needs of all ranks and the limits of their nodes. A run that is not `on_host`
    /// has no limits, because a GPU refuses what it does not have when it is allocated. Collective.
    fn exchange(world: &World, needs: &[usize], shared_bytes: usize, on_host: bool) -> Result<Job> {
        // small enough that the sum over the ranks of a node is exact
        let clamp = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX).min(i64::MAX / (1 << 20));
        let limit = |bytes: Option<usize>| bytes.filter(|_| on_host).map_or(-1, clamp);
        let mut own = vec![
            clamp(world.node()),
            clamp(private_bytes().unwrap_or(0).saturating_add(shared_bytes)),
            limit(address_space_left()),
            limit(limit_bytes()),
        ];
        own.extend(needs.iter().map(|bytes| clamp(*bytes)));
        let mut all = vec![0; own.len() * world.size()];
        world.communicator().all_gather(&own, &mut all)?;
        let decode = |row: &[i64]| RankMemory {
            node: row[0],
            at_start: row[1],
            own_limit: Some(row[2]).filter(|limit| *limit >= 0),
            node_limit: Some(row[3]).filter(|limit| *limit >= 0),
            needs: row[4..].to_vec(),
        };
        Ok(Job { ranks: all.chunks_exact(own.len()).map(decode).collect() })
    }

    /// Returns true if two needs of some rank differ.
    fn differ(&self, first: usize, second: usize) -> bool {
        self.ranks.iter().any(|rank| rank.needs[first] != rank.needs[second])
    }

    /// Logs the memory of the rank whose need number `number` is the largest, which sends its footprint to
    /// all. Collective.
    fn log(
        &self,
        number: usize,
        own: Footprint,
        [copy, audits]: [usize; 2],
        all: &Communicator,
    ) -> Result<()> {
        let need = |rank: &usize| self.ranks[*rank].needs[number];
        let fullest = (0..self.ranks.len()).max_by_key(|rank| (need(rank), std::cmp::Reverse(*rank)));
        let Footprint { parameters, gradients, slots, activations, micro_batch, messages, shared, joined } =
            own;
        let messages = messages.saturating_add(shared);
        let mut terms =
            [parameters, gradients, slots, activations, micro_batch, messages, joined, copy, audits]
                .map(|bytes| bytes as i64);
        all.broadcast(&mut terms, fullest.unwrap_or_default())?;
        let [parameters, gradients, slots, activations, micro_batch, messages, joined, copy, audits] =
            terms.map(|bytes| megabytes(bytes as usize));
        let if_any = |name, size| if size > 0.0 { format!(", {name} {size:.1}") } else { String::new() };
        let more = if_any("joined products", joined) + &if_any("audits", audits);
        log::info!(
            "memory of the fullest rank, in MB: parameters {parameters:.1}, gradients {gradients:.1}, \
             optimizer {slots:.1}, activations {activations:.1} ({micro_batch:.1} a micro-batch), messages \
             {messages:.1}, copies for files {copy:.1}{more}; {:.1} in all, beside {:.1} at the \
             start",
            parameters + gradients + slots + activations + messages + joined + copy + audits,
            megabytes(self.ranks[fullest.unwrap_or_default()].at_start as usize)
        );
        Ok(())
    }

    /// Returns the first rank whose need number `number` does not fit, if there is one.
    fn misfit(&self, number: usize) -> Option<Misfit> {
        self.ranks.iter().enumerate().find_map(|(rank, own)| {
            let same = || self.ranks.iter().filter(|other| other.node == own.node);
            let sum: i64 = same().map(|other| other.needs[number] + other.at_start).sum();
            let exceeds = |need: i64, limit: Option<i64>| limit.filter(|limit| need > *limit);
            if let Some(limit) = exceeds(own.needs[number], own.own_limit) {
                Some(Misfit { rank, num_ranks: 1, need: own.needs[number], limit })
            } else {
                let limit = exceeds(sum, own.node_limit)?;
                Some(Misfit { rank, num_ranks: same().count(), need: sum, limit })
            }
        })
    }
}

/// A rank that needs more than it may allocate, or the ranks of its node, that need more than the
/// node has.
struct Misfit {
    rank: usize,
    num_ranks: usize,
    need: i64,
    limit: i64,
}

impl Misfit {
    /// Returns the reason, with the name of the `node` of the rank.
    fn words(&self, node: &str) -> String {
        let [need, limit] = [self.need, self.limit].map(|bytes| megabytes(bytes as usize));
        let rank = self.rank;
        match self.num_ranks {
            1 => format!("rank {rank} needs {need:.0} MB, but may allocate {limit:.0} MB on {node}"),
            num => format!("the {num} ranks on {node} need {need:.0} MB, but it has {limit:.0} MB for them"),
        }
    }
}

/// Returns the bytes of a line of `/proc/self/status`, if the system reports it.
fn status_bytes(name: &str) -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    kibibytes(&status, name)
}

/// Returns the memory that this process takes for itself alone.
fn private_bytes() -> Option<usize> {
    Some(status_bytes("VmRSS:")?.saturating_sub(status_bytes("RssShmem:").unwrap_or(0)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_node_share_its_memory() {
        let rank = |node, own_limit, need| RankMemory {
            node,
            at_start: 10,
            own_limit,
            node_limit: Some(100),
            needs: vec![need],
        };
        let misfit = |ranks| Job { ranks }.misfit(0).map(|found| (found.rank, found.num_ranks, found.need));
        assert_eq!(misfit(vec![rank(0, None, 40), rank(0, None, 40), rank(1, None, 90)]), None);
        assert_eq!(misfit(vec![rank(0, None, 40), rank(1, None, 41), rank(1, None, 40)]), Some((1, 2, 101)));
        assert_eq!(misfit(vec![rank(0, None, 1), rank(0, Some(5), 6)]), Some((1, 1, 6)));
        let node = Misfit { rank: 1, num_ranks: 2, need: 101_000_000, limit: 100_000_000 };
        assert_eq!(node.words("n7"), "the 2 ranks on n7 need 101 MB, but it has 100 MB for them");
    }
}
