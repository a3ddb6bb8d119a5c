//! The options of audits.

use clap::Args;

use super::given::Given;
use crate::parallel::audit::{AuditAction, AuditSettings};
use crate::parallel::watch::Fault;
use crate::{Error, Result};

/// The options of audits, in which ranks repeat work of each other and compare the bits.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub struct AuditOptions {
    /// Steps between audits, in which every rank repeats one leaf of another rank's batch, forward and
    /// backward, and a part of its update, and compares the bits; 0 for none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub audit: u64,

    /// Consequence of a fault that an audit finds
    #[arg(long, value_enum, default_value = "stop")]
    pub audit_action: AuditAction,

    /// Flip a bit, to test --audit: KIND:RANK:STEP, optionally followed by :stuck, :NUMBER or both. KIND is
    /// product, weight, gradient, update, message or received; STEP counts from 1 and must be audited,
    /// unless :stuck is given, which repeats the fault in all later steps; NUMBER chooses the bit
    /// [default: none]
    #[arg(long, value_name = "FAULT")]
    pub inject_fault: Option<Fault>,
}

impl AuditOptions {
    /// Returns the settings of audits, if there are any.
    pub fn settings(&self) -> Option<AuditSettings> {
        let AuditOptions { audit: every, audit_action: action, inject_fault: fault } = *self;
        (every > 0).then_some(AuditSettings { every, action, fault })
    }

    /// Checks that the fault to be injected can happen in a job of `num_ranks`. Not collective.
    ///
    /// # Errors
    /// There is no such rank, or the step is not audited.
    pub(super) fn check(&self, num_ranks: usize) -> Result<()> {
        let Some(Fault { rank, step, is_stuck, .. }) = self.inject_fault.filter(|_| self.audit > 0) else {
            return Ok(());
        };
        let fail = |why| Err(Error::input("--inject-fault", why));
        if rank >= num_ranks {
            return fail(format!("there is no rank {rank} in a job of {num_ranks}"));
        }
        if step == 0 || !is_stuck && !step.is_multiple_of(self.audit) {
            return fail(format!(
                "step {step} is not audited; with --audit {0}, the multiples of {0} are",
                self.audit
            ));
        }
        Ok(())
    }

    /// Refuses options that have no effect in this run; `on_gpu` says why none has. Not collective.
    pub(super) fn check_used(&self, given: &Given, on_gpu: Option<&str>) -> Result<()> {
        let without = (self.audit == 0).then_some("it is for --audit");
        given.refuse("audit", on_gpu.filter(|_| self.audit > 0))?;
        given.refuse("audit-action", without)?;
        given.refuse("inject-fault", without)
    }
}
