//! Cases of the target `collectives`.

pub mod algorithms;
