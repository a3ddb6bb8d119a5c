//! Matrix products as they are asked of cuBLASLt.

use std::fmt;

use cudarc::cublaslt::sys::{cublasLtEpilogue_t, cublasLtMatmulAlgo_t};

use super::format::Format;

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
}

impl Epilogue {
    pub(crate) const NONE: Epilogue = Epilogue { bias: 0, function: EpilogueFunction::Identity };

    pub(crate) fn kind(self) -> cublasLtEpilogue_t {
        match (self.function, self.bias != 0) {
            (EpilogueFunction::Identity, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (EpilogueFunction::Identity, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (EpilogueFunction::Relu, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU,
            (EpilogueFunction::Relu, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
            (EpilogueFunction::Gelu { .. }, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            (EpilogueFunction::Gelu { .. }, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        }
    }

    /// Returns the address of the saved array; 0 if there is none.
    pub(crate) fn auxiliary(self) -> u64 {
        match self.function {
            EpilogueFunction::Identity | EpilogueFunction::Relu => 0,
            EpilogueFunction::Gelu { saved } => saved,
        }
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
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProductKey {
    pub(crate) size: [usize; 3],
    pub(crate) formats: [Format; 3],
    pub(crate) transposed: [bool; 2],
    pub(crate) epilogue: cublasLtEpilogue_t,
    pub(crate) accumulate: bool,
    /// The alignments of the operands, the output and the array that the epilogue reads or saves.
    pub(crate) alignments: [u32; 4],
}

impl ProductKey {
    pub(crate) fn of(product: &Product) -> ProductKey {
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

/// The key in words, as in the name of a tuned product.
impl fmt::Display for ProductKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProductKey { size: [m, n, k], formats, transposed, epilogue, accumulate, alignments } = self;
        let format = |format: Format| match format {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
        };
        let [left, right, output] = formats.map(format);
        let [left_order, right_order] = transposed.map(|transposed| if transposed { "T" } else { "N" });
        let epilogue = format!("{epilogue:?}").replace("CUBLASLT_EPILOGUE_", "").to_lowercase();
        let sum = if *accumulate { "added" } else { "written" };
        let [a, b, c, saved] = alignments;
        write!(
            formatter,
            "{m} x {n} x {k}, {left} {left_order} by {right} {right_order}, {output} {sum}, {epilogue}, \
             aligned to {a}, {b}, {c}, {saved}"
        )
    }
}

/// Returns the words of an algorithm in hexadecimal digits. cuBLASLt allows to keep them, for the same
/// version of the library.
pub(super) fn encode(algorithm: &cublasLtMatmulAlgo_t) -> String {
    algorithm.data.map(|word| format!("{word:016x}")).join(" ")
}

pub(super) fn decode(text: &str) -> Option<cublasLtMatmulAlgo_t> {
    let words: Option<Vec<u64>> = text.split(' ').map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some(cublasLtMatmulAlgo_t { data: words?.try_into().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_read_as_it_was_written() {
        let algorithm = cublasLtMatmulAlgo_t { data: [0, 1, u64::MAX, 3, 4, 5, 6, 1 << 63] };
        assert_eq!(decode(&encode(&algorithm)).map(|found| found.data), Some(algorithm.data));
        for text in ["", "0", "0 1 2 3 4 5 6", "0 1 2 3 4 5 6 7 8", "0 1 2 3 4 5 6 x"] {
            assert!(decode(text).is_none(), "{text}");
        }
    }
}
