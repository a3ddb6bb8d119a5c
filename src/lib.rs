//! Phalanx
mod error;
pub mod comm;
pub mod device;
pub use error::{Error, Result};
