//! The optimizers' steps, and squares for the gradient's norm.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::{Kernel, kernel_table};
use super::runtime::launch::{BLOCK, KernelArgument, Launch, launch, launch_in, size32};
use crate::device::{AdamStep, LionStep, OptimizerOperations, OptimizerStep, SgdStep, totals, update};
use crate::sums::ExactSum;

/// Bytes of four values of `f32`, which the kernels read and write at once. The copy in bf16 has half of
/// them.
const FOUR_BYTES: u64 = 16;

/// Largest number of slots of an optimizer: `MAX_SLOTS` of the kernels.
const MAX_SLOTS: usize = 4;

kernel_table!(OptimizerKernels in "optimizer.cu" {
    sgd_step: Kernel,
    sgd_momentum_step: Kernel,
    adam_step: Kernel,
    lion_step: Kernel,
    sum_squares: Kernel,
    clip_gradient: Kernel,
});

/// `struct SgdConstants` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct SgdConstants {
    momentum: f32,
    weight_decay: f32,
    nesterov: i32,
}

/// `struct AdamConstants` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct AdamConstants {
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    epsilon: f32,
    weight_decay: f32,
    decoupled: i32,
}

/// `struct LionConstants` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct LionConstants {
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    weight_decay: f32,
}

/// `struct OptimizerArrays` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct OptimizerArrays {
    len: u64,
    update: u64,
    parameters: u64,
    copy: u64,
    gradients: u64,
    slots: [u64; MAX_SLOTS],
    partials: u64,
    blocks_done: u64,
    squares: u64,
}

impl KernelArgument for SgdConstants {}
impl KernelArgument for AdamConstants {}
impl KernelArgument for LionConstants {}
impl KernelArgument for OptimizerArrays {}

impl SgdConstants {
    fn new(step: &SgdStep) -> SgdConstants {
        let SgdStep { momentum, nesterov, weight_decay } = *step;
        SgdConstants { momentum, weight_decay, nesterov: i32::from(nesterov) }
    }
}

impl AdamConstants {
    fn new(step: &AdamStep) -> AdamConstants {
        let AdamStep { beta1, beta2, epsilon, weight_decay, decoupled } = *step;
        AdamConstants {
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            // rounded once: 1 − 0.999 in f32 would be off by 5·10⁻⁵
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            epsilon,
            weight_decay,
            decoupled: i32::from(decoupled),
        }
    }
}

impl LionConstants {
    fn new(step: &LionStep) -> LionConstants {
        let LionStep { beta1, beta2, weight_decay } = *step;
        let (one_minus_beta1, one_minus_beta2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
        let (beta1, beta2) = (beta1 as f32, beta2 as f32);
        LionConstants { beta1, beta2, one_minus_beta1, one_minus_beta2, weight_decay }
    }
}

/// Returns the address of the sum of the gradient's squares in a step's totals.
fn gradient_squares(sums: &CudaViewMut<'_>) -> u64 {
    assert_eq!(sums.len, totals::LEN);
    sums.pointer + 4 * totals::GRADIENT_SQUARES as u64
}

impl OptimizerOperations for Cuda {
    fn optimizer_step(
        &self,
        step: &OptimizerStep,
        update: CudaView<'_>,
        parameters: CudaViewMut<'_>,
        gradients: CudaView<'_>,
        slots: &mut [CudaViewMut<'_>],
        sums: CudaViewMut<'_>,
    ) {
        let len = parameters.len;
        assert!(gradients.len == len && slots.iter().all(|slot| slot.len == len));
        let mut arrays = OptimizerArrays {
            len: len as u64,
            update: update.pointer,
            parameters: parameters.pointer,
            copy: parameters.copy,
            gradients: gradients.pointer,
            slots: [0; MAX_SLOTS],
            partials: self.step_sums.of_blocks(),
            blocks_done: self.step_sums.blocks_done(),
            squares: gradient_squares(&sums),
        };
        for (pointer, slot) in arrays.slots[..slots.len()].iter_mut().zip(slots.iter()) {
            *pointer = slot.pointer;
        }
        let kernels = self.kernels.of::<OptimizerKernels>();
        match (step, slots.len()) {
            (OptimizerStep::Sgd(step), 0) if step.momentum == 0.0 => {
                self.launch_step(&kernels.sgd_step, SgdConstants::new(step), arrays);
            }
            (OptimizerStep::Sgd(step), 1) => {
                self.launch_step(&kernels.sgd_momentum_step, SgdConstants::new(step), arrays);
            }
            (OptimizerStep::Adam(step), 2) => {
                self.launch_step(&kernels.adam_step, AdamConstants::new(step), arrays);
            }
            (OptimizerStep::Lion(step), 1) => {
                self.launch_step(&kernels.lion_step, LionConstants::new(step), arrays);
            }
            (step, num_slots) => panic!("{step:?} with {num_slots} slots"),
        }
    }

    fn fork_steps(&self) {
        self.forks_steps.set(true);
    }

    fn join_steps(&self) {
        self.forks_steps.set(false);
        self.streams.join();
    }

    fn sum_squares(&self, values: CudaView<'_>, squares: CudaViewMut<'_>) {
        assert_eq!(squares.len, self.squares_len());
        launch!(
            self.streams,
            &self.kernels.of::<OptimizerKernels>().sum_squares,
            self.streams.over(values.len, 4),
            values.len as u64,
            values.pointer,
            self.partial_sums.of_blocks(),
            self.partial_sums.blocks_done(),
            squares.pointer,
        );
    }

    fn clip(&self, squares: CudaView<'_>, largest: f64, update: CudaViewMut<'_>) {
        assert_eq!(update.len, update::LEN);
        let launch = Launch { blocks: (1, 1), threads: (BLOCK, 1), shared_bytes: 0 };
        let (kernel, num) = (&self.kernels.of::<OptimizerKernels>().clip_gradient, size32(squares.len));
        launch!(self.streams, kernel, launch, num, largest, squares.pointer, update.pointer);
    }

    /// One: the kernel adds up `f32`.
    fn squares_len(&self) -> usize {
        1
    }

    fn exact_squares(&self, squares: &[f32]) -> ExactSum {
        let mut sum = ExactSum::default();
        sum.add(f64::from(squares[0]));
        sum
    }
}

impl Cuda {
    fn launch_step(&self, kernel: &Kernel, constants: impl KernelArgument, arrays: OptimizerArrays) {
        let OptimizerArrays { len, parameters, copy, gradients, slots, .. } = arrays;
        let all = slots.into_iter().fold(parameters | gradients | (2 * copy), |all, slot| all | slot);
        assert!(all.is_multiple_of(FOUR_BYTES), "an optimizer's arrays begin at multiples of 16 bytes");
        let (streams, launch) = (&self.streams, self.streams.over(len as usize, 4));
        if self.forks_steps.get() {
            streams.fork();
            launch_in!(streams, streams.beside, kernel, launch, constants, arrays);
        } else {
            launch!(streams, kernel, launch, constants, arrays);
        }
    }
}
