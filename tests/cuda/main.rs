//! CUDA gives the CPU's numbers: for every operation, for PyTorch's trajectories, and for every
//! layout over MPI.
//!
//! On a machine without a GPU the emulator in `tests/cuda/emulator` takes its place. It runs the
//! same kernels on the CPU, as late and as far out of order as CUDA allows.

#[macro_use]
mod operations;
mod comparison;
mod image_twins;
mod losses;
mod messages;
#[path = "../support/mod.rs"]
mod support;
mod twins;

use phalanx::comm::World;
use phalanx::device::{Cuda, Precision};
use support::cases::{self, Case};
use support::equivalence::{layouts, positions, replicas};

static CASES: &[Case] = &[
    Case { name: "the_context_outlives_the_device", ranks: &[1], run: the_context_outlives_the_device },
    Case { name: "operations_f32", ranks: &[1], run: |world| twins::all(world, Precision::F32, 1e-5) },
    // tensor cores may cut factors off to 10 bits, an error of up to 2^-10 for each of the two
    Case { name: "operations_tf32", ranks: &[1], run: |world| twins::all(world, Precision::Tf32, 2e-3) },
    Case { name: "operations_bf16", ranks: &[1], run: |world| twins::all(world, Precision::Bf16, 1e-2) },
    Case {
        name: "oracle_classifier_relu_sgd",
        ranks: &[1, 3],
        run: |world| replicas::oracle::<Cuda>(world, "classifier_relu_sgd"),
    },
    Case {
        name: "oracle_regressor_tanh_adam_cosine",
        ranks: &[1, 3],
        run: |world| replicas::oracle::<Cuda>(world, "regressor_tanh_adam_cosine"),
    },
    Case {
        name: "oracle_deep_mlp_gelu_adamw",
        ranks: &[1, 3],
        run: |world| replicas::oracle::<Cuda>(world, "deep_mlp_gelu_adamw"),
    },
    Case {
        name: "oracle_classifier_tanh_lion",
        ranks: &[3],
        run: |world| replicas::oracle::<Cuda>(world, "classifier_tanh_lion"),
    },
    Case {
        name: "oracle_lenet_sgd",
        ranks: &[1, 3],
        run: |world| replicas::oracle::<Cuda>(world, "lenet_sgd"),
    },
    Case {
        name: "oracle_cifar_net_adam",
        ranks: &[2],
        run: |world| replicas::oracle::<Cuda>(world, "cifar_net_adam"),
    },
    Case { name: "clipping_counts_every_parameter_once", ranks: &[3], run: replicas::clipping::<Cuda> },
    Case { name: "ranks_without_samples", ranks: &[3], run: replicas::ranks_without_samples::<Cuda> },
    Case { name: "worked_example_gradient_descent", ranks: &[2], run: replicas::gradient_descent::<Cuda> },
    Case { name: "shared_batches_equal_whole_ones", ranks: &[2], run: replicas::shared_batches::<Cuda> },
    Case { name: "zero_same_bits", ranks: &[3], run: replicas::zero_same_bits::<Cuda> },
    Case { name: "the_same_twice", ranks: &[2], run: replicas::the_same_twice::<Cuda> },
    Case { name: "stages_that_share_a_rank", ranks: &[2], run: layouts::stages_that_share_a_rank::<Cuda> },
    Case { name: "grids_clipped", ranks: &[8], run: layouts::grids_clipped::<Cuda> },
    Case { name: "tensor_oracles", ranks: &[3], run: layouts::tensor_oracles::<Cuda> },
    Case { name: "shared_positions_oracles", ranks: &[3], run: positions::shared_positions_oracles::<Cuda> },
    Case {
        name: "shared_positions_same_numbers",
        ranks: &[3],
        run: positions::shared_positions_same_bits::<Cuda>,
    },
    Case { name: "pipeline_oracles", ranks: &[3], run: layouts::pipeline_oracles::<Cuda, 17> },
    Case { name: "pipeline_images", ranks: &[2], run: layouts::pipeline_images::<Cuda> },
    Case { name: "pipeline_same_bits", ranks: &[3], run: layouts::pipeline_same_bits::<Cuda> },
    Case { name: "activations_on_their_own", ranks: &[2], run: layouts::activations_on_their_own::<Cuda> },
    Case { name: "odd_widths", ranks: &[3], run: layouts::odd_widths::<Cuda> },
    Case { name: "grids", ranks: &[4, 8], run: layouts::grids::<Cuda, 120> },
    // with 17 ranks, a sum has more terms than are added 16 bytes at a time
    Case { name: "messages", ranks: &[1, 2, 3, 5, 8, 17], run: messages::every_operation },
    Case { name: "operations_by_ipc", ranks: &[1, 2, 3, 9], run: messages::every_operation_by_ipc },
    Case {
        name: "operations_over_nodes_by_ipc",
        ranks: &[6, 8],
        run: messages::operations_over_nodes_by_ipc,
    },
    Case {
        name: "oracle_deep_mlp_by_ipc",
        ranks: &[3],
        run: |world| messages::ipc(world, |world| replicas::oracle::<Cuda>(world, "deep_mlp_gelu_adamw")),
    },
    Case {
        name: "grids_by_ipc",
        ranks: &[4],
        run: |world| messages::ipc(world, layouts::grids::<Cuda, 160>),
    },
    Case {
        name: "zero_same_bits_by_ipc",
        ranks: &[3],
        run: |world| messages::ipc(world, replicas::zero_same_bits::<Cuda>),
    },
    Case {
        name: "oracle_lenet_sgd_straight_from_memory",
        ranks: &[3],
        run: |world| messages::aware(world, |world| replicas::oracle::<Cuda>(world, "lenet_sgd")),
    },
    Case {
        name: "grids_straight_from_memory",
        ranks: &[4],
        run: |world| messages::aware(world, layouts::grids::<Cuda, 160>),
    },
    Case {
        name: "pipelines_straight_from_memory",
        ranks: &[3],
        run: |world| messages::aware(world, layouts::pipeline_same_bits::<Cuda>),
    },
    Case { name: "initial_weights", ranks: &[3], run: layouts::initial_weights::<Cuda> },
];

/// Cases that end the job, because memory of other ranks would be written beyond its end.
static FAILING: &[(Case, &str)] = &[
    (
        Case { name: "a_message_that_is_too_long", ranks: &[2], run: messages::too_long },
        "rank 0 has 5 values for an operation on 3",
    ),
    (
        Case {
            name: "a_sum_of_other_lengths",
            ranks: &[3],
            run: |world| messages::sum_of_other_lengths(world, 4),
        },
        "rank 2 has 4 values for an operation on 3",
    ),
    (
        // short operations have one leader, others one for each device
        Case {
            name: "a_sum_that_is_short_on_some_ranks",
            ranks: &[3],
            run: |world| messages::sum_of_other_lengths(world, 70_000),
        },
        "rank 2 has 70000 values for an operation on 3",
    ),
];

/// MPI closes its mappings of device memory after the device has been dropped.
fn the_context_outlives_the_device(_: &World) {
    drop(Cuda::open(0, Precision::F32).expect("there is a device"));
    cudarc::driver::result::mem_get_info().expect("the context is there");
}

fn main() -> std::process::ExitCode {
    cases::main_on_cuda(CASES, FAILING)
}
