//! Training gives the same numbers in every layout: PyTorch's, those of one rank, and those of the
//! same command run before.

mod audit;
mod samples;
#[path = "../support/mod.rs"]
mod support;

use clap::ValueEnum as _;
use phalanx::comm::{Grid, GridShape, World};
use phalanx::device::{Activation, Cpu};
use phalanx::nn::{Features, Loss, Network};
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::tensor::Split;
use support::cases::{self, Case};
use support::equivalence::{Rig, Watched, layouts, positions, replicas, settings};

#[global_allocator]
static ALLOCATOR: Watched = Watched;

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
    Case {
        name: "oracle_classifier_tanh_lion",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "classifier_tanh_lion"),
    },
    Case { name: "oracle_lenet_sgd", ranks: ALL, run: |world| replicas::oracle::<Cpu>(world, "lenet_sgd") },
    Case {
        name: "oracle_cifar_net_adam",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "cifar_net_adam"),
    },
    Case {
        name: "oracle_residual_mlp_adam",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "residual_mlp_adam"),
    },
    Case {
        name: "oracle_residual_conv_sgd",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "residual_conv_sgd"),
    },
    Case {
        name: "oracle_gpt_bias_adamw",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "gpt_bias_adamw"),
    },
    Case {
        name: "oracle_gpt_nobias_decay_clip",
        ranks: ALL,
        run: |world| replicas::oracle::<Cpu>(world, "gpt_nobias_decay_clip"),
    },
    Case { name: "shared_batches_equal_whole_ones", ranks: ALL, run: replicas::shared_batches::<Cpu> },
    Case { name: "clipping_counts_every_parameter_once", ranks: ALL, run: replicas::clipping::<Cpu> },
    Case { name: "ranks_without_samples", ranks: ALL, run: replicas::ranks_without_samples::<Cpu> },
    Case { name: "zero_same_bits", ranks: ALL, run: replicas::zero_same_bits::<Cpu> },
    Case { name: "footprints", ranks: ALL, run: replicas::footprints },
    Case { name: "the_same_twice", ranks: ALL, run: replicas::the_same_twice::<Cpu> },
    Case { name: "worked_example_gradient_descent", ranks: &[1, 2], run: replicas::gradient_descent::<Cpu> },
    Case { name: "replica_check_names_the_rank", ranks: &[2, 3, 4], run: replica_check },
    Case { name: "audits_find_faults", ranks: &[2, 3, 4], run: audit::finds_faults },
    Case { name: "audits_find_nothing_else", ranks: &[2, 3, 4], run: audit::finds_nothing_else },
    Case { name: "a_step_allocates_nothing_of_ours", ranks: &[1, 2, 3], run: no_allocation_in_replicas },
    Case { name: "tensor_oracles", ranks: &[1, 2, 3, 4, 8], run: layouts::tensor_oracles::<Cpu> },
    Case {
        name: "shared_positions_oracles",
        ranks: &[2, 3, 4, 8],
        run: positions::shared_positions_oracles::<Cpu>,
    },
    Case {
        name: "shared_positions_same_bits",
        ranks: &[2, 3, 4, 6],
        run: positions::shared_positions_same_bits::<Cpu>,
    },
    Case {
        name: "shared_positions_same_bits_of_five",
        ranks: &[2, 3, 4, 6],
        run: positions::shared_positions_same_bits_of_five::<Cpu>,
    },
    Case { name: "shared_positions_memory", ranks: &[2, 4], run: positions::shared_positions_memory },
    Case { name: "pipeline_oracles", ranks: ALL, run: layouts::pipeline_oracles::<Cpu, 1> },
    Case { name: "pipeline_images", ranks: ALL, run: layouts::pipeline_images::<Cpu> },
    Case { name: "pipeline_same_bits", ranks: &[2, 3, 4, 5], run: layouts::pipeline_same_bits::<Cpu> },
    Case { name: "stages_that_share_a_rank", ranks: &[2], run: layouts::stages_that_share_a_rank::<Cpu> },
    Case { name: "activations_on_their_own", ranks: &[2], run: layouts::activations_on_their_own::<Cpu> },
    Case { name: "odd_widths", ranks: &[2, 3, 4, 5], run: layouts::odd_widths::<Cpu> },
    Case { name: "grids", ranks: &[1, 2, 3, 4, 6, 8], run: layouts::grids::<Cpu, 7> },
    Case { name: "kept_samples", ranks: &[1, 2, 3, 4, 5], run: samples::kept_samples },
    Case { name: "grids_clipped", ranks: &[8], run: layouts::grids_clipped::<Cpu> },
    Case { name: "initial_weights", ranks: ALL, run: layouts::initial_weights::<Cpu> },
    Case { name: "any_layout_allocates_nothing_of_ours", ranks: &[2, 3, 4], run: no_allocation_in_layouts },
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
        trainer.write_part(None, 2, &weights).unwrap();
        trainer.check_replicas(3).unwrap();
        if world.rank() == 1 {
            weights[5] = f32::from_bits(weights[5].to_bits() ^ 1);
            trainer.write_part(None, 2, &weights).unwrap();
        }
        let error = trainer.check_replicas(4).unwrap_err();
        let who =
            if world.size() == 2 { "ranks 0 and 1 hold different" } else { "rank 1 holds other values" };
        assert!(error.to_string().contains("fc2.weight differs in 1 bit;"), "{error}");
        assert!(error.to_string().contains(who) && error.to_string().contains("at step 4"), "{error}");
        assert_eq!(error.exit_code(), 1);
    });
}

/// Checks that a step allocates nothing of ours at steady state, neither on the heap nor as a
/// memory map.
fn no_allocation_in_replicas(world: &World) {
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

/// Checks tensor and pipeline parallelism as [`no_allocation_in_replicas`] checks data parallelism.
fn no_allocation_in_layouts(world: &World) {
    let network = Network::deep_mlp(256, 4);
    let model = network.build(Features::Flat(256)).unwrap();
    let tensor = Grid::new(world, GridShape { data: 1, stage: 1, tensor: world.size() }).unwrap();
    let mut rig = Rig::<Cpu>::new(&network, Features::Flat(256), 2, layouts::adamw(32, None));
    for split in [Split::Pairs, Split::Gather] {
        rig.plan.split = split;
        let found = rig.foreign_allocations(&tensor, 8);
        assert!(found.is_empty(), "{split:?}: {} allocations, the first:\n{}", found.len(), found[0]);
    }
    for &kind in PipelineScheduleKind::value_variants() {
        rig.plan = layouts::pipeline_plan(&model, kind, world.size(), 4);
        let found = rig.foreign_allocations(&layouts::pipeline_grid(world), 8);
        assert!(found.is_empty(), "{kind:?}: {} allocations, the first:\n{}", found.len(), found[0]);
    }
}
