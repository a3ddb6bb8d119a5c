//! Training gives the same numbers whatever the layout: PyTorch's, the serial run's, and its own of a moment ago.

mod equivalence_support;
mod support;

use equivalence_support::{Rig, replicas, settings};
use phalanx::comm::{Grid, GridShape, World};
use phalanx::device::{Activation, Cpu};
use phalanx::nn::{Features, Loss, Network};
use support::cases::{self, Case};

#[global_allocator]
static ALLOCATOR: equivalence_support::Watched = equivalence_support::Watched;

const ALL: &[usize] = &[1, 2, 3, 4];

static CASES: &[Case] = &[
    Case {
        name: "oracle_classifier_relu_sgd",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "classifier_relu_sgd"),
    },
    Case {
        name: "oracle_regressor_tanh_adam_cosine",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "regressor_tanh_adam_cosine"),
    },
    Case {
        name: "oracle_deep_mlp_gelu_adamw",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "deep_mlp_gelu_adamw"),
    },
    Case { name: "oracle_lenet_sgd", ranks: ALL, run: |world| replicas::oracle::<Cpu>(world, "lenet_sgd") },
    Case {
        name: "oracle_cifar_net_adam",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "cifar_net_adam"),
    },
    Case { name: "shared_batches_equal_whole_ones", ranks: ALL, run: replicas::shared_batches::<Cpu> },
    Case { name: "clipping_counts_every_parameter_once", ranks: ALL, run: replicas::clipping::<Cpu> },
    Case { name: "ranks_without_samples", ranks: ALL, run: replicas::ranks_without_samples::<Cpu> },
    Case { name: "the_same_twice", ranks: ALL, run: replicas::the_same_twice::<Cpu> },
    Case { name: "worked_example_gradient_descent", ranks: &[1, 2], run: replicas::gradient_descent::<Cpu> },
    Case { name: "replica_check_names_the_rank", ranks: &[2, 3, 4], run: replica_check },
    Case { name: "a_step_allocates_nothing_of_ours", ranks: &[1, 2, 3], run: no_allocation },
];

fn main() -> std::process::ExitCode {
    cases::main(CASES, &[])
}

fn replica_check(world: &World) {
    let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
    let network = Network::mlp(&[19], Activation::Relu, true, 10, Loss::CrossEntropy);
    let rig = Rig::<Cpu>::new(&network, Features::Flat(50), 1, settings(16, replicas::ways()[0].0));
    rig.with_trainer(&grid, |trainer| {
        let mut weights = vec![0.5_f32; 19 * 10];
        trainer.set_tensor(2, &weights).unwrap();
        trainer.check_replicas(3).unwrap();
        if world.rank() == 1 {
            weights[5] = f32::from_bits(weights[5].to_bits() ^ 1);
            trainer.set_tensor(2, &weights).unwrap();
        }
        let error = trainer.check_replicas(4).unwrap_err();
        let who =
            if world.size() == 2 { "ranks 0 and 1 hold different" } else { "rank 1 holds other parameters" };
        assert!(error.to_string().contains(who) && error.to_string().contains("at step 4"), "{error}");
        assert_eq!(error.exit_code(), 1);
    });
}

/// Nothing of ours allocates at steady state, neither from the heap nor as a map of its own. The `gemm` crate takes memory to
/// repack its operands in and gives it back at once: what it takes is let through, by the caller's name.
fn no_allocation(world: &World) {
    let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
    let image = Features::Image { height: 28, width: 28, channels: 1 };
    for (network, features) in [(Network::lenet(10), image), (Network::deep_mlp(256, 4), Features::Flat(256))]
    {
        for (sync, num_micro_batches) in replicas::ways() {
            let rig = Rig::<Cpu>::new(&network, features, num_micro_batches, settings(32, sync));
            let found = rig.foreign_allocations(&grid, 8);
            assert!(
                found.is_empty(),
                "{}: {} allocations, the first:\n{}",
                network.name,
                found.len(),
                found[0]
            );
        }
    }
}
