//! Convolutions of the CPU beside the products that they would be on copied patches (im2col):
//! `cargo bench --bench convolutions`, or with a shape of your own,
//! `cargo bench --bench convolutions -- IMAGES CHANNELS SIDE OUTPUTS KERNEL STRIDE`, with half a kernel of
//! padding.
//!
//! Both take turns with one thread; the best of each counts. Rates are in GFLOP/s of the textbook formula,
//! so a convolution by minimal filtering can be above the processor's peak. The patches of the products
//! are there already.

use std::hint::black_box;
use std::time::Instant;

use phalanx::device::{
    Activation, ConvolutionOperations, ConvolutionShape, Cpu, LinearOperations, LinearShape, RowSums,
    ViewedSums, WeightLayout,
};
use phalanx::memory::Memory;

/// Images, channels, height and width, outputs, kernel and stride: those of residual networks for images of
/// 32 × 32.
const SHAPES: &[[usize; 6]] = &[
    [128, 3, 32, 16, 3, 1],
    [128, 16, 32, 16, 3, 1],
    [128, 16, 32, 32, 3, 2],
    [128, 16, 32, 32, 1, 2],
    [128, 32, 16, 32, 3, 1],
    [128, 32, 16, 64, 3, 2],
    [128, 32, 16, 64, 1, 2],
    [128, 64, 8, 64, 3, 1],
];

/// Seconds for which the contenders take turns.
const SECONDS: f64 = 0.5;

fn main() {
    println!("images channels  side outputs kernel stride pass             product convolution  ratio");
    let cpu = Cpu::new(1).expect("one thread can always be had");
    let own: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let (own, rest) = own.as_chunks::<6>();
    assert!(rest.is_empty(), "a shape has six numbers");
    for &[rows, channels, side, outputs, kernel, stride] in if own.is_empty() { SHAPES } else { own } {
        let shape = ConvolutionShape {
            rows,
            channels,
            height: side,
            width: side,
            outputs,
            kernel,
            stride,
            padding: kernel / 2,
            pool: false,
            relu: false,
            flattens: false,
        };
        let [input, weight] = [rows * shape.image_len(), shape.weight_len()].map(filled);
        let [mut input_gradient, mut weight_gradient] = [input.len(), weight.len()].map(filled);
        let mut output = filled(rows * shape.output_len());
        let gradient = filled(output.len());
        let report = |pass: &str, convolve: &mut dyn FnMut()| {
            let [product, own] = rates(&cpu, &shape, convolve);
            let ratio = own / product;
            print!("{rows:>6} {channels:>8} {side:>5} {outputs:>7} {kernel:>6} {stride:>6} {pass:<15} ");
            println!("{product:>8.0} {own:>11.0} {ratio:>6.2}");
        };
        report("forward", &mut || {
            cpu.convolution_forward(&shape, &input, &weight, None, &mut [], &mut output);
        });
        report("input gradient", &mut || {
            cpu.convolution_backward_input(&shape, &weight, &[], &gradient, &mut input_gradient);
        });
        report("weight gradient", &mut || {
            let weight = Some(RowSums::chain(&mut weight_gradient[..], rows, false));
            let sums = ViewedSums { weight, bias: None };
            cpu.convolution_backward_weight(&shape, &input, &[], &gradient, sums);
        });
    }
}

/// Returns memory on huge pages, as training has it.
fn filled(len: usize) -> Memory<f32> {
    let mut memory = Memory::zeroed(len).expect("there is memory for an array");
    memory.iter_mut().enumerate().for_each(|(i, value)| *value = (i % 1013) as f32 / 1013.0 - 0.5);
    memory
}

/// Returns the best rates of the product and of `convolve`.
fn rates(cpu: &Cpu, shape: &ConvolutionShape, convolve: &mut dyn FnMut()) -> [f64; 2] {
    let positions = shape.rows * shape.output_height() * shape.output_width();
    let terms = shape.channels * shape.kernel * shape.kernel;
    let linear = LinearShape::whole(positions, terms, shape.outputs, WeightLayout::InputsByOutputs, 8);
    let [patches, weight, mut output] =
        [positions * terms, terms * shape.outputs, positions * shape.outputs].map(filled);
    let operations = 2.0 * (positions * terms * shape.outputs) as f64;
    let [mut product, mut own] = [f64::INFINITY; 2];
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < SECONDS {
        product = product.min(seconds(|| {
            let activation = Activation::Identity;
            cpu.linear_forward(&linear, &patches, &weight, None, activation, &mut [], &mut output);
        }));
        own = own.min(seconds(&mut *convolve));
        black_box(&output);
    }
    [product, own].map(|seconds| operations / seconds / 1e9)
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}
