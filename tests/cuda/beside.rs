//! Gradients of weights beside the computation.

use phalanx::comm::World;
use phalanx::device::prelude::*;
use phalanx::device::{
    ConvolutionShape, Cuda, CudaBuffer, LinearShape, Precision, Role, RowSums, WeightLayout, WeightOperands,
};

use super::twins::random;

const ROWS: usize = 64;

/// The shapes of the layers whose gradients are formed beside the computation: two of each kind, because
/// the second takes memory for partial sums that the first has used, and more of it.
const SHAPES: [LayerShape; 4] = [
    LayerShape::Linear { inputs: 128, outputs: 96 },
    LayerShape::Linear { inputs: 128, outputs: 96 },
    LayerShape::Convolution { channels: 5, side: 7, outputs: 4 },
    LayerShape::Convolution { channels: 3, side: 11, outputs: 90 },
];

#[derive(Clone, Copy)]
enum LayerShape {
    Linear { inputs: usize, outputs: usize },
    Convolution { channels: usize, side: usize, outputs: usize },
}

impl LayerShape {
    fn convolution(channels: usize, side: usize, outputs: usize) -> ConvolutionShape {
        let (rows, height, width) = (ROWS, side, side);
        let (kernel, stride, padding, pool, relu) = (3, 1, 1, false, false);
        ConvolutionShape { rows, channels, height, width, outputs, kernel, stride, padding, pool, relu }
    }

    /// Returns the lengths of the inputs, of the gradient of the outputs, and of the weight.
    fn lengths(self) -> [usize; 3] {
        match self {
            LayerShape::Linear { inputs, outputs } => [ROWS * inputs, ROWS * outputs, inputs * outputs],
            LayerShape::Convolution { channels, side, outputs } => {
                let shape = LayerShape::convolution(channels, side, outputs);
                [ROWS * shape.image_len(), ROWS * shape.output_len(), shape.weight_len()]
            }
        }
    }
}

/// The arrays of a layer: its inputs, the gradient of its outputs and that of its weight.
struct LayerArrays {
    shape: LayerShape,
    arrays: [CudaBuffer; 3],
}

impl LayerArrays {
    fn new(device: &Cuda, shape: LayerShape, seed: u64) -> LayerArrays {
        let filled = |len: usize, seed: u64| {
            let mut buffer = device.allocate(len, Role::Activations).expect("there is memory");
            let values = random(len, seed);
            let fill = &mut |into: &mut [f32]| {
                into.copy_from_slice(&values);
                Ok(())
            };
            device.write(device.view_mut(&mut buffer, 0..len), fill).expect("the device works");
            buffer
        };
        let [inputs, outputs, weights] = shape.lengths();
        let weight = device.allocate(weights, Role::Exact).expect("there is memory");
        LayerArrays { shape, arrays: [filled(inputs, seed), filled(outputs, seed + 1), weight] }
    }

    fn start(&mut self, device: &Cuda) {
        let [input_len, output_len, weight_len] = self.shape.lengths();
        let [input, gradient, weight] = &mut self.arrays;
        let (input, gradient) = (device.view(input, 0..input_len), device.view(gradient, 0..output_len));
        let sum = RowSums::chain(device.view_mut(weight, 0..weight_len), ROWS, false);
        match self.shape {
            LayerShape::Linear { inputs, outputs } => {
                let shape = LinearShape::whole(ROWS, inputs, outputs, WeightLayout::OutputsByInputs, 8);
                device.linear_backward_weight(&shape, &[WeightOperands { rows: ROWS, input, gradient }], sum);
            }
            LayerShape::Convolution { channels, side, outputs } => {
                let shape = LayerShape::convolution(channels, side, outputs);
                let nothing = device.allocate(0, Role::Activations).expect("there is memory");
                let argmax = device.view(&nothing, 0..0);
                device.convolution_backward_weight(&shape, input, argmax, gradient, sum);
            }
        }
    }

    /// Copies what the gradient of the weight is formed from.
    fn copy_operands(&mut self, device: &Cuda, from: &LayerArrays) {
        for (number, len) in self.shape.lengths().into_iter().enumerate().take(2) {
            let from = device.view(&from.arrays[number], 0..len);
            device.copy(from, device.view_mut(&mut self.arrays[number], 0..len));
        }
    }

    /// Overwrites what the gradient of the weight is formed from.
    fn spoil(&mut self, device: &Cuda) {
        for (number, len) in self.shape.lengths().into_iter().enumerate().take(2) {
            device.fill(device.view_mut(&mut self.arrays[number], 0..len), f32::NAN);
        }
    }

    fn result(&self, device: &Cuda) -> Vec<u32> {
        let mut bits = Vec::new();
        let read = &mut |values: &[f32]| {
            bits.extend(values.iter().map(|value| value.to_bits()));
            Ok(())
        };
        let [_, _, len] = self.shape.lengths();
        device.read(device.view(&self.arrays[2], 0..len), read).expect("the device works");
        bits
    }
}

/// A gradient that was started beside the computation has the bits of any other, in a recorded step too, and
/// what it is formed from may change once it has been joined.
pub fn weight_gradients(_: &World) {
    for precision in [Precision::F32, Precision::Bf16] {
        let device = Cuda::open(0, precision).expect("there is a device");
        let mut seed = 0;
        let mut layers = || {
            SHAPES.map(|shape| {
                seed += 2;
                LayerArrays::new(&device, shape, seed)
            })
        };
        let mut alone = layers();
        alone.iter_mut().for_each(|layer| device.fork_weight_gradients(|| layer.start(&device)));
        assert_eq!(device.counters().beside, 0, "a step that is not repeated forks nothing");
        let (mut beside, mut recording) = (layers(), None);
        for time in 0..4 {
            let mut work = || {
                assert!(device.forks_weight_gradients());
                for (layer, original) in beside.iter_mut().zip(&alone) {
                    layer.copy_operands(&device, original);
                    device.fork_weight_gradients(|| layer.start(&device));
                }
                device.join_weight_gradients();
                beside.iter_mut().for_each(|layer| layer.spoil(&device));
                Ok(())
            };
            device.repeat(&mut recording, &mut work).expect("the device works");
            for (number, (alone, beside)) in alone.iter().zip(&beside).enumerate() {
                let is_same = alone.result(&device) == beside.result(&device);
                assert!(is_same, "{precision:?}, layer {number}, time {time}");
            }
        }
        let counters = device.counters();
        assert!(counters.beside >= 8 && counters.replays > 0, "{precision:?}: {counters:?}");
    }
}
