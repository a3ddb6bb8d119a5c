//! Phalanx
mod error;
pub mod comm;
pub mod dataset;
pub mod device;
pub mod nn;
pub mod optim;
pub mod parallel;
pub use error::{Error, Result};
