//! Replicas on any device: they give PyTorch's numbers, the serial run's, and the same bits again.

use clap::ValueEnum as _;
use phalanx::comm::{Grid, GridShape, World};
use phalanx::dataset::Targets;
use phalanx::device::Activation;
use phalanx::device::Cpu;
use phalanx::memory;
use phalanx::nn::{Features, GptSizes, Loss, Network};
use phalanx::optim::{OptimizerSettings, Rule};
use phalanx::parallel::batch::Summation;
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::{Layout, ParallelPlan};
use phalanx::parallel::pipeline::footprint::{Footprint, FootprintSettings};
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::zero::{Accumulation, Gathering, ZeroStage};
use phalanx::train::TrainerSettings;

use super::layouts::{pipeline_plan, shapes};
use super::{Oracle, Rig, Run, Sample, TestDevice, assert_close, serial_grid, settings, small_table};

/// Returns ways to reduce gradients that must not change the result, each with a number of
/// micro-batches: every stage of ZeRO, large, layer-sized and odd buckets, with and without overlap.
pub fn ways() -> Vec<(SyncSettings, usize)> {
    let way = |bucket_bytes, zero, overlap| SyncSettings {
        bucket_bytes,
        zero: Some(zero),
        accumulation: Accumulation::Whole,
        overlap,
        clip_norm: None,
    };
    let in_parts = |sync| SyncSettings { accumulation: Accumulation::Parts, ..sync };
    vec![
        (way(25_000_000, ZeroStage::None, true), 1),
        (way(25_000_000, ZeroStage::Slots, true), 2),
        (way(1, ZeroStage::None, true), 3),
        (way(1, ZeroStage::Slots, false), 1),
        (way(1234, ZeroStage::Slots, true), 3),
        (way(1234, ZeroStage::None, false), 2),
        (way(1234, ZeroStage::Gradients, true), 1),
        (in_parts(way(1, ZeroStage::Gradients, true)), 3),
        (way(1234, ZeroStage::Parameters, true), 2),
        (way(1, ZeroStage::Parameters, false), 1),
        (in_parts(way(1, ZeroStage::Parameters, true)), 3),
    ]
}

pub fn oracle<D: TestDevice>(world: &World, name: &str) {
    let oracle = Oracle::open(name);
    let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
    let mut expected = None;
    for (sync, num_micro_batches) in ways() {
        let plan = ParallelPlan::single_stage(&oracle.model(), num_micro_batches).unwrap();
        let found = oracle.check::<D>(&grid, sync, &plan);
        if D::SUMMATION != Summation::ByLayout {
            let serial = || oracle.check::<D>(&serial_grid(world), sync, &plan);
            assert_eq!(found, *expected.get_or_insert_with(serial), "{name}, {sync:?}");
        }
    }
}

/// Compares N ranks that share a batch of 96 with one rank that has all of it: the parameters agree
/// after 50 steps to 10⁻⁵ of the largest. LeNet's learning rate is small here: some of its millions
/// of ReLUs and maxima are so close to their kink that the order of a sum decides, which shifts one
/// sample's gradient; with a large learning rate, 50 steps make 3·10⁻⁵ of it. On an emulated GPU, LeNet takes
/// two steps.
pub fn shared_batches<D: TestDevice>(world: &World) {
    let lenet_steps = if Sample::new(world, D::EVERY).takes_all() { 50 } else { 2 };
    let lenet = Network::lenet(10);
    let mlp = Network::mlp(&[33, 17], Activation::Gelu, true, 10, Loss::CrossEntropy);
    let image = Features::Image { height: 28, width: 28, channels: 1 };
    let momentum =
        OptimizerSettings { momentum: 0.9, weight_decay: 1e-4, ..OptimizerSettings::new(Rule::Sgd) };
    let gentle = OptimizerSettings { momentum: 0.5, ..OptimizerSettings::new(Rule::Sgd) };
    for (network, features, optimizer, rate) in [
        (lenet, image, gentle, 1e-3),
        (mlp, Features::Flat(50), OptimizerSettings::new(Rule::AdamW), 1e-3),
        (Network::deep_mlp(40, 3), Features::Flat(40), momentum, 0.05),
    ] {
        let run = |grid: &Grid, sync, num_micro_batches| {
            let settings = TrainerSettings { optimizer, ..settings(96, sync) };
            let rig = Rig::<D>::new(&network, features, num_micro_batches, settings);
            if network.name == "lenet" {
                rig.train_digits(grid, lenet_steps, rate)
            } else {
                rig.train(grid, 50, rate)
            }
        };
        let (sync, _) = ways()[0];
        let serial = run(&serial_grid(world), sync, 1);
        let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
        for (sync, num_micro_batches) in [ways()[0], ways()[1], ways()[4]] {
            let shared = run(&grid, sync, num_micro_batches);
            assert_same::<D>(&shared, &serial, 1e-4);
        }
    }
}

/// Compares a run with a serial one: to 10⁻⁵, with `of_norms` for the norms, and on a device whose sums have
/// one order by the bits of parameters and losses.
pub fn assert_same<D: TestDevice>(found: &Run, serial: &Run, of_norms: f64) {
    assert_close("losses", &found.losses, &serial.losses, 1e-5);
    assert_close("norms", &found.norms, &serial.norms, of_norms);
    assert_close("parameters", &found.parameters, &serial.parameters, 1e-5);
    if D::SUMMATION != Summation::ByLayout {
        assert_eq!(found.digest, serial.digest, "the bits of one rank");
        assert_eq!(found.losses, serial.losses, "the losses of one rank");
        assert_eq!(found.tested.to_bits(), serial.tested.to_bits(), "the test loss of one rank");
    }
}

pub fn clipping<D: TestDevice>(world: &World) {
    let network = Network::mlp(&[19], Activation::Relu, true, 10, Loss::CrossEntropy);
    let optimizer = OptimizerSettings { momentum: 0.9, ..OptimizerSettings::new(Rule::Sgd) };
    let run = |grid: &Grid, sync: SyncSettings, clip_norm| {
        let settings = TrainerSettings { optimizer, ..settings(24, SyncSettings { clip_norm, ..sync }) };
        Rig::<D>::new(&network, Features::Flat(50), 1, settings).train(grid, 10, 0.1)
    };
    let serial = run(&serial_grid(world), ways()[0].0, Some(0.2));
    let free = run(&serial_grid(world), ways()[0].0, None);
    assert!(serial.norms[0] > 0.2, "the example must need clipping");
    assert_eq!(serial.norms[0], free.norms[0], "the norm is the one before clipping");
    assert_ne!(serial.losses[1], free.losses[1]);
    let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
    for (sync, _) in ways() {
        let shared = run(&grid, sync, Some(0.2));
        assert_same::<D>(&shared, &serial, 1e-5);
    }
}

/// Trains on 50 samples in batches of 16. The last batch has 2, so with 3 and 4 ranks some have
/// none; there may also be more micro-batches than samples.
pub fn ranks_without_samples<D: TestDevice>(world: &World) {
    let network = Network::mlp(&[19], Activation::Relu, true, 10, Loss::CrossEntropy);
    let run = |grid: &Grid, sync, num_micro_batches| {
        let mut rig = Rig::<D>::new(&network, Features::Flat(50), num_micro_batches, settings(16, sync));
        rig.num_samples = 50;
        rig.train(grid, 12, 0.05)
    };
    let serial = run(&serial_grid(world), ways()[0].0, 1);
    let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
    for (sync, _) in ways() {
        for num_micro_batches in [1, 3, 16] {
            let shared = run(&grid, sync, num_micro_batches);
            assert_same::<D>(&shared, &serial, 1e-5);
        }
    }
}

/// Checks that all stages of ZeRO give the same bits in one layout: with every optimizer, with and
/// without clipping, with a short last batch, in one stage and in pipelines.
pub fn zero_same_bits<D: TestDevice>(world: &World) {
    let network = Network::mlp(&[33, 17, 29, 8], Activation::Gelu, true, 10, Loss::CrossEntropy);
    let model = network.build(Features::Flat(50)).unwrap();
    let grids = shapes(world.size()).into_iter().map(|shape| Grid::new(world, shape).unwrap());
    let grids: Vec<_> = grids.collect();
    let mut sample = Sample::new(world, D::EVERY);
    for (index, &rule) in Rule::value_variants().iter().enumerate().filter(|_| sample.takes_next()) {
        let clip_norm = [None, Some(0.1)][index % 2];
        let optimizer = OptimizerSettings { momentum: 0.9, ..OptimizerSettings::new(rule) };
        let run = |zero, bucket_bytes, grid: &Grid, num_micro_batches, plan: Option<ParallelPlan>| {
            let sync = SyncSettings { zero: Some(zero), bucket_bytes, clip_norm, ..ways()[0].0 };
            let gathering = if bucket_bytes == 1 { Gathering::Step } else { Gathering::Pass };
            let settings = TrainerSettings { optimizer, gathering, ..settings(24, sync) };
            let mut rig = Rig::<D>::new(&network, Features::Flat(50), num_micro_batches, settings);
            rig.num_samples = 49;
            rig.plan = plan.unwrap_or(rig.plan);
            rig.train(grid, 7, 1e-2).digest
        };
        for (bucket_bytes, num_micro_batches) in [(25_000_000, 1), (1234, 1), (1234, 4), (1, 3)] {
            let replicas = GridShape::data(world.size());
            let mut layouts = vec![(replicas, None)];
            if world.size().is_multiple_of(2) {
                let shape = GridShape { data: world.size() / 2, stage: 2, tensor: 1 };
                for kind in [
                    PipelineScheduleKind::OneForwardOneBackward,
                    PipelineScheduleKind::Interleaved,
                    PipelineScheduleKind::ZeroBubble,
                ] {
                    layouts.push((shape, Some(pipeline_plan(&model, kind, 2, num_micro_batches.max(2)))));
                }
                let plan = ParallelPlan::single_stage(&model, num_micro_batches).unwrap();
                layouts.push((GridShape { data: world.size() / 2, stage: 1, tensor: 2 }, Some(plan)));
            }
            for (shape, plan) in layouts {
                let grid = grids.iter().find(|grid| grid.shape == shape).unwrap();
                let run = |zero| run(zero, bucket_bytes, grid, num_micro_batches, plan.clone());
                let expected = run(ZeroStage::None);
                for zero in [ZeroStage::Slots, ZeroStage::Gradients, ZeroStage::Parameters] {
                    assert_eq!(run(zero), expected, "{rule:?} {shape:?} {zero:?} {bucket_bytes}");
                }
            }
        }
    }
}

/// Holds the memory that a plan says to the memory that a run allocates, for every way to reduce
/// gradients, with and without recomputation.
pub fn footprints(world: &World) {
    let network = Network::deep_mlp(300, 5);
    let model = network.build(Features::Flat(300)).unwrap();
    let size = world.size();
    let mut layouts = vec![(GridShape::data(size), PipelineScheduleKind::Sequential, false)];
    layouts.push((GridShape::data(size), PipelineScheduleKind::Sequential, true));
    layouts.push((GridShape { data: 1, stage: 1, tensor: size }, PipelineScheduleKind::Sequential, false));
    if size.is_multiple_of(2) {
        let shape = GridShape { data: size / 2, stage: 2, tensor: 1 };
        layouts.push((shape, PipelineScheduleKind::OneForwardOneBackward, true));
        layouts.push((shape, PipelineScheduleKind::OneForwardOneBackward, false));
        layouts.push((shape, PipelineScheduleKind::ZeroBubble, true));
    }
    for (shape, kind, recompute) in layouts {
        let grid = Grid::new(world, shape).unwrap();
        for ((sync, num_micro_batches), optimizer) in
            ways().into_iter().zip([Rule::AdamW, Rule::Sgd].repeat(9))
        {
            let plan = pipeline_plan(&model, kind, shape.stage, num_micro_batches);
            let plan = Cpu::summed(&ParallelPlan { recompute, ..plan });
            let gathering = if optimizer == Rule::Sgd { Gathering::Step } else { Gathering::Pass };
            let optimizer = OptimizerSettings::new(optimizer);
            let settings = TrainerSettings { optimizer, gathering, ..settings(64, sync) };
            let mut rig = Rig::<Cpu>::new(&network, Features::Flat(300), 1, settings);
            rig.plan = plan;
            let (expected, found) = footprint(&rig, &grid);
            let exchange = if shape.tensor > 1 { expected.messages } else { 0 };
            let least = expected.total() - expected.messages - expected.joined;
            let most = least + exchange + least / 50 + 4096;
            assert!((least..=most).contains(&found), "{found} {expected:?} {shape:?} {kind:?} {sync:?}");
        }
    }
    if size.is_multiple_of(2) {
        shared_tensors_memory(world);
    }
}

/// Trains for two steps. Returns the memory that the plan says and the bytes that were allocated and lasted:
/// the memory of messages depends on how many are under way at a time.
pub fn footprint(rig: &Rig<'_, Cpu>, grid: &Grid) -> (Footprint, usize) {
    let TrainerSettings { batch_size, sync, optimizer, gathering, .. } = rig.settings;
    let (shape, stage_rank, num_slots) = (grid.shape, grid.stage.rank(), optimizer.num_slots());
    let layout = Layout::new(&rig.model, shape, grid.all.rank(), &rig.plan).unwrap();
    let settings = FootprintSettings { shape, stage_rank, batch_size, sync, num_slots, gathering };
    let expected = Footprint::new(&layout, &rig.plan, &settings);
    let lasting = || memory::num_mapped_bytes() - memory::scratch::num_bytes();
    let before = lasting();
    rig.train(grid, 2, 1e-3);
    (expected, lasting() - before)
}

/// Holds the memory of a tensor that the first and the last stage use to the memory that a run allocates.
fn shared_tensors_memory(world: &World) {
    let network = Network::gpt(GptSizes { layers: 2, heads: 2, width: 64, bias: true, dropout: 0.0 });
    let (len, vocabulary) = (8, 2000);
    let shape = GridShape { data: world.size() / 2, stage: 2, tensor: 1 };
    let grid = Grid::new(world, shape).unwrap();
    for (sync, num_micro_batches) in ways() {
        let settings = settings(16, sync);
        let mut rig = Rig::<Cpu>::new(&network, Features::Tokens { len, vocabulary }, 1, settings)
            .with_targets(Targets::Tokens { len, vocabulary });
        let kind = PipelineScheduleKind::OneForwardOneBackward;
        rig.plan = Cpu::summed(&pipeline_plan(&rig.model, kind, 2, num_micro_batches));
        let (expected, found) = footprint(&rig, &grid);
        assert!(expected.shared >= 2 * 64 * vocabulary / shape.data, "{expected:?}");
        let least = expected.total() - expected.messages - expected.joined;
        assert!((least..=least + least / 50 + 4096).contains(&found), "{found} {expected:?} {sync:?}");
    }
}

pub fn the_same_twice<D: TestDevice>(world: &World) {
    let grid = Grid::new(world, GridShape::data(world.size())).unwrap();
    let image = Features::Image { height: 28, width: 28, channels: 1 };
    let network = Network::lenet(10);
    let mut sample = Sample::new(world, D::EVERY);
    for (sync, num_micro_batches) in ways().into_iter().filter(|_| sample.takes_next()) {
        let settings = settings(32, sync);
        let digest = |recompute| {
            let mut rig = Rig::<D>::new(&network, image, num_micro_batches, settings);
            rig.plan.recompute = recompute;
            rig.train(&grid, 5, 0.05).digest
        };
        let expected = digest(false);
        assert_eq!(digest(false), expected);
        assert_eq!(digest(true), expected, "with recomputation");
    }
}

/// Fits y = x₁w₁ + x₂w₂ + b, item by item and with both items at once. The gradient is the mean, so
/// twice the learning rate gives the textbook's step with the sum.
pub fn gradient_descent<D: TestDevice>(world: &World) {
    let network = Network::mlp(&[], Activation::Relu, true, 1, Loss::MeanSquaredError);
    let start = [0.773, 0.321, 0.067];
    let mut table = small_table(Features::Flat(2), &[6.0, 2.0, 5.0, 2.0], &[15.0, 12.0]);
    let grids = [serial_grid(world), Grid::new(world, GridShape::data(world.size())).unwrap()];
    let (sync, _) = ways()[0];
    let check = |rig: &Rig<'_, D>, grid: &Grid, rate, expected: &[[f64; 4]], table: &mut Option<_>| {
        let run = rig.train_table(grid, expected.len() as u64, rate, &start, table.take().unwrap());
        for (step, [loss, parameters @ ..]) in expected.iter().enumerate() {
            assert!((run.losses[step] - loss).abs() < 2e-3, "loss {} is not {loss}", run.losses[step]);
            if step + 1 == expected.len() {
                for (found, expected) in run.parameters.iter().zip(parameters) {
                    assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
                }
            }
        }
    };
    let single = Rig::<D>::new(&network, Features::Flat(2), 1, settings(1, sync));
    let items = [[93.180, 0.8888, 0.3596, 0.0863], [45.5664, 0.9563, 0.3866, 0.0998]];
    let mut next = || {
        Some(std::mem::replace(
            &mut table,
            small_table(Features::Flat(2), &[6.0, 2.0, 5.0, 2.0], &[15.0, 12.0]),
        ))
    };
    check(&single, &grids[0], 1e-3, &items, &mut next());
    // the gradients of both items together, as means
    let rig = Rig::<D>::new(&network, Features::Flat(2), 1, settings(2, sync));
    for grid in &grids {
        let run = rig.train_table(grid, 1, 0.0, &start, next().unwrap());
        for (found, expected) in run.gradients.iter().zip([-190.096, -68.316, -34.158]) {
            assert!((2.0 * found - expected).abs() < 2e-3, "{found} is not half of {expected}");
        }
    }
    let first = single.train_table(&grids[0], 1, 1e-3, &start, next().unwrap());
    for (found, expected) in first.gradients.iter().zip([-115.836, -38.612, -19.306]) {
        assert!((found - expected).abs() < 2e-3, "{found} is not {expected}");
    }
    for (found, expected) in first.parameters.iter().zip([0.8888, 0.3596, 0.0863]) {
        assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
    }
    let both = [[0.5 * (93.180 + 55.1455), 0.9631, 0.3893, 0.1012]];
    for num_micro_batches in [1, 2] {
        let rig = Rig::<D>::new(&network, Features::Flat(2), num_micro_batches, settings(2, sync));
        for grid in &grids {
            check(&rig, grid, 2e-3, &both, &mut next());
        }
    }
}
