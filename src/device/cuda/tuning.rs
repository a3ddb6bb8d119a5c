//! The choice of algorithms for matrix products by measuring.

use super::runtime::gpu::Cuda;
use crate::Result;
use crate::device::{ProductTable, TunedProduct, TuningOperations};

impl TuningOperations for Cuda {
    fn use_products(&self, table: &ProductTable) {
        self.cublaslt.use_products(table);
    }

    fn untuned_products(&self) -> Vec<String> {
        self.cublaslt.untuned_products()
    }

    fn tune_product(&self, name: &str) -> Result<Option<TunedProduct>> {
        self.cublaslt.tune_product(&self.streams, name)
    }
}
