//! Linear layers as products by cuBLASLt.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::{Format, Precision};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{BLOCK, KernelArgument, Launch, launch};
use super::runtime::product::{
    AUXILIARY_MULTIPLE, Epilogue, EpilogueFunction, Operand, Product, ProductOutput,
};
use crate::device::{Activation, LinearOperations, LinearShape, RowSums, WeightLayout, WeightOperands};

kernel_table!(LinearKernels in "linear.cu" {
    small_product: Kernel,
});

/// The most products of two values in a product of matrices that our own kernel forms.
const LARGEST_SMALL_PRODUCT: usize = 1 << 22;

/// The most terms of a sum that its kernel forms: a block goes through all of them.
const MOST_SMALL_TERMS: usize = 1024;

/// Rows, and columns, of a block's part of a small product.
const SIDE: usize = 16;

/// The most blocks of a launch in y.
const MOST_BLOCKS_IN_Y: usize = 65_535;

/// A factor of a small product, row-major or column-major: `struct Matrix` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct SmallFactor {
    values: u64,
    row_stride: u32,
    column_stride: u32,
}

impl KernelArgument for SmallFactor {}

impl SmallFactor {
    /// Returns the transpose of a factor of cuBLASLt's, which is `rows × columns` there.
    fn new(operand: &Operand, rows: usize, columns: usize) -> SmallFactor {
        let (row_stride, column_stride) =
            if operand.transposed { (1, columns as u32) } else { (rows as u32, 1) };
        SmallFactor { values: operand.pointer, row_stride, column_stride }
    }
}

impl Cuda {
    /// Returns a matrix as a factor of a product, in the format of products.
    fn operand(&self, view: CudaView<'_>, transposed: bool) -> Operand {
        match (self.precision, view.format) {
            (Precision::Bf16, Format::F32) => {
                assert!(view.copy != 0 || view.len == 0, "products in bf16 take parameters and activations");
                Operand { pointer: view.copy, format: Format::Bf16, transposed }
            }
            _ => Operand { pointer: view.pointer, format: view.format, transposed },
        }
    }

    /// Starts a product. Returns false if it has an epilogue that is not supported.
    fn multiply(&self, product: &Product) -> bool {
        self.multiply_small(product) || self.cublaslt.multiply(&self.streams, product)
    }

    /// Starts a product without an epilogue.
    fn must_multiply(&self, product: &Product) {
        if !self.multiply_small(product) {
            self.cublaslt.must_multiply(&self.streams, product);
        }
    }

    /// Starts a product in f32 by a kernel of our own if it is small: cuBLASLt would divide its terms, and
    /// take two kernels and twice the time.
    fn multiply_small(&self, product: &Product) -> bool {
        let [columns, rows, terms] = product.size;
        let relu = match product.epilogue.function {
            EpilogueFunction::Identity => false,
            EpilogueFunction::Relu => true,
            EpilogueFunction::Gelu { .. } => return false,
        };
        let is_small = columns * rows * terms <= LARGEST_SMALL_PRODUCT && terms <= MOST_SMALL_TERMS;
        if self.precision != Precision::F32 || !is_small || rows.div_ceil(SIDE) > MOST_BLOCKS_IN_Y {
            return false;
        }
        // cuBLASLt's matrices are transposed: its right factor is the left one here
        let left = SmallFactor::new(&product.right, terms, rows);
        let right = SmallFactor::new(&product.left, columns, terms);
        let blocks = (columns.div_ceil(SIDE) as u32, rows.div_ceil(SIDE) as u32);
        let launch = Launch { blocks, threads: (BLOCK, 1), shared_bytes: 0 };
        let kernel = &self.kernels.of::<LinearKernels>().small_product;
        let (rows, columns, terms) = (rows as u32, columns as u32, terms as u32);
        let (bias, output) = (product.epilogue.bias, product.output.pointer);
        let (accumulate, relu) = (i32::from(product.accumulate), i32::from(relu));
        launch!(
            self.streams,
            kernel,
            launch,
            rows,
            columns,
            terms,
            left,
            right,
            bias,
            output,
            accumulate,
            relu
        );
        true
    }
}

impl LinearOperations for Cuda {
    fn linear_forward(
        &self,
        shape: &LinearShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        bias: Option<CudaView<'_>>,
        activation: Activation,
        saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        let LinearShape { rows, inputs, outputs, layout, .. } = *shape;
        assert!(input.len == rows * inputs && weight.len == inputs * outputs && output.len == rows * outputs);
        assert!(bias.is_none_or(|bias| bias.len == outputs));
        // cuBLASLt has no tanh, and its GELU is the approximation that all layers have in bf16
        let is_bf16 = output.format == Format::Bf16;
        let function = match activation {
            Activation::Identity => Some(EpilogueFunction::Identity),
            Activation::Relu => Some(EpilogueFunction::Relu),
            Activation::Gelu if is_bf16 && outputs.is_multiple_of(AUXILIARY_MULTIPLE) => {
                Some(EpilogueFunction::Gelu { saved: saved.pointer })
            }
            Activation::Gelu | Activation::GeluTanh | Activation::Silu | Activation::Tanh => None,
        };
        let product = Product {
            size: [outputs, rows, inputs],
            left: self.operand(weight, layout == WeightLayout::OutputsByInputs),
            right: self.operand(input, false),
            output: ProductOutput { pointer: output.pointer, format: output.format },
            accumulate: false,
            epilogue: Epilogue::NONE,
        };
        if let Some(function) = function {
            let bias = bias.map_or(0, |bias| self.operand(bias, false).pointer);
            let fused = Product { epilogue: Epilogue { bias, function }, ..product };
            if self.multiply(&fused) {
                return;
            }
        }
        self.must_multiply(&product);
        self.bias_and_activation(activation, bias, output.as_view(), &saved, &output);
    }

    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        operands: &[WeightOperands<CudaView<'_>>],
        weight_gradient: RowSums<CudaViewMut<'_>>,
    ) {
        let LinearShape { inputs, outputs, layout, .. } = *shape;
        let Some((weight_gradient, accumulate)) = self.single_sum(weight_gradient, inputs * outputs) else {
            return;
        };
        // cuBLASLt refuses products over no rows
        let with_rows = operands.iter().filter(|operand| operand.rows > 0);
        for (number, &WeightOperands { rows, input, gradient }) in with_rows.enumerate() {
            assert!(input.len == rows * inputs && gradient.len == rows * outputs);
            let (size, left, right) = match layout {
                WeightLayout::OutputsByInputs => ([inputs, outputs, rows], input, gradient),
                WeightLayout::InputsByOutputs => ([outputs, inputs, rows], gradient, input),
            };
            let output = ProductOutput { pointer: weight_gradient.pointer, format: weight_gradient.format };
            self.must_multiply(&Product {
                size,
                left: self.operand(left, false),
                right: self.operand(right, true),
                output,
                accumulate: accumulate || number > 0,
                epilogue: Epilogue::NONE,
            });
        }
    }

    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: CudaView<'_>,
        weight: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        let LinearShape { rows, inputs, outputs, layout, .. } = *shape;
        assert!(gradient.len == rows * outputs && weight.len == inputs * outputs);
        assert_eq!(input_gradient.len, rows * inputs);
        let product = Product {
            size: [inputs, rows, outputs],
            left: self.operand(weight, layout == WeightLayout::InputsByOutputs),
            right: self.operand(gradient, false),
            output: ProductOutput { pointer: input_gradient.pointer, format: input_gradient.format },
            accumulate: false,
            epilogue: Epilogue::NONE,
        };
        self.must_multiply(&product);
    }
}
