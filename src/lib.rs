//! Phalanx
mod error;
pub mod app;
pub mod comm;
pub mod dataset;
pub mod device;
pub mod nn;
pub mod optim;
pub mod parallel;
pub mod train;
pub use error::{Error, Result};
