//! The audits of a trainer's steps: see [`crate::parallel::audit`].

use super::Trainer;
use crate::dataset::Batches;
use crate::device::Device;
use crate::nn::Draws;
use crate::parallel::audit::{AuditAction, AuditSettings, AuditedBatch, Auditor};
use crate::parallel::data::SyncSettings;
use crate::parallel::layout::ParallelPlan;
use crate::parallel::watch::Fault;
use crate::train::feed::read_rows;
use crate::{Error, Result};

impl<'a, D: Device> Trainer<'a, D> {
    /// Audits steps from now on, with the `plan`, the sums and the largest batch with which this trainer
    /// was made, and logs what is repeated. Collective.
    ///
    /// # Errors
    /// The bits of sums depend on the layout, or the device does not have enough memory: the same error
    /// on every rank.
    pub fn audit(
        &mut self,
        plan: &ParallelPlan,
        sync: SyncSettings,
        batch_size: usize,
        settings: AuditSettings,
    ) -> Result<()> {
        let in_parts = self.weights.has_parameters_in_parts();
        let (device, grid, model) = (self.device, self.grid, self.model);
        let auditor = Auditor::new(device, grid, model, plan, sync, in_parts, batch_size, settings)?;
        log::info!("audits: {}", auditor.words());
        self.auditor = Some(auditor);
        Ok(())
    }

    /// Sets the fault with which audits are tried out. Not collective, but all ranks must set the same.
    #[doc(hidden)]
    pub fn inject(&mut self, fault: Option<Fault>) {
        self.auditor.iter_mut().for_each(|auditor| auditor.inject(fault));
    }

    /// Prepares step `step`, from 0, for its audit, if one is due. Collective.
    pub(super) fn before_audited(&mut self, step: u64, batches: &mut Batches, scale: f32) -> Result<()> {
        let Trainer { auditor, weights, pipeline, seed, .. } = self;
        let Some(auditor) = auditor.as_mut().filter(|auditor| auditor.is_due(step + 1)) else {
            return Ok(());
        };
        let draws = Draws { seed: *seed, step: step as u32, first_row: 0 };
        let batch = AuditedBatch { len: batches.sampler().batch_len(step), scale, draws };
        auditor.before(step + 1, weights, pipeline, batch, &mut |device: &D, rows, inputs, targets| {
            read_rows(device, batches, step, rows, inputs, targets)
        })
    }

    /// Ends the audit of step `step`, from 0, if there is one. Collective.
    ///
    /// # Errors
    /// A fault was found and is to end the job: the same error on every rank.
    pub(super) fn after_audited(&mut self, step: u64, batches: &mut Batches) -> Result<()> {
        let Trainer { auditor, weights, pipeline, grid, .. } = self;
        let Some(auditor) = auditor.as_mut().filter(|auditor| auditor.is_due(step + 1)) else {
            return Ok(());
        };
        let found =
            auditor.after(step + 1, weights, pipeline, &mut |device: &D, rows, inputs, targets| {
                read_rows(device, batches, step, rows, inputs, targets)
            })?;
        match (found, auditor.action()) {
            (None, _) => Ok(()),
            (Some(message), AuditAction::Stop) => Err(Error::Agreed { message, exit_code: 1 }),
            (Some(message), AuditAction::Warn) => {
                if grid.all.is_root() {
                    log::warn!("{message}");
                }
                Ok(())
            }
        }
    }
}
