//! Matrix products by cuBLASLt, with the bias and activation of a layer in the same pass if
//! possible.
//!
//! cuBLASLt's matrices are column-major: a row-major `[rows, columns]` is `columns × rows` there,
//! so a layer's y = x · Wᵀ is computed as yᵀ = W · xᵀ. The algorithm for a product is asked for
//! once for each shape and kept.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cudaDataType_t,
};

use super::format::{Format, Precision};
use super::memory::DeviceMemory;
use super::streams::Streams;
use crate::{Error, Result};

/// NVIDIA's recommendation for Hopper; smaller devices need less.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A matrix, or its transpose.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) pointer: u64,
    pub(crate) format: Format,
    pub(crate) transposed: bool,
}

/// Addition and function that are applied to a product in the same pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epilogue {
    /// Vector that is added to every column; 0 for none.
    pub(crate) bias: u64,
    pub(crate) function: EpilogueFunction,
}

/// The array that an epilogue saves must have rows of a multiple of this many values:
/// `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`.
pub(crate) const AUXILIARY_MULTIPLE: usize = 8;

/// The function at the end of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum EpilogueFunction {
    Identity,
    Relu,
    /// GELU, which saves its arguments.
    Gelu {
        saved: u64,
    },
    /// Multiplication with the derivative of GELU, whose arguments are saved.
    GeluBackward {
        saved: u64,
    },
}

impl Epilogue {
    pub(crate) const NONE: Epilogue = Epilogue { bias: 0, function: EpilogueFunction::Identity };

    fn kind(self) -> cublasLtEpilogue_t {
        match (self.function, self.bias != 0) {
            (EpilogueFunction::Identity, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (EpilogueFunction::Identity, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (EpilogueFunction::Relu, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU,
            (EpilogueFunction::Relu, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
            (EpilogueFunction::Gelu { .. }, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            (EpilogueFunction::Gelu { .. }, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            (EpilogueFunction::GeluBackward { .. }, _) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    /// Returns the address of the saved array; 0 if there is none.
    fn auxiliary(self) -> u64 {
        match self.function {
            EpilogueFunction::Identity | EpilogueFunction::Relu => 0,
            EpilogueFunction::Gelu { saved } | EpilogueFunction::GeluBackward { saved } => saved,
        }
    }

    /// # Safety
    /// `desc` has been created and not destroyed.
    unsafe fn set_pointers(self, desc: sys::cublasLtMatmulDesc_t) -> std::result::Result<(), CublasError> {
        let pointers = [
            (DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, self.bias),
            (DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, self.auxiliary()),
        ];
        pointers.iter().filter(|(_, pointer)| *pointer != 0).try_for_each(|(attribute, pointer)| {
            // SAFETY: this function's caller guarantees that `desc` exists; both attributes are
            // pointers.
            unsafe { set_desc(desc, *attribute, pointer) }
        })
    }
}

/// The matrix that a product is written to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProductOutput {
    pub(crate) pointer: u64,
    pub(crate) format: Format,
}

/// A product `output = left · right`, added to `output` if `accumulate`, followed by the epilogue.
/// All matrices are column-major; `size` is `[m, n, k]`, `left` is `m × k`, `right` is `k × n`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub(crate) size: [usize; 3],
    pub(crate) left: Operand,
    pub(crate) right: Operand,
    pub(crate) output: ProductOutput,
    pub(crate) accumulate: bool,
    pub(crate) epilogue: Epilogue,
}

/// Properties of a product on which its algorithm depends.
#[derive(PartialEq, Eq, Hash)]
struct ProductKey {
    size: [usize; 3],
    formats: [Format; 3],
    transposed: [bool; 2],
    epilogue: cublasLtEpilogue_t,
    accumulate: bool,
    /// The alignments of the operands, the output and the array that the epilogue reads or saves.
    alignments: [u32; 4],
}

/// Descriptions and algorithm of a product.
struct ProductPlan {
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt, with the algorithms that it has chosen so far.
pub(crate) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    precision: Precision,
    /// `None` for products that cuBLASLt does not support.
    plans: RefCell<HashMap<ProductKey, Option<ProductPlan>>>,
}

impl CublasLt {
    pub(crate) fn new(streams: &Rc<Streams>, precision: Precision) -> Result<CublasLt> {
        let workspace = DeviceMemory::new(streams, WORKSPACE_BYTES / 4, Format::F32)?;
        let handle = result::create_handle().map_err(|error| failed("starting cuBLASLt", error))?;
        Ok(CublasLt { handle, workspace, precision, plans: RefCell::default() })
    }

    /// Starts a product in the compute stream. Returns false if cuBLASLt does not support it.
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

    fn try_multiply(&self, streams: &Streams, product: &Product) -> std::result::Result<bool, CublasError> {
        let mut plans = self.plans.borrow_mut();
        let key = ProductKey::of(product);
        if !plans.contains_key(&key) {
            let plan = match self.plan(product, &key) {
                Err(error) if is_refusal(product, error) => None,
                found => Some(found?),
            };
            plans.insert(ProductKey::of(product), plan);
        }
        let Some(plan) = &plans[&key] else { return Ok(false) };
        let (one, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let device = |pointer: u64| pointer as *mut c_void;
        streams.count(|counters| counters.launches += 1);
        // SAFETY: the plan's descriptions are of matrices like these, whose memory the callers have
        // checked to be long enough; freeing device memory waits for all work of the device. The
        // address of the bias is read when the product is started.
        unsafe {
            product.epilogue.set_pointers(plan.desc)?;
            result::matmul(
                self.handle,
                plan.desc,
                scalar(&one),
                scalar(&beta),
                device(product.left.pointer),
                plan.layouts[0],
                device(product.right.pointer),
                plan.layouts[1],
                device(product.output.pointer),
                plan.layouts[2],
                device(product.output.pointer),
                plan.layouts[2],
                &raw const plan.algorithm,
                device(self.workspace.pointer()),
                WORKSPACE_BYTES,
                streams.compute.cu_stream().cast(),
            )?;
        }
        Ok(true)
    }

    fn plan(&self, product: &Product, key: &ProductKey) -> std::result::Result<ProductPlan, CublasError> {
        let [m, n, k] = product.size;
        let compute = match self.precision {
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            Precision::F32 | Precision::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let layout = |format, rows: usize, columns: usize| {
            result::create_matrix_layout(data_type(format), rows as u64, columns as u64, rows as i64)
        };
        let operand = |operand: &Operand, rows, columns| {
            if operand.transposed {
                layout(operand.format, columns, rows)
            } else {
                layout(operand.format, rows, columns)
            }
        };
        let layouts = [
            operand(&product.left, m, k)?,
            operand(&product.right, k, n)?,
            layout(product.output.format, m, n)?,
        ];
        let desc = result::create_matmul_desc(compute, cudaDataType_t::CUDA_R_32F)?;
        let preference = result::create_matmul_pref()?;
        // SAFETY: all descriptions were created above; each attribute is set to a value of its
        // type.
        unsafe {
            let transposition = |transposed: bool| i32::from(transposed);
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA,
                &transposition(product.left.transposed),
            )?;
            set_desc(
                desc,
                DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB,
                &transposition(product.right.transposed),
            )?;
            set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &key.epilogue)?;
            product.epilogue.set_pointers(desc)?;
            if product.epilogue.auxiliary() != 0 {
                set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(m as i64))?;
            }
            let workspace = WORKSPACE_BYTES as u64;
            set_preference(
                preference,
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                &workspace,
            )?;
            let [a, b, c, _] = key.alignments;
            for (attribute, alignment) in [
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a),
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b),
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            ] {
                set_preference(preference, attribute, &alignment)?;
            }
            let [a, b, c] = layouts;
            let found = result::get_matmul_algo_heuristic(self.handle, desc, a, b, c, c, preference);
            result::destroy_matmul_pref(preference)?;
            Ok(ProductPlan { desc, layouts, algorithm: found?.algo })
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: each object was created by `new` or `plan` and is destroyed once, here. Errors
        // cannot be returned from `drop`.
        unsafe {
            for plan in self.plans.borrow().values().flatten() {
                let _ = result::destroy_matmul_desc(plan.desc);
                for layout in plan.layouts {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}

impl ProductKey {
    fn of(product: &Product) -> ProductKey {
        let Product { size, left, right, output, accumulate, epilogue } = *product;
        // alignments above 16 bytes make no difference, so they must not select another algorithm,
        // which might sum in another order
        let alignment = |pointer: u64| 1 << pointer.trailing_zeros().min(4);
        ProductKey {
            size,
            formats: [left.format, right.format, output.format],
            transposed: [left.transposed, right.transposed],
            epilogue: epilogue.kind(),
            accumulate,
            alignments: [left.pointer, right.pointer, output.pointer, epilogue.auxiliary()].map(alignment),
        }
    }
}

fn data_type(format: Format) -> cudaDataType_t {
    match format {
        Format::F32 => cudaDataType_t::CUDA_R_32F,
        Format::Bf16 => cudaDataType_t::CUDA_R_16BF,
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

/// # Safety
/// `desc` exists, and the attribute is of type `T`.
unsafe fn set_desc<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attribute: DescAttribute,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: this function's caller guarantees the description and the type; the value is copied.
    unsafe {
        result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}

/// # Safety
/// `preference` exists, and the attribute is of type `T`.
unsafe fn set_preference<T>(
    preference: sys::cublasLtMatmulPreference_t,
    attribute: PreferenceAttribute,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: this function's caller guarantees the preference and the type; the value is copied.
    unsafe {
        result::set_matmul_pref_attribute(
            preference,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}
