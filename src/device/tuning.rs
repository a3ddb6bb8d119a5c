//! Matrix products tuned by measuring: [`TuningOperations`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Result;

/// The algorithm that was measured to be the fastest for a matrix product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedProduct {
    /// The library's description of the algorithm.
    pub algorithm: String,
    /// The time of the product, in microseconds.
    pub microseconds: f64,
    /// The time with the algorithm that the library names first.
    pub microseconds_of_first: f64,
    /// The number of algorithms that were measured.
    pub num_measured: usize,
}

/// Tuned products by their names, which contain the device, the library and everything else on which the
/// choice depends.
pub type ProductTable = BTreeMap<String, TunedProduct>;

/// The choice of algorithms for matrix products. Products are not named by users: a device keeps the list of
/// those that it was asked for.
///
/// The default methods are for a device that has one algorithm for each product.
pub trait TuningOperations {
    /// Uses the algorithms of `table` from now on; for products that it lacks, the library's first choice.
    fn use_products(&self, _table: &ProductTable) {}

    /// Returns the names of the products so far that were not in the table.
    fn untuned_products(&self) -> Vec<String> {
        Vec::new()
    }

    /// Measures the algorithms for one of these products, and waits for the device. Returns `None` if there
    /// is no such product, or it cannot be measured, for instance for want of memory.
    ///
    /// # Errors
    /// The device fails.
    fn tune_product(&self, _name: &str) -> Result<Option<TunedProduct>> {
        Ok(None)
    }
}
