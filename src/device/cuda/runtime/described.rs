//! Descriptions of products for cuBLASLt. Each object is destroyed with its owner.

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cudaDataType_t,
};

use super::format::{Format, Precision};
use super::product::{Epilogue, Operand, Product, ProductKey};

/// The result of a call of cuBLASLt.
pub(super) type CublasResult<T> = Result<T, CublasError>;

/// Defines the owner of an object of cuBLASLt.
macro_rules! owner {
    ($(#[$docs:meta])* $name:ident($handle:ty), $destroy:path) => {
        $(#[$docs])*
        pub(super) struct $name($handle);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the object was created for this owner and is destroyed once, here. An error cannot
                // be returned from `drop`.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

owner! {
    /// The description of a product.
    ProductDescription(sys::cublasLtMatmulDesc_t), result::destroy_matmul_desc
}

owner! {
    /// The description of a matrix.
    MatrixLayout(sys::cublasLtMatrixLayout_t), result::destroy_matrix_layout
}

owner! {
    /// The wishes for an algorithm.
    AlgorithmPreference(sys::cublasLtMatmulPreference_t), result::destroy_matmul_pref
}

/// cuBLASLt's descriptions of a product and of its matrices.
pub(super) struct Described {
    desc: ProductDescription,
    layouts: [MatrixLayout; 3],
}

impl Described {
    /// Describes a product and its matrices.
    pub(super) fn new(product: &Product, key: &ProductKey, precision: Precision) -> CublasResult<Described> {
        let [m, n, k] = product.size;
        let compute = match precision {
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            Precision::F32 | Precision::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let layout = |format, rows: usize, columns: usize| {
            result::create_matrix_layout(data_type(format), rows as u64, columns as u64, rows as i64)
                .map(MatrixLayout)
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
        let desc = ProductDescription(result::create_matmul_desc(compute, cudaDataType_t::CUDA_R_32F)?);
        let described = Described { desc, layouts };
        let (desc, _) = described.handles();
        let transposition = |transposed: bool| i32::from(transposed);
        // SAFETY: the description was created above; each attribute is set to a value of its type.
        unsafe {
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
            if product.epilogue.auxiliary() != 0 {
                set_desc(desc, DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(m as i64))?;
            }
        }
        described.set_pointers(product.epilogue)?;
        Ok(described)
    }

    /// Sets the addresses of the arrays that an epilogue reads or saves.
    pub(super) fn set_pointers(&self, epilogue: Epilogue) -> CublasResult<()> {
        let pointers = [
            (DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias),
            (DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.auxiliary()),
        ];
        pointers.iter().filter(|(_, pointer)| *pointer != 0).try_for_each(|(attribute, pointer)| {
            // SAFETY: the description exists, and both attributes are pointers.
            unsafe { set_desc(self.desc.0, *attribute, pointer) }
        })
    }

    /// Returns the handles of the product and of its matrices.
    pub(super) fn handles(&self) -> (sys::cublasLtMatmulDesc_t, [sys::cublasLtMatrixLayout_t; 3]) {
        let [left, right, output] = &self.layouts;
        (self.desc.0, [left.0, right.0, output.0])
    }
}

impl AlgorithmPreference {
    /// Wishes for an algorithm for the product of `key` that needs at most `workspace` bytes.
    pub(super) fn new(key: &ProductKey, workspace: usize) -> CublasResult<AlgorithmPreference> {
        let preference = AlgorithmPreference(result::create_matmul_pref()?);
        let [left, right, output, _] = key.alignments;
        let workspace = workspace as u64;
        // SAFETY: each attribute is set to a value of its type.
        unsafe {
            let bytes = PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            set_preference(&preference, bytes, &workspace)?;
            for (attribute, alignment) in [
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, left),
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, right),
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, output),
                (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, output),
            ] {
                set_preference(&preference, attribute, &alignment)?;
            }
        }
        Ok(preference)
    }

    /// Returns the handle of the wishes.
    pub(super) fn handle(&self) -> sys::cublasLtMatmulPreference_t {
        self.0
    }
}

fn data_type(format: Format) -> cudaDataType_t {
    match format {
        Format::F32 => cudaDataType_t::CUDA_R_32F,
        Format::Bf16 => cudaDataType_t::CUDA_R_16BF,
    }
}

/// # Safety
/// `desc` exists, and the attribute is of type `T`.
unsafe fn set_desc<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attribute: DescAttribute,
    value: &T,
) -> CublasResult<()> {
    // SAFETY: this function's caller guarantees the description and the type; the value is copied.
    unsafe {
        result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}

/// # Safety
/// The attribute is of type `T`.
unsafe fn set_preference<T>(
    preference: &AlgorithmPreference,
    attribute: PreferenceAttribute,
    value: &T,
) -> CublasResult<()> {
    // SAFETY: this function's caller guarantees the type; the value is copied.
    unsafe {
        result::set_matmul_pref_attribute(
            preference.0,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}
