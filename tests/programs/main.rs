//! The programs under `mpiexec`, as a user starts them: results, options, agreement between ranks,
//! how a run is stopped, and the use of trained networks.

mod agreement;
mod networks;
mod one_hash;
mod predictions;
mod results;
mod stopping;
mod strategies;
#[path = "../support/mod.rs"]
mod support;
mod texts;
