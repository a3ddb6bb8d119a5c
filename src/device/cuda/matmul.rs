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

/// What follows a product in the same pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epilogue {
    /// Added to every column; 0 for none.
    pub(super) bias: u64,
    pub(super) follow: Follow,
}

/// What an epilogue saves has rows of a multiple of this many values: `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`.
pub(super) const AUXILIARY_MULTIPLE: usize = 8;

/// The function at the end of a product.
#[derive(Debug, Clone, Copy)]
pub(super) enum Follow {
    Nothing,
    Relu,
    /// GELU, with its argument left in `saves`.
    Gelu {
        saves: u64,
    },
    /// Times the derivative of GELU where its argument is in `saved`.
    GeluBackward {
        saved: u64,
    },
}

impl Epilogue {
    /// Nothing.
    pub(super) const NONE: Epilogue = Epilogue { bias: 0, follow: Follow::Nothing };

    /// The library's name for it.
    fn kind(self) -> cublasLtEpilogue_t {
        match (self.follow, self.bias != 0) {
            (Follow::Nothing, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (Follow::Nothing, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (Follow::Relu, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU,
            (Follow::Relu, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
            (Follow::Gelu { .. }, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            (Follow::Gelu { .. }, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            (Follow::GeluBackward { .. }, _) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }

    /// What it saves or has saved; 0 for nothing.
    fn auxiliary(self) -> u64 {
        match self.follow {
            Follow::Nothing | Follow::Relu => 0,
            Follow::Gelu { saves: pointer } | Follow::GeluBackward { saved: pointer } => pointer,
        }
    }

    /// # Safety
    /// `desc` is there.
    unsafe fn set_pointers(self, desc: sys::cublasLtMatmulDesc_t) -> std::result::Result<(), CublasError> {
        let pointers = [
            (DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, self.bias),
            (DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, self.auxiliary()),
        ];
        pointers.iter().filter(|(_, pointer)| *pointer != 0).try_for_each(|(attribute, pointer)| {
            // SAFETY: the caller's promise; both attributes are pointers.
            unsafe { set_desc(desc, *attribute, pointer) }
        })
    }
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
    epilogue: cublasLtEpilogue_t,
    accumulate: bool,
    /// Of the operands, the result and what the epilogue reads or saves.
    alignments: [u32; 4],
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
    /// Nothing for those that the library cannot do.
    plans: RefCell<HashMap<Key, Option<Plan>>>,
}

impl Products {
    pub(super) fn new(shared: &Rc<Shared>, precision: Precision) -> Result<Products> {
        let workspace = DeviceMemory::new(shared, WORKSPACE_BYTES / 4, Format::F32)?;
        let handle = result::create_handle().map_err(|error| failed("starting cuBLASLt", error))?;
        Ok(Products { handle, workspace, precision, plans: RefCell::default() })
    }

    /// Starts a product in the computing stream; false if the library cannot do it in one pass.
    pub(super) fn multiply(&self, shared: &Shared, product: &Product) -> bool {
        match self.try_multiply(shared, product) {
            Ok(done) => done,
            Err(error) => {
                fail(shared, product, &format!("cuBLASLt says {error}"));
                true
            }
        }
    }

    /// Starts a product that the library can do.
    pub(super) fn must_multiply(&self, shared: &Shared, product: &Product) {
        if !self.multiply(shared, product) {
            fail(shared, product, "cuBLASLt knows no way");
        }
    }

    fn try_multiply(&self, shared: &Shared, product: &Product) -> std::result::Result<bool, CublasError> {
        let mut plans = self.plans.borrow_mut();
        let key = Key::of(product);
        if !plans.contains_key(&key) {
            let plan = match self.plan(product, &key) {
                Err(error) if is_refusal(product, error) => None,
                found => Some(found?),
            };
            plans.insert(Key::of(product), plan);
        }
        let Some(plan) = &plans[&key] else { return Ok(false) };
        let (one, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let device = |pointer: u64| pointer as *mut c_void;
        shared.count(|counters| counters.launches += 1);
        // SAFETY: the plan's descriptions are of these operands; the pointers are to memory of their lengths, which is freed only
        // after the stream has been waited for; the bias's address is read when the product is started.
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
                device(product.result.0),
                plan.layouts[2],
                device(product.result.0),
                plan.layouts[2],
                &raw const plan.algorithm,
                device(self.workspace.pointer()),
                WORKSPACE_BYTES,
                shared.compute.cu_stream().cast(),
            )?;
        }
        Ok(true)
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
        // SAFETY: all descriptions were made here; each attribute is given as a value of its type.
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
            Ok(Plan { desc, layouts, algorithm: found?.algo })
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: each was made here and is destroyed once; an error here has nobody to go to.
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

impl Key {
    fn of(product: &Product) -> Key {
        let Product { size, left, right, result, accumulate, epilogue } = *product;
        // more than 16 bytes make no difference, and what makes none must not make another way of adding up
        let alignment = |pointer: u64| 1 << pointer.trailing_zeros().min(4);
        Key {
            size,
            formats: [left.format, right.format, result.1],
            transposed: [left.transposed, right.transposed],
            epilogue: epilogue.kind(),
            accumulate,
            alignments: [left.pointer, right.pointer, result.0, epilogue.auxiliary()].map(alignment),
        }
    }
}

fn data_type(format: Format) -> cudaDataType_t {
    match format {
        Format::F32 => cudaDataType_t::CUDA_R_32F,
        Format::Bf16 => cudaDataType_t::CUDA_R_16BF,
    }
}

/// True if an error says that the library cannot do a product, or not together with what follows it.
fn is_refusal(product: &Product, error: CublasError) -> bool {
    let follows = product.epilogue.kind() != cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT;
    match error.0 {
        sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => true,
        sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE => follows,
        _ => false,
    }
}

fn fail(shared: &Shared, product: &Product, why: &str) {
    let [m, n, k] = product.size;
    shared.fail(&format!("multiplying {m} × {k} by {k} × {n}"), why);
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
    unsafe {
        result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
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
        result::set_matmul_pref_attribute(
            preference,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}
