//! The choice of the order of sums that a run's ranks share.

use super::job::Run;
use super::resume::Start;
use crate::parallel::batch::Summation;
use crate::parallel::layout::ParallelPlan;
use crate::sums::{MOST_LEAVES, Section};
use crate::{Error, Result};

impl Run<'_> {
    /// Returns the order of sums: canonical, of as many leaves as the checkpoint at `start` has, as
    /// --leaves says, or as the layout needs; by layout where the device sums in orders of its own.
    /// Logs whether the bits of the result depend on the layout. Collective.
    ///
    /// # Errors
    /// The number of leaves is out of its range or cannot be changed: the same error on every rank.
    pub(super) fn summation(&self, start: Option<&Start>, on_host: bool) -> Result<Summation> {
        let all = self.world.communicator();
        let given = self.options.leaves;
        let mut before = [start.and_then(Start::num_leaves).unwrap_or_default()];
        all.broadcast(&mut before, 0)?;
        let before = usize::try_from(before[0]).ok().filter(|before| *before > 0);
        all.agree(match (before, given) {
            _ if !on_host => Ok(Self::by_layout("a GPU sums in orders of its own")),
            (Some(before), Some(given)) if before != given => {
                let why = format!(
                    "the sums of the run that is resumed have {before} leaves, which may not change; leave \
                     the option out"
                );
                Err(Error::input(format!("--leaves {given}"), why))
            }
            (before, given) => self.canonical(before, given),
        })
    }

    fn by_layout(why: &str) -> Summation {
        log::info!("the last bits of the result depend on the layout, because {why}");
        Summation::ByLayout
    }

    fn canonical(&self, before: Option<usize>, given: Option<usize>) -> Result<Summation> {
        let summation = Summation::canonical(before.or(given), self.grid.shape)?;
        let Summation::Canonical { num_leaves } = summation else {
            return Ok(Self::by_layout("there are more ranks than a sum can have leaves"));
        };
        log::info!("the bits of the result are the same in every layout with --leaves {num_leaves}");
        self.remark(num_leaves, summation);
        Ok(summation)
    }

    /// Says so if some ranks have no part of the sums, or some replicas more rows of a batch than others.
    fn remark(&self, num_leaves: usize, summation: Summation) {
        let num_ranks = self.grid.shape.tensor;
        if num_ranks > num_leaves && self.world.is_root() {
            let advice = match num_ranks.next_power_of_two() {
                enough @ ..=MOST_LEAVES => format!("; a new run with --leaves {enough} gives each a part"),
                _ => String::new(),
            };
            log::warn!(
                "{} of {num_ranks} ranks that share layers have no part of linear layers, because the sums \
                 of these are divided into {num_leaves} leaves at most{advice}",
                num_ranks - num_leaves
            );
        }
        let plan = ParallelPlan { summation, ..self.plan.clone() };
        let (num_replicas, num_micro_batches) = (self.grid.shape.data, plan.schedule.num_micro_batches);
        let division = self.options.sync_settings().division(&plan, num_replicas);
        let num_rows = |replica| division.sections(num_leaves, replica).map(Section::len).sum();
        let num_rows: Vec<usize> = (0..num_replicas).map(num_rows).collect();
        let num_idle = num_rows.iter().filter(|num| **num == 0).count();
        let num_shares = num_replicas * if division.reduces_each() { num_micro_batches } else { 1 };
        let even = num_shares * num_leaves.div_ceil(num_shares).next_power_of_two();
        let advice = match even {
            ..=MOST_LEAVES => format!("; --leaves {even} divides it better in a new run"),
            _ => String::new(),
        };
        if num_idle > 0 && self.world.is_root() {
            log::warn!(
                "{num_idle} of {num_replicas} replicas have no rows, because a batch has {num_leaves} \
                 leaves{advice}"
            );
        } else if division.reduces_each() && num_shares > num_leaves {
            log::info!(
                "{num_replicas} replicas with {num_micro_batches} micro-batches each share the {num_leaves} \
                 leaves of a batch, so some micro-batches of a replica have no rows, and --accumulate parts \
                 saves less memory{advice}"
            );
        } else if num_rows.iter().any(|num| *num != num_rows[0]) {
            log::info!(
                "{num_replicas} replicas share the {num_leaves} leaves of a batch, so some have more rows \
                 than others{advice}"
            );
        }
    }
}
