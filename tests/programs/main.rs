//! The programs under `mpiexec`, as a user starts them: results, options, agreement between ranks,
//! and how a run is stopped.

mod agreement;
mod networks;
mod one_hash;
mod predictions;
mod results;
mod stopping;
mod strategies;
#[path = "../support/mod.rs"]
mod support;
