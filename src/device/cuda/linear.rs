//! Linear layers as products.

use super::matmul::{AUXILIARY_MULTIPLE, Epilogue, Follow, Operand, Product};
use super::memory::{CudaView, CudaViewMut, Format};
use super::{Cuda, Precision};
use crate::device::{Activation, LinearShape, WeightLayout};

impl Cuda {
    /// A matrix as a factor of a product, in the format of products.
    fn operand(&self, view: CudaView<'_>, transposed: bool) -> Operand {
        match (self.precision, view.format) {
            (Precision::Bf16, Format::F32) => {
                assert!(view.copy != 0 || view.len == 0, "products in bf16 take parameters and activations");
                Operand { pointer: view.copy, format: Format::Bf16, transposed }
            }
            _ => Operand { pointer: view.pointer, format: view.format, transposed },
        }
    }

    pub(super) fn forward(
        &self,
        shape: &LinearShape,
        input: CudaView<'_>,
        (weight, bias): (CudaView<'_>, Option<CudaView<'_>>),
        activation: Activation,
        saved: &CudaViewMut<'_>,
        output: &CudaViewMut<'_>,
    ) {
        let LinearShape { rows, inputs, outputs, layout } = *shape;
        assert!(input.len == rows * inputs && weight.len == inputs * outputs && output.len == rows * outputs);
        assert!(bias.is_none_or(|bias| bias.len == outputs));
        // what cuBLASLt can do on the way: it has no tanh, and its GELU is an approximation, as good as bf16
        let epilogue = match activation {
            Activation::Identity => Some(Follow::Nothing),
            Activation::Relu => Some(Follow::Relu),
            Activation::Gelu
                if output.format == Format::Bf16 && outputs.is_multiple_of(AUXILIARY_MULTIPLE) =>
            {
                Some(Follow::Gelu { saves: saved.pointer })
            }
            Activation::Gelu | Activation::Tanh => None,
        };
        let product = Product {
            size: [outputs, rows, inputs],
            left: self.operand(weight, layout == WeightLayout::OutputsByInputs),
            right: self.operand(input, false),
            result: (output.pointer, output.format),
            accumulate: false,
            epilogue: Epilogue::NONE,
        };
        if let Some(follow) = epilogue {
            let bias = bias.map_or(0, |bias| self.operand(bias, false).pointer);
            let fused = Product { epilogue: Epilogue { bias, follow }, ..product };
            if self.products.multiply(&self.shared, &fused) {
                return;
            }
        }
        self.products.must_multiply(&self.shared, &product);
        self.activate(activation, outputs, output.read(), bias, saved, output);
    }

    pub(super) fn backward_weight(
        &self,
        shape: &LinearShape,
        input: CudaView<'_>,
        gradient: CudaView<'_>,
        weight_gradient: &CudaViewMut<'_>,
        accumulate: bool,
    ) {
        let LinearShape { rows, inputs, outputs, layout } = *shape;
        assert!(input.len == rows * inputs && gradient.len == rows * outputs);
        assert_eq!(weight_gradient.len, inputs * outputs);
        let (size, left, right) = match layout {
            WeightLayout::OutputsByInputs => ([inputs, outputs, rows], input, gradient),
            WeightLayout::InputsByOutputs => ([outputs, inputs, rows], gradient, input),
        };
        self.products.must_multiply(
            &self.shared,
            &Product {
                size,
                left: self.operand(left, false),
                right: self.operand(right, true),
                result: (weight_gradient.pointer, weight_gradient.format),
                accumulate,
                epilogue: Epilogue::NONE,
            },
        );
    }

    pub(super) fn backward_input(
        &self,
        shape: &LinearShape,
        gradient: CudaView<'_>,
        weight: CudaView<'_>,
        input_gradient: &CudaViewMut<'_>,
        before: Option<(Activation, CudaView<'_>)>,
    ) {
        let LinearShape { rows, inputs, outputs, layout } = *shape;
        assert!(gradient.len == rows * outputs && weight.len == inputs * outputs);
        assert_eq!(input_gradient.len, rows * inputs);
        let product = Product {
            size: [inputs, rows, outputs],
            left: self.operand(weight, layout == WeightLayout::InputsByOutputs),
            right: self.operand(gradient, false),
            result: (input_gradient.pointer, input_gradient.format),
            accumulate: false,
            epilogue: Epilogue::NONE,
        };
        if let Some((Activation::Gelu, saved)) = before
            && input_gradient.format == Format::Bf16
            && inputs.is_multiple_of(AUXILIARY_MULTIPLE)
        {
            assert!(saved.len == input_gradient.len && saved.format == Format::Bf16);
            let follow = Follow::GeluBackward { saved: saved.pointer };
            let fused = Product { epilogue: Epilogue { bias: 0, follow }, ..product };
            if self.products.multiply(&self.shared, &fused) {
                return;
            }
        }
        self.products.must_multiply(&self.shared, &product);
        if let Some((activation, saved)) = before {
            self.unactivate(activation, inputs, saved, input_gradient, None, false);
        }
    }
}
