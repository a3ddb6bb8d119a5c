//! Linear layers as products by cuBLASLt, or, if they are small, by kernels of our own.

use super::activation::{MOST_ROWS_AT_ONCE, number};
use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::{Format, Precision};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{BLOCK, KernelArgument, Launch, launch, size32};
use super::runtime::partial_sums::SUM_COLUMNS;
use super::runtime::product::{
    AUXILIARY_MULTIPLE, Epilogue, EpilogueFunction, Operand, Product, ProductOutput,
};
use crate::device::{
    Activation, LinearOperations, LinearShape, LinearTape, ParameterSums, RowSums, WeightLayout,
    WeightOperands,
};

kernel_table!(LinearKernels in "linear.cu" {
    small_product: Kernel,
    linear_backward: Kernel,
});

/// The most products of two values in a product of matrices that our own kernel forms.
const LARGEST_SMALL_PRODUCT: usize = 1 << 22;

/// The most terms of a sum that its kernel forms: a block goes through all of them.
const MOST_SMALL_TERMS: usize = 1024;

/// Rows, and columns, of a tile, a block's part of a small product.
const SIDE: u32 = 16;

/// `struct Factor` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct SmallFactor {
    values: u64,
    saved: u64,
    activation: u32,
    line_stride: u32,
    term_stride: u32,
}

impl KernelArgument for SmallFactor {}

impl SmallFactor {
    /// Returns a factor of cuBLASLt's, `rows × columns` there, whose lines are the columns if they
    /// `are_columns`.
    fn new(operand: &Operand, [rows, columns]: [usize; 2], are_columns: bool) -> SmallFactor {
        let (row_stride, column_stride) =
            if operand.transposed { (size32(columns), 1) } else { (1, size32(rows)) };
        let (line_stride, term_stride) =
            if are_columns { (column_stride, row_stride) } else { (row_stride, column_stride) };
        SmallFactor { values: operand.pointer, saved: 0, activation: 0, line_stride, term_stride }
    }

    /// Returns the gradients before an activation, from those after it.
    fn before(self, activation: Activation, saved: u64) -> SmallFactor {
        SmallFactor { saved, activation: number(activation).cast_unsigned(), ..self }
    }
}

/// `struct TiledProduct` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct TiledProduct {
    rows: u32,
    columns: u32,
    terms: u32,
    accumulate: u32,
    relu: u32,
    left: SmallFactor,
    right: SmallFactor,
    bias: u64,
    output: u64,
}

impl KernelArgument for TiledProduct {}

impl TiledProduct {
    /// Returns a product of cuBLASLt's, whose matrices are transposed: its right factor is the left one here.
    fn new(product: &Product, relu: bool) -> TiledProduct {
        let [columns, rows, terms] = product.size;
        TiledProduct {
            rows: size32(rows),
            columns: size32(columns),
            terms: size32(terms),
            accumulate: u32::from(product.accumulate),
            relu: u32::from(relu),
            left: SmallFactor::new(&product.right, [terms, rows], true),
            right: SmallFactor::new(&product.left, [columns, terms], false),
            bias: product.epilogue.bias,
            output: product.output.pointer,
        }
    }

    /// Returns the number of tiles, each of which takes a block.
    fn tiles(&self) -> u32 {
        self.rows.div_ceil(SIDE) * self.columns.div_ceil(SIDE)
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

    /// Returns true if a product of this size is formed by a kernel of our own: cuBLASLt would divide its
    /// terms, and take two kernels and twice the time.
    fn is_small(&self, size: [usize; 3]) -> bool {
        let is_short = size.iter().product::<usize>() <= LARGEST_SMALL_PRODUCT && size[2] <= MOST_SMALL_TERMS;
        self.precision == Precision::F32 && is_short
    }

    /// Starts a product by a kernel of our own if it is small.
    fn multiply_small(&self, product: &Product) -> bool {
        let relu = match product.epilogue.function {
            EpilogueFunction::Identity => false,
            EpilogueFunction::Relu => true,
            EpilogueFunction::Gelu { .. } => return false,
        };
        if !self.is_small(product.size) {
            return false;
        }
        let product = TiledProduct::new(product, relu);
        let launch = Launch { blocks: (product.tiles(), 1), threads: (BLOCK, 1), shared_bytes: 0 };
        let kernel = &self.kernels.of::<LinearKernels>().small_product;
        launch!(self.streams, kernel, launch, product);
        true
    }

    /// Returns the product that is the gradient of the inputs.
    fn input_product(
        &self,
        shape: &LinearShape,
        gradient: CudaView<'_>,
        weight: CudaView<'_>,
        input_gradient: &CudaViewMut<'_>,
    ) -> Product {
        let LinearShape { rows, inputs, outputs, layout, .. } = *shape;
        assert!(gradient.len == rows * outputs && weight.len == inputs * outputs);
        assert_eq!(input_gradient.len, rows * inputs);
        Product {
            size: [inputs, rows, outputs],
            left: self.operand(weight, layout == WeightLayout::InputsByOutputs),
            right: self.operand(gradient, false),
            output: ProductOutput { pointer: input_gradient.pointer, format: input_gradient.format },
            accumulate: false,
            epilogue: Epilogue::NONE,
        }
    }

    /// Returns the product that is the gradient of the weight, or is added to it.
    fn weight_product(
        &self,
        shape: &LinearShape,
        operands: WeightOperands<CudaView<'_>>,
        output: ProductOutput,
        accumulate: bool,
    ) -> Product {
        let LinearShape { inputs, outputs, layout, .. } = *shape;
        let WeightOperands { rows, input, gradient } = operands;
        assert!(input.len == rows * inputs && gradient.len == rows * outputs);
        let (size, left, right) = match layout {
            WeightLayout::OutputsByInputs => ([inputs, outputs, rows], input, gradient),
            WeightLayout::InputsByOutputs => ([outputs, inputs, rows], gradient, input),
        };
        let (left, right) = (self.operand(left, false), self.operand(right, true));
        Product { size, left, right, output, accumulate, epilogue: Epilogue::NONE }
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
        let LinearShape { inputs, outputs, .. } = *shape;
        let Some((weight_gradient, accumulate)) = self.single_sum(weight_gradient, inputs * outputs) else {
            return;
        };
        // cuBLASLt refuses products over no rows
        let with_rows = operands.iter().filter(|operand| operand.rows > 0);
        let output = ProductOutput { pointer: weight_gradient.pointer, format: weight_gradient.format };
        for (number, operands) in with_rows.enumerate() {
            self.must_multiply(&self.weight_product(shape, *operands, output, accumulate || number > 0));
        }
    }

    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: CudaView<'_>,
        weight: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        self.must_multiply(&self.input_product(shape, gradient, weight, &input_gradient));
    }

    fn fuses_linear_backward(&self, shape: &LinearShape) -> bool {
        let LinearShape { rows, inputs, outputs, .. } = *shape;
        let sizes = [[inputs, rows, outputs], [inputs, outputs, rows]];
        rows <= MOST_ROWS_AT_ONCE && sizes.into_iter().all(|size| self.is_small(size))
    }

    fn linear_backward(
        &self,
        shape: &LinearShape,
        tape: &LinearTape<CudaView<'_>>,
        weight: CudaView<'_>,
        mut sums: impl ParameterSums<Cuda>,
        input_gradient: CudaViewMut<'_>,
    ) {
        let LinearShape { rows, inputs, outputs, layout, .. } = *shape;
        let LinearTape { input, activation, saved, gradient } = *tape;
        let sum = |sums: RowSums<CudaViewMut<'_>>, len| {
            let sum = self.single_sum(sums, len);
            sum.map(|(sum, accumulate)| {
                (ProductOutput { pointer: sum.pointer, format: sum.format }, accumulate)
            })
        };
        let weight_sum = sums.weight(|sums| sum(sums, inputs * outputs));
        let bias_sum = sums.bias(|sums| sum(sums, outputs)).flatten();
        let Some((output, accumulate)) = weight_sum else { return };
        assert!(bias_sum.is_none_or(|(_, adds)| adds == accumulate), "both have had the same rows");
        assert!(activation == Activation::Identity || saved.len == gradient.len);
        let operands = WeightOperands { rows, input, gradient };
        let of_weight = self.weight_product(shape, operands, output, accumulate);
        let of_input = self.input_product(shape, gradient, weight, &input_gradient);
        let [mut of_weight, mut of_input] =
            [of_weight, of_input].map(|product| TiledProduct::new(&product, false));
        of_input.left = of_input.left.before(activation, saved.pointer);
        let gradient = match layout {
            WeightLayout::OutputsByInputs => &mut of_weight.left,
            WeightLayout::InputsByOutputs => &mut of_weight.right,
        };
        *gradient = gradient.before(activation, saved.pointer);
        let (gradient, input_tiles, weight_tiles) = (*gradient, of_input.tiles(), of_weight.tiles());
        let bias_blocks = if bias_sum.is_some() { size32(outputs.div_ceil(SUM_COLUMNS as usize)) } else { 0 };
        let blocks = (input_tiles + weight_tiles + bias_blocks, 1);
        let launch = Launch { blocks, threads: (BLOCK, 1), shared_bytes: 0 };
        let bias = bias_sum.map_or(0, |(sum, _)| sum.pointer);
        let kernel = &self.kernels.of::<LinearKernels>().linear_backward;
        let (rows, outputs, accumulate) = (size32(rows), size32(outputs), i32::from(accumulate));
        launch!(
            self.streams,
            kernel,
            launch,
            of_input,
            of_weight,
            input_tiles,
            weight_tiles,
            gradient,
            rows,
            outputs,
            bias,
            accumulate,
        );
    }
}
