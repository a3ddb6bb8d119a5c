//! Matrix products by cuBLASLt, with the bias and activation of a layer in the same pass if
//! possible.
//!
//! cuBLASLt's matrices are column-major: a row-major `[rows, columns]` is `columns × rows` there,
//! so a layer's y = x · Wᵀ is computed as yᵀ = W · xᵀ. The algorithm for a product is looked up in the
//! table of tuned products, or else asked for, once for each shape, and kept.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtEpilogue_t};

use super::described::{AlgorithmPreference, CublasResult, Described};
use super::format::{Format, Precision};
use super::memory::DeviceMemory;
use super::product::{Product, ProductKey, decode};
use super::streams::Streams;
use crate::device::ProductTable;
use crate::{Error, Result};

/// NVIDIA's recommendation for Hopper; smaller devices need less.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The place of an algorithm that is still to be found.
const NOTHING_FOUND: sys::cublasLtMatmulHeuristicResult_t = sys::cublasLtMatmulHeuristicResult_t {
    algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// Descriptions and algorithm of a product.
pub(super) struct ProductPlan {
    pub(super) described: Described,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// True if the algorithm is that of the table of tuned products.
    pub(super) is_tuned: bool,
}

/// cuBLASLt, with the algorithms that were chosen so far.
pub(crate) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    /// Memory of algorithms.
    workspace: DeviceMemory,
    precision: Precision,
    /// The beginning of the names of products: the device, the library and the precision.
    place: String,
    /// `None` for products that cuBLASLt does not support.
    pub(super) plans: RefCell<HashMap<ProductKey, Option<ProductPlan>>>,
    pub(super) tuned: RefCell<ProductTable>,
}

impl CublasLt {
    pub(crate) fn new(streams: &Rc<Streams>, precision: Precision) -> Result<CublasLt> {
        let workspace = DeviceMemory::new(streams, WORKSPACE_BYTES / 4, Format::F32)?;
        let handle = result::create_handle().map_err(|error| failed("starting cuBLASLt", error))?;
        // SAFETY: the library has been loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        let place = format!("{}, cuBLASLt {version}, {precision:?}", streams.name).to_lowercase();
        let (plans, tuned) = (RefCell::default(), RefCell::default());
        Ok(CublasLt { handle, workspace, precision, place, plans, tuned })
    }

    /// Returns the name of a product in the table of tuned products.
    pub(super) fn name_of(&self, key: &ProductKey) -> String {
        format!("{}: {key}", self.place)
    }

    /// Starts a product in its stream. Returns false if cuBLASLt does not support it.
    pub(crate) fn multiply(&self, streams: &Streams, product: &Product) -> bool {
        match self.try_multiply(streams, product) {
            Ok(done) => done,
            Err(error) => {
                fail(streams, product, &format!("cuBLASLt says {error}"));
                true
            }
        }
    }

    /// Starts a product that cuBLASLt must support.
    pub(crate) fn must_multiply(&self, streams: &Streams, product: &Product) {
        if !self.multiply(streams, product) {
            fail(streams, product, "cuBLASLt does not support it");
        }
    }

    fn try_multiply(&self, streams: &Streams, product: &Product) -> CublasResult<bool> {
        let mut plans = self.plans.borrow_mut();
        let key = ProductKey::of(product);
        let plan = match plans.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(match self.plan(product, &key) {
                Err(error) if is_refusal(product, error) => None,
                found => Some(found?),
            }),
        };
        let Some(plan) = plan else { return Ok(false) };
        self.start(streams, product, &plan.described, &plan.algorithm)?;
        Ok(true)
    }

    /// Starts a product with an algorithm.
    pub(super) fn start(
        &self,
        streams: &Streams,
        product: &Product,
        described: &Described,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> CublasResult<()> {
        let (one, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let device = |pointer: u64| pointer as *mut c_void;
        let (desc, [left, right, output]) = described.handles();
        streams.count(|counters| counters.launches += 1);
        described.set_pointers(product.epilogue)?;
        // SAFETY: the descriptions are of matrices like these, whose memory the callers have
        // checked to be long enough; the algorithm is cuBLASLt's own, or one that it has accepted;
        // freeing device memory waits for all work of the device. The address of the bias is read when
        // the product is started.
        unsafe {
            result::matmul(
                self.handle,
                desc,
                scalar(&one),
                scalar(&beta),
                device(product.left.pointer),
                left,
                device(product.right.pointer),
                right,
                device(product.output.pointer),
                output,
                device(product.output.pointer),
                output,
                std::ptr::from_ref(algorithm),
                device(self.workspace.pointer()),
                WORKSPACE_BYTES,
                streams.compute.cu_stream().cast(),
            )
        }
    }

    fn plan(&self, product: &Product, key: &ProductKey) -> CublasResult<ProductPlan> {
        let described = Described::new(product, key, self.precision)?;
        if let Some(algorithm) = self.tuned_algorithm(&described, key) {
            return Ok(ProductPlan { described, algorithm, is_tuned: true });
        }
        let algorithm = self.algorithms::<1>(&described, key)?[0];
        Ok(ProductPlan { described, algorithm, is_tuned: false })
    }

    /// Returns the algorithm of the table for a product, if it has one that can form it.
    fn tuned_algorithm(&self, described: &Described, key: &ProductKey) -> Option<sys::cublasLtMatmulAlgo_t> {
        let table = self.tuned.borrow();
        if table.is_empty() {
            return None;
        }
        let algorithm = decode(&table.get(&self.name_of(key))?.algorithm)?;
        self.accepts(described, &algorithm).then_some(algorithm)
    }

    /// Returns up to `MOST` algorithms for a product, the one first that cuBLASLt expects to be the fastest.
    pub(super) fn algorithms<const MOST: usize>(
        &self,
        described: &Described,
        key: &ProductKey,
    ) -> CublasResult<Vec<sys::cublasLtMatmulAlgo_t>> {
        let (desc, [a, b, c]) = described.handles();
        let preference = AlgorithmPreference::new(key, WORKSPACE_BYTES)?;
        let mut found = [NOTHING_FOUND; MOST];
        let mut num_found = 0;
        // SAFETY: all descriptions exist; there is room for as many algorithms as are asked for.
        let outcome = unsafe {
            let (found, num_found) = (found.as_mut_ptr(), &raw mut num_found);
            let most = MOST as i32;
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc,
                a,
                b,
                c,
                c,
                preference.handle(),
                most,
                found,
                num_found,
            )
        };
        outcome.result()?;
        let usable = found.iter().take(num_found.max(0) as usize);
        let usable: Vec<_> = usable
            .filter(|found| found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS)
            .map(|found| found.algo)
            .collect();
        if usable.is_empty() {
            return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        }
        Ok(usable)
    }

    /// Returns true if an algorithm can form a product.
    pub(super) fn accepts(&self, described: &Described, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let (desc, [a, b, c]) = described.handles();
        let mut found = NOTHING_FOUND;
        // SAFETY: all descriptions exist, and there is room for the result. The algorithm may be any bits:
        // cuBLASLt has this function to check those that a program has put together.
        let outcome =
            unsafe { sys::cublasLtMatmulAlgoCheck(self.handle, desc, a, b, c, c, algorithm, &raw mut found) };
        outcome.result().is_ok() && found.workspaceSize <= WORKSPACE_BYTES
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: the handle was created by `new` and is destroyed once, here. An error cannot be returned
        // from `drop`.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Returns true if an error says that cuBLASLt does not support a product, or not with its
/// epilogue.
fn is_refusal(product: &Product, error: CublasError) -> bool {
    let has_epilogue = product.epilogue.kind() != cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT;
    match error.0 {
        sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => true,
        sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE => has_epilogue,
        _ => false,
    }
}

fn fail(streams: &Streams, product: &Product, why: &str) {
    let [m, n, k] = product.size;
    streams.fail(&format!("multiplying {m} × {k} by {k} × {n}"), why);
}

fn failed(doing: &str, error: CublasError) -> Error {
    Error::failed(doing, format!("cuBLASLt says {error}"))
}
