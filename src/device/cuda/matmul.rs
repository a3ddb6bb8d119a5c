//! Matrix products, by cuBLASLt, with the bias and ReLU of a layer in the same pass where there are some.
//!
//! cuBLASLt's matrices are column-major: what is `[rows, columns]` here is `columns × rows` there, so a layer's y = x · Wᵀ is computed as
//! yᵀ = W · xᵀ. How a product is best done is asked once for each shape and kept.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cudaDataType_t,
};

use super::Precision;
use super::memory::{DeviceMemory, Format};
use super::shared::Shared;
use crate::{Error, Result};

/// What NVIDIA recommends for Hopper; smaller devices need less.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A matrix, or its transpose.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    pub(super) pointer: u64,
    pub(super) format: Format,
    pub(super) transposed: bool,
}

/// What follows a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Epilogue {
    /// Added to every column; 0 for none.
    pub(super) bias: u64,
    pub(super) relu: bool,
}

impl Epilogue {
    /// Nothing.
    pub(super) const NONE: Epilogue = Epilogue { bias: 0, relu: false };
}

/// result = (result +) left · right, all column-major, followed by the epilogue; `left` is `m × k`, `right` `k × n`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) size: [usize; 3],
    pub(super) left: Operand,
    pub(super) right: Operand,
    pub(super) result: (u64, Format),
    pub(super) accumulate: bool,
    pub(super) epilogue: Epilogue,
}

/// Products that are computed in the same way.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    size: [usize; 3],
    formats: [Format; 3],
    transposed: [bool; 2],
    has_bias: bool,
    relu: bool,
    accumulate: bool,
    alignments: [u32; 3],
}

/// How.
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library and what it has been asked so far.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    precision: Precision,
    plans: RefCell<HashMap<Key, Plan>>,
}

impl Products {
    pub(super) fn new(shared: &Rc<Shared>, precision: Precision) -> Result<Products> {
        let workspace = DeviceMemory::new(shared, WORKSPACE_BYTES / 4, Format::F32)?;
        let handle = result::create_handle().map_err(|error| failed("starting cuBLASLt", error))?;
        Ok(Products { handle, workspace, precision, plans: RefCell::default() })
    }

    /// Starts a product in the computing stream.
    pub(super) fn multiply(&self, shared: &Shared, product: &Product) {
        let [m, n, k] = product.size;
        if let Err(error) = self.try_multiply(shared, product) {
            shared.fail(&format!("multiplying {m} × {k} by {k} × {n}"), format!("cuBLASLt says {error}"));
        }
    }

    fn try_multiply(&self, shared: &Shared, product: &Product) -> std::result::Result<(), CublasError> {
        let mut plans = self.plans.borrow_mut();
        let key = Key::of(product);
        if !plans.contains_key(&key) {
            let plan = self.plan(product, &key)?;
            plans.insert(Key::of(product), plan);
        }
        let plan = &plans[&key];
        let (one, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let device = |pointer: u64| pointer as *mut c_void;
        shared.count(|counters| counters.launches += 1);
        // SAFETY: the plan's descriptions are of these operands; the pointers are to memory of their lengths, which is freed only
        // after the stream has been waited for; the bias's address is read when the product is started.
        unsafe {
            if product.epilogue.bias != 0 {
                let attribute = DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                set_desc(plan.desc, attribute, &product.epilogue.bias)?;
            }
            result::matmul(
                self.handle,
                plan.desc,
                scalar(&one),
                scalar(&beta),
                device(product.left.pointer),
                plan.layouts[0],
                device(product.right.pointer),
                plan.layouts[1],
                device(product.result.0),
                plan.layouts[2],
                device(product.result.0),
                plan.layouts[2],
                &raw const plan.algorithm,
                device(self.workspace.pointer()),
                WORKSPACE_BYTES,
                shared.compute.cu_stream().cast(),
            )
        }
    }

    fn plan(&self, product: &Product, key: &Key) -> std::result::Result<Plan, CublasError> {
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
        let layouts =
            [operand(&product.left, m, k)?, operand(&product.right, k, n)?, layout(product.result.1, m, n)?];
        let desc = result::create_matmul_desc(compute, cudaDataType_t::CUDA_R_32F)?;
        let preference = result::create_matmul_pref()?;
        let epilogue = match (key.has_bias, key.relu) {
            (false, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (false, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU,
            (true, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (true, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
        };
        // SAFETY: all descriptions were made here; each attribute is given as a value of its type.
        unsafe {
            let transposition = |transposed: bool| i32::from(transposed);
            set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposition(product.left.transposed))?;
            set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposition(product.right.transposed))?;
            set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if key.has_bias {
                set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.epilogue.bias)?;
            }
            let workspace = WORKSPACE_BYTES as u64;
            set_preference(preference, PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
            let [a, b, c] = key.alignments;
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
            Ok(Plan { desc, layouts, algorithm: found?.algo })
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: each was made here and is destroyed once; an error here has nobody to go to.
        unsafe {
            for plan in self.plans.borrow().values() {
                let _ = result::destroy_matmul_desc(plan.desc);
                for layout in plan.layouts {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}

impl Key {
    fn of(product: &Product) -> Key {
        let Product { size, left, right, result, accumulate, epilogue } = *product;
        // more than 256 bytes make no difference to the library
        let alignment = |pointer: u64| 1 << pointer.trailing_zeros().min(8);
        Key {
            size,
            formats: [left.format, right.format, result.1],
            transposed: [left.transposed, right.transposed],
            has_bias: epilogue.bias != 0,
            relu: epilogue.relu,
            accumulate,
            alignments: [alignment(left.pointer), alignment(right.pointer), alignment(result.0)],
        }
    }
}

fn data_type(format: Format) -> cudaDataType_t {
    match format {
        Format::F32 => cudaDataType_t::CUDA_R_32F,
        Format::Bf16 => cudaDataType_t::CUDA_R_16BF,
    }
}

fn failed(doing: &str, error: CublasError) -> Error {
    Error::failed(doing, format!("cuBLASLt says {error}"))
}

/// # Safety
/// The attribute is of type `T`.
unsafe fn set_desc<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attribute: DescAttribute,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise; the value is copied.
    unsafe { result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// # Safety
/// The attribute is of type `T`.
unsafe fn set_preference<T>(
    preference: sys::cublasLtMatmulPreference_t,
    attribute: PreferenceAttribute,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise; the value is copied.
    unsafe {
        result::set_matmul_pref_attribute(preference, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}
