//! Gradients of weights beside the computation.

use phalanx::comm::World;
use phalanx::device::prelude::*;
use phalanx::device::{
    Cuda, CudaBuffer, LinearShape, Precision, Role, RowSums, WeightLayout, WeightOperands,
};

use super::twins::random;

const ROWS: usize = 64;
const INPUTS: usize = 128;
const OUTPUTS: usize = 96;

/// The arrays of a layer: its inputs, the gradient of its outputs and that of its weight.
struct LayerArrays([CudaBuffer; 3]);

impl LayerArrays {
    fn new(device: &Cuda, seed: u64) -> LayerArrays {
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
        let weight = device.allocate(INPUTS * OUTPUTS, Role::Exact).expect("there is memory");
        LayerArrays([filled(ROWS * INPUTS, seed), filled(ROWS * OUTPUTS, seed + 1), weight])
    }

    fn start(&mut self, device: &Cuda) {
        let shape = LinearShape::whole(ROWS, INPUTS, OUTPUTS, WeightLayout::OutputsByInputs, 8);
        let [input, gradient, weight] = &mut self.0;
        let (input, gradient) =
            (device.view(input, 0..ROWS * INPUTS), device.view(gradient, 0..ROWS * OUTPUTS));
        let sum = RowSums::chain(device.view_mut(weight, 0..INPUTS * OUTPUTS), ROWS, false);
        device.linear_backward_weight(&shape, &[WeightOperands { rows: ROWS, input, gradient }], sum);
    }

    /// Copies what the gradient of the weight is formed from.
    fn copy_operands(&mut self, device: &Cuda, from: &LayerArrays) {
        for (number, len) in [ROWS * INPUTS, ROWS * OUTPUTS].into_iter().enumerate() {
            let from = device.view(&from.0[number], 0..len);
            device.copy(from, device.view_mut(&mut self.0[number], 0..len));
        }
    }

    /// Overwrites what the gradient of the weight is formed from.
    fn spoil(&mut self, device: &Cuda) {
        device.fill(device.view_mut(&mut self.0[0], 0..ROWS * INPUTS), f32::NAN);
        device.fill(device.view_mut(&mut self.0[1], 0..ROWS * OUTPUTS), f32::NAN);
    }

    fn result(&self, device: &Cuda) -> Vec<u32> {
        let mut bits = Vec::new();
        let read = &mut |values: &[f32]| {
            bits.extend(values.iter().map(|value| value.to_bits()));
            Ok(())
        };
        device.read(device.view(&self.0[2], 0..INPUTS * OUTPUTS), read).expect("the device works");
        bits
    }
}

/// A gradient that was started beside the computation has the bits of any other, in a recorded step too, and
/// what it is formed from may change once it has been joined.
pub fn weight_gradients(_: &World) {
    for precision in [Precision::F32, Precision::Bf16] {
        let device = Cuda::open(0, precision).expect("there is a device");
        let layers = || [1, 3].map(|seed| LayerArrays::new(&device, seed));
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
        assert!(counters.beside >= 4 && counters.replays > 0, "{precision:?}: {counters:?}");
    }
}
