//! The operations of a device as values, on arrays by number; those of losses are in `losses.rs`.

use phalanx::device::{
    Activation, AttentionShape, BiasShape, BlockShape, ConvolutionShape, Device, DropoutShape,
    EmbeddingShape, Gate, GatheredRows, GroupNormShape, LinearShape, LinearTape, NormShape, OptimizerStep,
    PoolShape, Role, Rotation, RowSums, ViewedSums, WeightOperands, totals, update,
};

/// An operation on arrays by number, which must not write those that it reads.
pub trait Operation {
    fn run<D: Device>(&self, device: &D, buffers: &mut [D::Buffer], lengths: &[usize]);
}

/// Defines an operation with views of the arrays in `$views`, then of those that it writes in
/// `$outs`, in the order in which they are given.
macro_rules! operation {
    (
        $name:ident { $($field:ident: $type:ty),* },
        |$this:ident, $device:ident, $views:ident, $outs:ident| $body:expr
    ) => {
        pub struct $name { pub num_read: usize, $(pub $field: $type),* }

        impl Operation for $name {
            fn run<D: Device>(&self, $device: &D, buffers: &mut [D::Buffer], lengths: &[usize]) {
                let $this = self;
                let (read, write) = buffers.split_at_mut(self.num_read);
                let (read_lengths, write_lengths) = lengths.split_at(self.num_read);
                let $views: Vec<D::View<'_>> = read
                    .iter()
                    .zip(read_lengths)
                    .map(|(buffer, len)| $device.view(buffer, 0..*len))
                    .collect();
                let mut $outs: Vec<Option<D::ViewMut<'_>>> = write
                    .iter_mut()
                    .zip(write_lengths)
                    .map(|(buffer, len)| Some($device.view_mut(buffer, 0..*len)))
                    .collect();
                $body
            }
        }
    };
}

// the device chooses what it saves for the backward pass: only the results are compared

operation!(
    LinearForward { shape: LinearShape, activation: Activation, bias: bool },
    |this, device, views, outs| {
        let LinearShape { rows, outputs, .. } = this.shape;
        let len = if this.activation.saves() { rows * outputs } else { 0 };
        let mut saved = device.allocate(len, Role::Activations).unwrap();
        let (bias, saved) = (this.bias.then(|| views[2]), device.view_mut(&mut saved, 0..len));
        device.linear_forward(
            &this.shape,
            views[0],
            views[1],
            bias,
            this.activation,
            saved,
            outs[0].take().unwrap(),
        )
    }
);
operation!(LinearBackwardWeight { shape: LinearShape, accumulate: bool }, |this, device, views, outs| {
    let sums = RowSums::chain(outs[0].take().unwrap(), this.shape.rows, this.accumulate);
    let operands = [WeightOperands { rows: this.shape.rows, input: views[0], gradient: views[1] }];
    device.linear_backward_weight(&this.shape, &operands, sums)
});
operation!(
    LinearBackward {
        shape: LinearShape,
        activation: Activation,
        accumulate: bool,
        bias: bool,
        in_parts: bool
    },
    |this, device, views, outs| {
        let LinearBackward { shape, activation, .. } = *this;
        let (len, outputs) = (shape.rows * shape.outputs, shape.outputs);
        let [mut output, mut saved, mut gradient] =
            [(); 3].map(|()| device.allocate(len, Role::Activations).unwrap());
        let (input, weight, bias) = (views[0], views[1], this.bias.then(|| views[2]));
        let (to_save, to_output) =
            (device.view_mut(&mut saved, 0..len), device.view_mut(&mut output, 0..len));
        device.linear_forward(&shape, input, weight, bias, activation, to_save, to_output);
        let inputs = shape.rows * shape.inputs;
        let mut copy = device.allocate(inputs, Role::Activations).unwrap();
        device.copy(input, device.view_mut(&mut copy, 0..inputs));
        device.copy(views[3], device.view_mut(&mut gradient, 0..len));
        let saved = device.view(if activation.saves() { &saved } else { &output }, 0..len);
        let [weight_sums, input_gradient, bias_sums] = [0, 1, 2].map(|at| outs[at].take().unwrap());
        let chain = |sums| Some(RowSums::chain(sums, shape.rows, this.accumulate));
        let bias_sums = if this.bias { chain(bias_sums) } else { None };
        if device.fuses_linear_backward(&shape) && !this.in_parts {
            let (input, gradient) = (device.view(&copy, 0..inputs), device.view(&gradient, 0..len));
            let tape = LinearTape { input, activation, saved, gradient };
            let sums = ViewedSums { weight: chain(weight_sums), bias: bias_sums };
            device.linear_backward(&shape, &tape, weight, sums, input_gradient);
            return;
        }
        let rows = BiasShape { columns: outputs, positions: 1 };
        device.activation_backward(
            activation,
            rows,
            saved,
            device.view_mut(&mut gradient, 0..len),
            bias_sums,
        );
        let gradient = device.view(&gradient, 0..len);
        let operands = [WeightOperands { rows: shape.rows, input: device.view(&copy, 0..inputs), gradient }];
        device.linear_backward_weight(&shape, &operands, chain(weight_sums).unwrap());
        device.linear_backward_input(&shape, gradient, weight, input_gradient);
    }
);
operation!(LinearBackwardInput { shape: LinearShape }, |this, device, views, outs| {
    device.linear_backward_input(&this.shape, views[0], views[1], outs[0].take().unwrap())
});
operation!(
    ActivationBothWays { activation: Activation, columns: usize, len: usize, accumulate: bool },
    |this, device, views, outs| {
        let len = if this.activation.saves() { this.len } else { 0 };
        let mut saved = device.allocate(len, Role::Activations).unwrap();
        let mut output = device.allocate(this.len, Role::Activations).unwrap();
        let places = device.view_mut(&mut saved, 0..len);
        device.activation_forward(
            this.activation,
            views[0],
            places,
            device.view_mut(&mut output, 0..this.len),
        );
        let (gradient, copy) = (outs[0].take().unwrap(), outs[1].take().unwrap());
        let bias = outs.get_mut(2).and_then(Option::take);
        let output = device.view(&output, 0..this.len);
        let saved = if this.activation.saves() { device.view(&saved, 0..len) } else { output };
        let shape = BiasShape { columns: this.columns, positions: 1 };
        let rows = this.len / this.columns;
        let bias = bias.map(|bias| RowSums::chain(bias, rows, this.accumulate));
        device.activation_backward(this.activation, shape, saved, gradient, bias);
        device.copy(output, copy)
    }
);
operation!(ConvolutionForward { shape: ConvolutionShape, bias: bool }, |this, device, views, outs| {
    let len = this.shape.rows * this.shape.argmax_len();
    let mut argmax = device.allocate(len, Role::Activations).unwrap();
    let (argmax, output) = (device.view_mut(&mut argmax, 0..len), outs[0].take().unwrap());
    let bias = this.bias.then(|| views[2]);
    device.convolution_forward(&this.shape, views[0], views[1], bias, argmax, output)
});
operation!(ConvolutionBackward { shape: ConvolutionShape, accumulate: bool }, |this, device, views, outs| {
    let (shape, input, weight, bias) = (&this.shape, views[0], views[1], views[2]);
    let (argmax_len, len) = (shape.rows * shape.argmax_len(), shape.rows * shape.output_len());
    let mut argmax = device.allocate(argmax_len, Role::Activations).unwrap();
    let [mut output, mut gradient] = [(); 2].map(|()| device.allocate(len, Role::Activations).unwrap());
    let at = device.view_mut(&mut argmax, 0..argmax_len);
    device.convolution_forward(shape, input, weight, Some(bias), at, device.view_mut(&mut output, 0..len));
    device.copy(views[3], device.view_mut(&mut gradient, 0..len));
    let (argmax, output) = (device.view(&argmax, 0..argmax_len), device.view(&output, 0..len));
    if shape.relu {
        device.convolution_backward_relu(shape, output, device.view_mut(&mut gradient, 0..len));
    }
    let gradient = device.view(&gradient, 0..len);
    let [weight_sums, input_gradient, bias_sums] =
        [0, 1, 2].map(|at| outs.get_mut(at).and_then(Option::take));
    let chain = |sums| RowSums::chain(sums, shape.rows, this.accumulate);
    let sums = ViewedSums { weight: weight_sums.map(chain), bias: bias_sums.map(chain) };
    device.convolution_backward_weight(shape, input, argmax, gradient, sums);
    device.convolution_backward_input(shape, weight, argmax, gradient, input_gradient.unwrap());
});
operation!(Pool { shape: PoolShape }, |this, device, views, outs| {
    let shape = &this.shape;
    let len = shape.rows * shape.output_len();
    let mut argmax = device.allocate(len, Role::Activations).unwrap();
    device.max_pool_forward(shape, views[0], device.view_mut(&mut argmax, 0..len), outs[0].take().unwrap());
    device.max_pool_backward(shape, device.view(&argmax, 0..len), views[1], outs[1].take().unwrap());
});
operation!(AveragePool { shape: PoolShape }, |this, device, views, outs| {
    device.average_pool_forward(&this.shape, views[0], outs[0].take().unwrap());
    device.average_pool_backward(&this.shape, views[1], outs[1].take().unwrap());
});
operation!(Gated { gate: Gate, columns: usize }, |this, device, views, outs| {
    device.gated_forward(this.gate, this.columns, views[0], outs[0].take().unwrap());
    device.gated_backward(this.gate, this.columns, views[0], views[1], outs[1].take().unwrap());
});
operation!(Dropout { shape: DropoutShape }, |this, device, views, outs| {
    device.dropout(&this.shape, Some(views[0]), outs[0].take().unwrap());
    device.dropout(&this.shape, None, outs[1].take().unwrap());
});
operation!(Rotate { shape: AttentionShape, rotation: Rotation }, |this, device, views, outs| {
    device.rotate(&this.shape, this.rotation, Some(views[0]), outs[0].take().unwrap());
    device.rotate(&this.shape, this.rotation, None, outs[1].take().unwrap());
});
operation!(GroupNorm { shape: GroupNormShape, adds: bool }, |this, device, views, outs| {
    let (shape, [input, weight, bias, gradient]) = (&this.shape, [0, 1, 2, 3].map(|at| views[at]));
    let len = shape.rows * shape.saved_len();
    let mut saved = device.allocate(len, Role::Activations).unwrap();
    let (values, output) = (device.view_mut(&mut saved, 0..len), outs[0].take().unwrap());
    device.group_norm_forward(shape, input, weight, bias, this.adds.then_some(gradient), values, output);
    let (saved, input_gradient) = (device.view(&saved, 0..len), outs[1].take().unwrap());
    device.group_norm_backward_input(shape, input, weight, saved, gradient, input_gradient);
    device.group_norm_position_sums(shape, input, saved, gradient, outs[2].take().unwrap());
});
operation!(LayerNorm { shape: NormShape, bias: bool }, |this, device, views, outs| {
    let (shape, bias) = (&this.shape, this.bias.then(|| views[2]));
    let len = shape.rows * NormShape::SAVED;
    let mut saved = device.allocate(len, Role::Activations).unwrap();
    let (values, output) = (device.view_mut(&mut saved, 0..len), outs[0].take().unwrap());
    device.layer_norm_forward(shape, views[0], views[1], bias, values, output);
    let (saved, input_gradient) = (device.view(&saved, 0..len), outs[1].take().unwrap());
    device.layer_norm_backward_input(shape, views[0], views[1], saved, views[3], input_gradient);
});
operation!(LayerNormWeight { shape: NormShape, accumulate: bool }, |this, device, views, outs| {
    let shape = &this.shape;
    let (saved_len, len) = (shape.rows * NormShape::SAVED, shape.rows * shape.columns);
    let mut saved = device.allocate(saved_len, Role::Activations).unwrap();
    let mut output = device.allocate(len, Role::Activations).unwrap();
    let (values, output) = (device.view_mut(&mut saved, 0..saved_len), device.view_mut(&mut output, 0..len));
    device.layer_norm_forward(shape, views[0], views[1], None, values, output);
    let sums = RowSums::chain(outs[0].take().unwrap(), shape.rows, this.accumulate);
    let saved = device.view(&saved, 0..saved_len);
    device.layer_norm_backward_weight(shape, views[0], saved, views[2], sums);
});
operation!(ScaleColumns { rows: usize, columns: usize, accumulate: bool }, |this, device, views, outs| {
    device.scale_columns(views[0], views[1], outs[0].take().unwrap());
    let sums = RowSums::chain(outs[1].take().unwrap(), this.rows, this.accumulate);
    device.scale_columns_backward_weight(this.columns, views[0], views[2], sums);
});
operation!(PositionSums { shape: NormShape, samples: usize, has_bias: bool }, |this, device, views, outs| {
    let (shape, bias_sum) = (&this.shape, outs[1].take().unwrap());
    let (saved_len, len) = (shape.rows * NormShape::SAVED, shape.rows * shape.columns);
    let mut saved = device.allocate(saved_len, Role::Activations).unwrap();
    let mut output = device.allocate(len, Role::Activations).unwrap();
    if len > 0 {
        let values = device.view_mut(&mut saved, 0..saved_len);
        let output = device.view_mut(&mut output, 0..len);
        device.layer_norm_forward(shape, views[0], views[1], None, values, output);
    }
    let saved = device.view(&saved, 0..saved_len);
    let sums = outs[0].take().unwrap();
    device.layer_norm_position_sums(shape, views[0], saved, views[2], this.has_bias, sums);
    let rows = if len > 0 { this.samples } else { 0 };
    device.layer_norm_backward_bias(shape, views[2], RowSums::chain(bias_sum, rows, this.has_bias));
});
operation!(Embed { shape: EmbeddingShape, accumulate: bool }, |this, device, views, outs| {
    let shape = &this.shape;
    device.embed(shape, views[0], views[1], outs[0].take().unwrap());
    let sums = RowSums::chain(outs[1].take().unwrap(), shape.tokens, this.accumulate);
    device.embed_backward(shape, views[0], views[2], sums);
});
operation!(AddTable {}, |_this, device, views, outs| {
    device.add_table(views[0], views[1], outs[0].take().unwrap())
});
operation!(Attention { shape: AttentionShape }, |this, device, views, outs| {
    let shape = &this.shape;
    let len = shape.rows * shape.positions * shape.output_width();
    let saved_len = shape.rows * shape.positions * shape.num_heads();
    let mut saved = device.allocate(saved_len, Role::Activations).unwrap();
    let mut output = device.allocate(len, Role::Activations).unwrap();
    let values = device.view_mut(&mut saved, 0..saved_len);
    device.attention_forward(shape, views[0], values, device.view_mut(&mut output, 0..len));
    device.copy(device.view(&output, 0..len), outs[0].take().unwrap());
    let (input, saved, output) = (views[0], device.view(&saved, 0..saved_len), device.view(&output, 0..len));
    device.attention_backward(shape, input, saved, output, views[1], outs[1].take().unwrap());
    let shape = &AttentionShape { dropout: None, ..*shape };
    device.attention_next(shape, shape.positions / 2, views[0], outs[2].take().unwrap());
});
operation!(Add {}, |_this, device, views, outs| device.add(views[0], outs[0].take().unwrap()));
operation!(Sum { relu: bool }, |this, device, views, outs| {
    device.sum(views[0], views[1], this.relu, outs[0].take().unwrap());
});
operation!(TransposeEach { rows: usize, columns: usize }, |this, device, views, outs| {
    device.transpose_each(this.rows, this.columns, views[0], outs[0].take().unwrap())
});
operation!(CopyBlock { shape: BlockShape }, |this, device, views, outs| {
    device.copy_block(&this.shape, views[0], outs[0].take().unwrap())
});
/// An optimizer's step: reads its update and the gradient, writes parameters, slots and totals.
pub struct Optimizer {
    pub step: OptimizerStep,
}

impl Operation for Optimizer {
    fn run<D: Device>(&self, device: &D, buffers: &mut [D::Buffer], lengths: &[usize]) {
        let len = lengths[2];
        let [update, gradients, parameters, slots @ .., sums] = buffers else {
            panic!("an optimizer has four arrays besides its slots");
        };
        let mut slots: Vec<D::ViewMut<'_>> =
            slots.iter_mut().map(|slot| device.view_mut(slot, 0..len)).collect();
        device.optimizer_step(
            &self.step,
            device.view(update, 0..update::LEN),
            device.view_mut(parameters, 0..len),
            device.view(gradients, 0..len),
            &mut slots,
            device.view_mut(sums, 0..totals::LEN),
        );
    }
}

operation!(GatherRows { columns: [usize; 2] }, |this, device, views, outs| {
    let [first, second] = [0, 1].map(|at| {
        let (columns, into) = (this.columns[at], outs[at].take().unwrap());
        GatheredRows { columns, table: views[1 + at], into }
    });
    device.gather_rows(views[0], first, second)
});

/// Sums the squares of two tensors, the second of two parts, and clips their gradient.
pub struct Squares;

impl Operation for Squares {
    fn run<D: Device>(&self, device: &D, buffers: &mut [D::Buffer], lengths: &[usize]) {
        let [values, total, update] = buffers else { panic!("a sum of squares has three arrays") };
        let each = device.squares_len();
        let mut squares = device.allocate(2 * each, Role::Exact).unwrap();
        let [len, half] = [lengths[0], lengths[0] / 2];
        for (tensor, range) in [(0, 0..half), (1, half..len), (1, 0..half)] {
            let squares = device.view_mut(&mut squares, tensor * each..(tensor + 1) * each);
            device.sum_squares(device.view(values, range), squares);
        }
        let mut sum = 0.0;
        let mut read = |squares: &[f32]| {
            sum =
                squares.chunks_exact(each).map(|squares| device.exact_squares(squares).value() as f32).sum();
            Ok(())
        };
        device.read(device.view(&squares, 0..2 * each), &mut read).unwrap();
        let mut write = |total: &mut [f32]| {
            total[0] = sum;
            Ok(())
        };
        device.write(device.view_mut(total, 0..1), &mut write).unwrap();
        // more tensors than a block has threads
        let mut many = device.allocate(600 * each, Role::Exact).unwrap();
        for tensor in 0..600 {
            let start = tensor % len;
            let squares = device.view_mut(&mut many, tensor * each..(tensor + 1) * each);
            device.sum_squares(device.view(values, start..len.min(start + 5)), squares);
        }
        let update = device.view_mut(update, 0..update::LEN);
        device.clip(device.view(&many, 0..600 * each), 0.25, update);
    }
}

operation!(FillAndCopy { value: f32 }, |this, device, views, outs| {
    device.fill(outs[0].take().unwrap(), this.value);
    device.copy(views[0], outs[1].take().unwrap())
});
