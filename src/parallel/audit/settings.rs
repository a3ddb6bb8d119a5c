//! The settings of audits.

use clap::ValueEnum;

use crate::parallel::watch::Fault;

/// The settings of the audits of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditSettings {
    /// The number of steps from an audit to the next.
    pub every: u64,
    /// The consequence of a fault that an audit finds.
    pub action: AuditAction,
    /// A bit to flip.
    pub fault: Option<Fault>,
}

/// The consequence of a fault that an audit finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AuditAction {
    /// The job ends; its last checkpoint is from before the step
    Stop,
    /// A warning in the log
    Warn,
}
