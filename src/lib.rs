//! Phalanx
mod error;
pub mod comm;
pub mod device;
pub mod nn;
pub use error::{Error, Result};
