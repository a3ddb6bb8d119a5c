//! Stages, split layers, replicas, and their combinations, on any device: every layout gives the
//! serial run's numbers.

use std::collections::HashMap;

use clap::ValueEnum;
use phalanx::comm::{Grid, GridShape, World};
use phalanx::device::Activation;
use phalanx::nn::{Features, Loss, Model, Module, Network};
use phalanx::optim::{OptimizerSettings, Rule};
use phalanx::parallel::batch::Summation;
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::schedule::{PipelineScheduleKind, Schedule};
use phalanx::parallel::tensor::Split;
use phalanx::parallel::zero::{Accumulation, ZeroStage};
use phalanx::train::TrainerSettings;

use super::replicas::assert_same;
use super::{Oracle, Rig, Sample, TestDevice, assert_close, serial_grid, settings};

/// The trajectories that are compared in every layout.
pub const ORACLES: [&str; 9] = [
    "classifier_relu_sgd",
    "regressor_tanh_adam_cosine",
    "deep_mlp_gelu_adamw",
    "classifier_tanh_lion",
    "residual_mlp_adam",
    "residual_conv_sgd",
    "gpt_bias_adamw",
    "gpt_nobias_decay_clip",
    "transformer_adamw",
];

pub const SYNC: SyncSettings = SyncSettings {
    bucket_bytes: 25_000_000,
    zero: Some(ZeroStage::None),
    accumulation: Accumulation::Whole,
    overlap: true,
    clip_norm: None,
};

const DEEP: [usize; 7] = [33, 17, 29, 8, 21, 40, 12];

fn schedule(kind: PipelineScheduleKind, ranks: usize, num_micro_batches: usize) -> Schedule {
    let schedule = kind.generate(ranks, 2, num_micro_batches).unwrap();
    schedule.check().unwrap();
    schedule
}

pub fn pipeline_plan(
    model: &Model,
    kind: PipelineScheduleKind,
    ranks: usize,
    num_micro_batches: usize,
) -> ParallelPlan {
    ParallelPlan::pipeline(model, schedule(kind, ranks, num_micro_batches), None).unwrap()
}

pub fn pipeline_grid(world: &World) -> Grid {
    Grid::new(world, GridShape { data: 1, stage: world.size(), tensor: 1 }).unwrap()
}

/// Checks both splits against PyTorch's numbers and, on a device whose sums have one order, against the bits
/// of one rank.
pub fn tensor_oracles<D: TestDevice>(world: &World) {
    let grid = Grid::new(world, GridShape { data: 1, stage: 1, tensor: world.size() }).unwrap();
    let mut sample = Sample::new(world, D::EVERY);
    for name in D::ORACLES {
        let oracle = Oracle::open(name);
        let mut expected = None;
        for (split, num_micro_batches) in
            [(Split::Pairs, 1), (Split::Pairs, 3), (Split::Gather, 1), (Split::Gather, 3)]
        {
            if !sample.takes_next() {
                continue;
            }
            let plan = ParallelPlan::single_stage(&oracle.model(), num_micro_batches).unwrap();
            let plan = ParallelPlan { split, ..plan };
            let found = oracle.check::<D>(&grid, SYNC, &plan);
            if D::SUMMATION != Summation::ByLayout {
                let serial = || oracle.check::<D>(&serial_grid(world), SYNC, &plan);
                assert_eq!(found, *expected.get_or_insert_with(serial), "{name}, {split:?}");
            }
        }
    }
}

/// Checks every schedule against PyTorch's numbers, and against the bits of one rank with the same
/// micro-batches. Takes one combination in `EVERY`.
pub fn pipeline_oracles<D: TestDevice, const EVERY: usize>(world: &World) {
    let (grid, alone) = (pipeline_grid(world), serial_grid(world));
    let mut sample = Sample::new(world, EVERY);
    for name in D::ORACLES {
        let oracle = Oracle::open(name);
        for num_micro_batches in [1, 4] {
            let serial = || {
                let plan = ParallelPlan::single_stage(&oracle.model(), num_micro_batches);
                oracle.check::<D>(&alone, SYNC, &plan.unwrap())
            };
            let mut expected = None;
            for &kind in PipelineScheduleKind::value_variants() {
                for recompute in [false, true] {
                    if !sample.takes_next() {
                        continue;
                    }
                    let plan = pipeline_plan(&oracle.model(), kind, world.size(), num_micro_batches);
                    let found = oracle.check::<D>(&grid, SYNC, &ParallelPlan { recompute, ..plan });
                    let expected = expected.get_or_insert_with(serial);
                    assert_eq!(found, *expected, "{name}, {kind:?}, {num_micro_batches} micro-batches");
                }
            }
        }
    }
}

/// Checks LeNet and the CIFAR net, whose stages pass images on.
pub fn pipeline_images<D: TestDevice>(world: &World) {
    let (grid, alone) = (pipeline_grid(world), serial_grid(world));
    for name in ["lenet_sgd", "cifar_net_adam"] {
        let oracle = Oracle::open(name);
        let serial = ParallelPlan::single_stage(&oracle.model(), 2).unwrap();
        let expected = oracle.check::<D>(&alone, SYNC, &serial);
        for kind in [PipelineScheduleKind::OneForwardOneBackward, PipelineScheduleKind::ZeroBubble] {
            let found =
                oracle.check::<D>(&grid, SYNC, &pipeline_plan(&oracle.model(), kind, world.size(), 2));
            assert_eq!(found, expected, "{name}, {kind:?}");
        }
    }
}

/// Checks uneven micro-batches, fewer samples than micro-batches in the last step of an epoch, and
/// a clipped gradient: they give the bits of one rank, however the stages are cut.
pub fn pipeline_same_bits<D: TestDevice>(world: &World) {
    let (grid, alone) = (pipeline_grid(world), serial_grid(world));
    let network = deep();
    for (num_micro_batches, clip_norm) in [(3, None), (8, Some(0.1))] {
        let mut rig = Rig::<D>::new(&network, Features::Flat(50), num_micro_batches, adamw(26, clip_norm));
        rig.num_samples = 57;
        let expected = rig.train(&alone, 9, 1e-2);
        for &kind in PipelineScheduleKind::value_variants() {
            let model = network.build(Features::Flat(50)).unwrap();
            rig.plan = pipeline_plan(&model, kind, world.size(), num_micro_batches);
            let found = rig.train(&grid, 9, 1e-2);
            assert_eq!(found.digest, expected.digest, "{kind:?}");
            assert_close("losses", &found.losses, &expected.losses, 1e-12);
            assert_close("tests", &[found.tested], &[expected.tested], 1e-6);
        }
        let mut sizes = vec![1; world.size()];
        sizes[0] = 9 - world.size();
        let schedule = schedule(PipelineScheduleKind::GPipe, world.size(), num_micro_batches);
        let model = network.build(Features::Flat(50)).unwrap();
        rig.plan = ParallelPlan::pipeline(&model, schedule, Some(&sizes)).unwrap();
        assert_eq!(rig.train(&grid, 9, 1e-2).digest, expected.digest, "{sizes:?}");
    }
}

/// Checks a user's schedule in the shape of a V: rank 0 has the first and the last stage, rank 1
/// the two in between.
pub fn stages_that_share_a_rank<D: TestDevice>(world: &World) {
    let (grid, alone) = (pipeline_grid(world), serial_grid(world));
    let network = deep();
    let mut rig = Rig::<D>::new(&network, Features::Flat(50), 2, adamw(26, None));
    let expected = rig.train(&alone, 5, 1e-2);
    for csv in [
        "0F0,3F0,3B0,0F1,3F1,0B0,3B1,0B1\n1F0,2F0,2B0,1F1,1B0,2F1,2B1,1B1\n",
        "0F0,3F0,3I0,0F1,3F1,0I0,3W0,3I1,0W0,0I1,3W1,0W1\n1F0,2F0,2I0,1F1,1I0,2W0,2F1,2I1,1W0,1B1,2W1\n",
    ] {
        let schedule = Schedule::from_csv(csv, "a test").unwrap();
        schedule.check().unwrap();
        let model = network.build(Features::Flat(50)).unwrap();
        for recompute in [false, true] {
            rig.keeps_samples = recompute;
            rig.plan =
                ParallelPlan { recompute, ..ParallelPlan::pipeline(&model, schedule.clone(), None).unwrap() };
            assert_eq!(rig.train(&grid, 5, 1e-2).digest, expected.digest, "{csv}");
        }
    }
}

/// Checks activations without a layer before them to fuse with, and scales, at the beginning and at the end
/// of stages, with the backward pass in halves.
pub fn activations_on_their_own<D: TestDevice>(world: &World) {
    let linear = |outputs| Module::linear(outputs, true);
    let gelu = || Module::Activation(Activation::Gelu);
    let scale = Module::LayerScale { initial: 0.5 };
    let modules = vec![linear(20), gelu(), gelu(), scale, linear(10), gelu(), gelu(), linear(10)];
    let network = Network { name: "odd".into(), modules, loss: Loss::CrossEntropy };
    let model = network.build(Features::Flat(50)).unwrap();
    let mut rig = Rig::<D>::new(&network, Features::Flat(50), 4, adamw(24, None));
    let expected = rig.train(&serial_grid(world), 5, 1e-2).digest;
    for sizes in [[1, 5], [2, 4], [3, 3], [4, 2], [5, 1]] {
        for kind in [PipelineScheduleKind::OneForwardOneBackward, PipelineScheduleKind::ZeroBubble] {
            for recompute in [false, true] {
                let plan = ParallelPlan::pipeline(&model, schedule(kind, 2, 4), Some(&sizes)).unwrap();
                rig.plan = ParallelPlan { recompute, ..plan };
                assert_eq!(rig.train(&pipeline_grid(world), 5, 1e-2).digest, expected, "{sizes:?} {kind:?}");
            }
        }
    }
}

/// Checks widths that the ranks do not divide, down to fewer columns than ranks, with an even and
/// an odd number of layers. Takes one combination in `D::EVERY`.
pub fn odd_widths<D: TestDevice>(world: &World) {
    let mut sample = Sample::new(world, D::EVERY);
    let grid = Grid::new(world, GridShape { data: 1, stage: 1, tensor: world.size() }).unwrap();
    let alone = serial_grid(world);
    for hidden in [&[][..], &[7], &[19, 3], &[2, 9, 1, 5], &[33, 17, 29]] {
        for (activation, bias) in
            [(Activation::Tanh, true), (Activation::Gelu, false), (Activation::Relu, true)]
        {
            if !sample.takes_next() {
                continue;
            }
            let network = Network::mlp(hidden, activation, bias, 3, Loss::CrossEntropy);
            let sgd = OptimizerSettings { momentum: 0.9, ..OptimizerSettings::new(Rule::Sgd) };
            let settings = TrainerSettings {
                optimizer: sgd,
                ..settings(21, SyncSettings { clip_norm: Some(0.7), ..SYNC })
            };
            let mut rig = Rig::<D>::new(&network, Features::Flat(11), 2, settings).classes(3);
            let serial = rig.train(&alone, 8, 0.05);
            for split in [Split::Pairs, Split::Gather] {
                rig.plan.split = split;
                let shared = rig.train(&grid, 8, 0.05);
                let what = format!("{hidden:?} {activation:?} {split:?}");
                assert_same::<D>(&shared, &serial, 1e-5);
                assert_close(&what, &[shared.tested], &[serial.tested], 1e-5);
                if D::SUMMATION == Summation::ByLayout {
                    assert_eq!(rig.train(&grid, 8, 0.05).digest, shared.digest, "{what}: the same twice");
                }
            }
        }
    }
}

/// Returns all shapes of grids of `size` ranks.
pub fn shapes(size: usize) -> Vec<GridShape> {
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let shape = |data: usize| {
        divisors(size / data).map(move |stage| GridShape { data, stage, tensor: size / data / stage })
    };
    divisors(size).flat_map(shape).collect()
}

/// Checks data × stage × tensor with every stage of ZeRO against PyTorch's numbers, under each
/// schedule, with and without recomputation, and against the bits of stage 0 in the same layout, or, on a
/// device whose sums have one order, in any.
/// Takes one combination in `EVERY`.
pub fn grids<D: TestDevice, const EVERY: usize>(world: &World) {
    let mut sample = Sample::new(world, EVERY);
    let mut digests = HashMap::new();
    for shape in shapes(world.size()) {
        let grid = Grid::new(world, shape).unwrap();
        for name in D::ORACLES {
            let oracle = Oracle::open(name);
            for (kind, split) in [
                (PipelineScheduleKind::OneForwardOneBackward, Split::Pairs),
                (PipelineScheduleKind::Interleaved, Split::Gather),
                (PipelineScheduleKind::ZeroBubble, Split::Pairs),
            ] {
                let plan = pipeline_plan(&oracle.model(), kind, shape.stage, 2);
                if plan.schedule.num_stages > oracle.model().runs().len() {
                    continue;
                }
                for (recompute, bucket_bytes) in [(false, 1234), (true, 25_000_000)] {
                    if !sample.takes_next() {
                        continue;
                    }
                    let plan = ParallelPlan { split, recompute, ..plan.clone() };
                    let check = |zero, accumulation| {
                        let sync = SyncSettings { zero: Some(zero), accumulation, bucket_bytes, ..SYNC };
                        oracle.check::<D>(&grid, sync, &plan)
                    };
                    let has_one_order = D::SUMMATION != Summation::ByLayout;
                    let expected = check(ZeroStage::None, Accumulation::Whole);
                    if has_one_order {
                        let first = *digests.entry(name).or_insert(expected);
                        assert_eq!(expected, first, "{name} {shape:?} {kind:?}");
                    }
                    for zero in [ZeroStage::Slots, ZeroStage::Gradients, ZeroStage::Parameters] {
                        let what = format!("{name} {shape:?} {kind:?} {zero:?}");
                        assert_eq!(check(zero, Accumulation::Whole), expected, "{what}");
                        let in_parts = check(zero, Accumulation::Parts);
                        assert!(!has_one_order || in_parts == expected, "{what}, in parts");
                    }
                }
            }
        }
    }
}

/// Checks a clipped gradient, a short last batch and replicas without samples on every grid against
/// the serial run.
pub fn grids_clipped<D: TestDevice>(world: &World) {
    let network = deep();
    let model = network.build(Features::Flat(50)).unwrap();
    let mut rig = Rig::<D>::new(&network, Features::Flat(50), 2, adamw(24, Some(0.1)));
    rig.num_samples = 49;
    let serial = rig.train(&serial_grid(world), 9, 1e-3);
    assert!(serial.norms[0] > 0.1, "the example must need clipping");
    for (data, stage, tensor) in [(2, 2, 2), (1, 4, 2), (2, 1, 4), (4, 2, 1), (8, 1, 1)] {
        let grid = Grid::new(world, GridShape { data, stage, tensor }).unwrap();
        for kind in [PipelineScheduleKind::GPipe, PipelineScheduleKind::ZeroBubble] {
            rig.plan = pipeline_plan(&model, kind, stage, 2);
            let found = rig.train(&grid, 9, 1e-3);
            assert_same::<D>(&found, &serial, 1e-5);
        }
    }
}

/// Checks that the initial weights have the same bits in every layout.
pub fn initial_weights<D: TestDevice>(world: &World) {
    let network = deep();
    let size = world.size();
    let mut rig = Rig::<D>::new(&network, Features::Flat(50), 1, adamw(26, None));
    let expected = rig.train(&serial_grid(world), 0, 0.0).digest;
    let model = network.build(Features::Flat(50)).unwrap();
    for split in [Split::Pairs, Split::Gather] {
        rig.plan.split = split;
        let grid = Grid::new(world, GridShape { data: 1, stage: 1, tensor: size }).unwrap();
        assert_eq!(rig.train(&grid, 0, 0.0).digest, expected, "{split:?}");
    }
    rig.plan = pipeline_plan(&model, PipelineScheduleKind::Interleaved, size, 1);
    assert_eq!(rig.train(&pipeline_grid(world), 0, 0.0).digest, expected);
}

fn deep() -> Network {
    Network::mlp(&DEEP, Activation::Gelu, true, 10, Loss::CrossEntropy)
}

pub fn adamw(batch_size: usize, clip_norm: Option<f64>) -> TrainerSettings {
    let sync = SyncSettings { clip_norm, ..SYNC };
    TrainerSettings { optimizer: OptimizerSettings::new(Rule::AdamW), ..settings(batch_size, sync) }
}
