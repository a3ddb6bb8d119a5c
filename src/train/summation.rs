//! The choice of the order of sums that a run's ranks share.

use super::job::Run;
use super::resume::Start;
use crate::parallel::batch::Summation;
use crate::parallel::layout::ParallelPlan;
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
            _ if !on_host => self.by_layout("a GPU sums in orders of its own"),
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

    fn by_layout(&self, why: &str) -> Result<Summation> {
        if let Some(given) = self.options.leaves {
            let why = format!("it has no effect, because {why}; leave it out");
            return Err(Error::input(format!("--leaves {given}"), why));
        }
        log::info!("the last bits of the result depend on the layout, because {why}");
        Ok(Summation::ByLayout)
    }

    fn canonical(&self, before: Option<usize>, given: Option<usize>) -> Result<Summation> {
        let (shape, num_micro_batches) = (self.grid.shape, self.plan.schedule.num_micro_batches);
        let reduces_each = self.options.sync_settings().reduces_each(shape.data, num_micro_batches);
        let given = before.or(given);
        let summation = Summation::canonical(given, shape, num_micro_batches, reduces_each)?;
        match summation {
            Summation::ByLayout => self.by_layout("there are more ranks than a sum can have leaves"),
            Summation::Canonical { num_leaves } => {
                log::info!(
                    "the bits of the result are the same in every layout: sums of {num_leaves} leaves"
                );
                self.remark(num_leaves, summation);
                Ok(summation)
            }
        }
    }

    /// Says so if some ranks have more rows of a batch than others, or none.
    fn remark(&self, num_leaves: usize, summation: Summation) {
        let (data, schedule) = (self.grid.shape.data, &self.plan.schedule);
        let division =
            self.options.sync_settings().division(&ParallelPlan { summation, ..self.plan.clone() }, data);
        let has_rows = |replica| {
            (0..schedule.num_micro_batches)
                .any(|number| !division.section(num_leaves, replica, number).is_empty())
        };
        let num_idle = (0..data).filter(|replica| !has_rows(*replica)).count();
        if num_idle > 0 && self.world.is_root() {
            log::warn!(
                "{num_idle} of {data} replicas have no rows, because a batch has {num_leaves} leaves; a new \
                 run may have others (--leaves)"
            );
        } else if !num_leaves.is_multiple_of(data) {
            let even = data * num_leaves.div_ceil(data).next_power_of_two();
            log::info!(
                "{data} replicas share the {num_leaves} leaves of a batch, so some have more rows \
                 than others; --leaves {even} would divide them evenly in a new run"
            );
        }
    }
}
