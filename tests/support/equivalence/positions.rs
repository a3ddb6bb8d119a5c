//! Sequence parallelism: ranks that have some of the positions of sequences each end with PyTorch's numbers,
//! and on a CPU with the bits of one rank.

use phalanx::comm::{Grid, GridShape, World};
use phalanx::dataset::Targets;
use phalanx::device::{Activation, Cpu, Gate};
use phalanx::nn::{Attention, Features, GptSizes, Loss, Module, Network};
use phalanx::parallel::batch::Summation;
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::tensor::Split;
use phalanx::parallel::zero::ZeroStage;

use super::layouts::{SYNC, adamw, pipeline_plan, shapes};
use super::replicas::footprint;
use super::{Oracle, Rig, Sample, TestDevice, assert_close, serial_grid, settings};

const SCHEDULES: [(PipelineScheduleKind, usize); 4] = [
    (PipelineScheduleKind::OneForwardOneBackward, 2),
    (PipelineScheduleKind::Interleaved, 3),
    (PipelineScheduleKind::ZeroBubble, 3),
    (PipelineScheduleKind::Deferred, 4),
];

/// Returns the schedules, with their micro-batches: two on a device that is emulated.
fn schedules<D: TestDevice>() -> impl Iterator<Item = (PipelineScheduleKind, usize)> {
    let every = if D::SUMMATION == Summation::ByLayout { 3 } else { 1 };
    SCHEDULES.into_iter().step_by(every)
}

/// Returns the shapes of grids of `size` ranks of which several share layers.
fn shared_shapes(size: usize) -> impl Iterator<Item = GridShape> {
    shapes(size).into_iter().filter(|shape| shape.tensor > 1)
}

/// Checks PyTorch's GPTs in every grid of which several ranks share layers, with and without recomputation,
/// with each stage of ZeRO.
pub fn shared_positions_oracles<D: TestDevice>(world: &World) {
    let mut sample = Sample::new(world, D::EVERY);
    for name in ["gpt_bias_adamw", "gpt_nobias_decay_clip"] {
        let oracle = Oracle::open(name);
        let plan = ParallelPlan::single_stage(&oracle.model(), 2).unwrap();
        let expected = oracle.check::<D>(&serial_grid(world), SYNC, &plan);
        let mut number = 0;
        for shape in shared_shapes(world.size()) {
            let grid = Grid::new(world, shape).unwrap();
            for (kind, num_micro_batches) in schedules::<D>() {
                let plan = pipeline_plan(&oracle.model(), kind, shape.stage, num_micro_batches);
                for split in [Split::Pairs, Split::Gather] {
                    number += 1;
                    if !sample.takes_next() {
                        continue;
                    }
                    let stages =
                        [ZeroStage::None, ZeroStage::Slots, ZeroStage::Gradients, ZeroStage::Parameters];
                    let zero = if shape.data > 1 { stages[number / 2 % 4] } else { ZeroStage::None };
                    let sync = SyncSettings { zero: Some(zero), ..SYNC };
                    let recompute = number % 3 == 0;
                    let plan = ParallelPlan { split, recompute, sequence_parallel: true, ..plan.clone() };
                    let found = oracle.check::<D>(&grid, sync, &plan);
                    if D::SUMMATION != Summation::ByLayout {
                        assert_eq!(
                            found, expected,
                            "{name} {shape:?} {kind:?} {split:?} {zero:?} {recompute}"
                        );
                    }
                }
            }
        }
    }
}

/// Returns attention of `heads` heads with rotary positions.
fn attention(heads: usize) -> Module {
    Module::Attention(Attention {
        heads,
        key_value_heads: heads,
        causal: true,
        rotary: Some(100.0),
        dropout: 0.2,
        bias: false,
        deviation: None,
        output_deviation: None,
    })
}

fn residual(body: Vec<Module>) -> Module {
    Module::Residual { body, shortcut: vec![] }
}

/// Returns networks of sequences of `len` positions, with the shapes of their samples and their targets.
fn networks(len: usize) -> Vec<(Network, Features, Targets)> {
    let linear = |outputs| Module::linear(outputs, true);
    let dropout = || Module::Dropout { rate: 0.2 };
    let norm = || Module::LayerNorm { bias: true };
    let gelu = || Module::Activation(Activation::Gelu);
    let embedding = Module::Embedding { width: 12, deviation: 1.0 };
    let tokens = |vocabulary| (Features::Tokens { len, vocabulary }, Targets::Tokens { len, vocabulary });
    let classifier = |name: &str, modules: Vec<Module>, vocabulary| {
        let network = Network { name: name.into(), modules, loss: Loss::CrossEntropy };
        let (features, targets) = tokens(vocabulary);
        (network, features, targets)
    };
    let squares = |name: &str, modules: Vec<Module>, features| {
        let network = Network { name: name.into(), modules, loss: Loss::MeanOfSquares };
        (network, features, Targets::Nothing)
    };
    let sizes = GptSizes { layers: 2, heads: 2, width: 12, bias: true, dropout: 0.1 };
    let (features, targets) = tokens(23);
    let sequence = Features::Sequence { len, width: 6 };
    vec![
        (Network::gpt(sizes), features, targets),
        classifier(
            "llama",
            vec![
                embedding.clone(),
                residual(vec![Module::RmsNorm, attention(3), dropout()]),
                residual(vec![
                    Module::RmsNorm,
                    linear(20),
                    Module::GatedLinearUnit { gate: Gate::Silu },
                    linear(12),
                    dropout(),
                ]),
                Module::RmsNorm,
                linear(19),
            ],
            19,
        ),
        // few classes, an activation after a sum, a shortcut with a layer, and a norm at the end of a body
        classifier(
            "mixed",
            vec![
                embedding.clone(),
                Module::Positions { deviation: 0.5 },
                Module::Residual {
                    body: vec![
                        norm(),
                        linear(9),
                        gelu(),
                        linear(8),
                        Module::Activation(Activation::Tanh),
                        norm(),
                    ],
                    shortcut: vec![linear(8), gelu()],
                },
                gelu(),
                linear(5),
            ],
            5,
        ),
        squares(
            "flattened",
            vec![norm(), linear(8), residual(vec![norm(), gelu(), linear(8)]), Module::Flatten, linear(4)],
            sequence,
        ),
        // what looks like a pair of linear layers, but for the flattening between them
        squares(
            "flattened pair",
            vec![linear(6), residual(vec![norm()]), linear(9), gelu(), Module::Flatten, linear(4)],
            sequence,
        ),
        squares("norms", vec![residual(vec![linear(6), norm(), dropout()]), norm(), dropout()], sequence),
        squares(
            "of one feature",
            vec![linear(2), Module::GatedLinearUnit { gate: Gate::Sigmoid }, norm()],
            sequence,
        ),
    ]
}

/// Checks networks of every kind, with numbers of positions that the ranks do not divide, down to fewer than
/// ranks, in every split, with uneven batches.
pub fn shared_positions_same_bits<D: TestDevice>(world: &World) {
    // on a device that sums in orders of its own, only the smallest case, in which ranks have no positions
    check_lengths::<D>(world, if D::SUMMATION == Summation::ByLayout { &[2] } else { &[8, 2] });
}

/// Like [`shared_positions_same_bits`], for a length that no number of ranks divides, in a process of its
/// own: each grid has communicators of its own.
pub fn shared_positions_same_bits_of_five<D: TestDevice>(world: &World) {
    check_lengths::<D>(world, &[5]);
}

fn check_lengths<D: TestDevice>(world: &World, lengths: &[usize]) {
    let serial = serial_grid(world);
    let is_exact = D::SUMMATION != Summation::ByLayout;
    let tolerance = if is_exact { 1e-5 } else { 1e-3 };
    for &len in lengths {
        for (network, features, targets) in networks(len) {
            let mut rig = Rig::<D>::new(&network, features, 1, adamw(11, Some(0.5))).with_targets(targets);
            rig.num_samples = 37;
            let expected = rig.train(&serial, 4, 1e-2);
            let num_runs = rig.model().runs().len();
            for (number, shape) in shared_shapes(world.size()).enumerate() {
                let grid = Grid::new(world, shape).unwrap();
                for (kind, num_micro_batches) in schedules::<D>() {
                    let num_stages =
                        shape.stage * if kind == PipelineScheduleKind::Interleaved { 2 } else { 1 };
                    if num_stages > num_runs {
                        continue;
                    }
                    let plan = pipeline_plan(rig.model(), kind, shape.stage, num_micro_batches);
                    let cases = [(Split::Pairs, true), (Split::Gather, true), (Split::Pairs, false)];
                    for (split, sequence_parallel) in cases {
                        let is_first = kind == PipelineScheduleKind::OneForwardOneBackward;
                        if !sequence_parallel && !is_first {
                            continue;
                        }
                        let recompute = (number + num_micro_batches) % 2 == 0;
                        rig.plan = ParallelPlan { split, recompute, sequence_parallel, ..plan.clone() };
                        let found = rig.train(&grid, 4, 1e-2);
                        let what = format!(
                            "{} of {len} {shape:?} {kind:?} {split:?} {sequence_parallel}",
                            network.name
                        );
                        assert_close(&what, &found.losses, &expected.losses, tolerance);
                        assert_close(&what, &found.norms, &expected.norms, tolerance);
                        assert_close(&what, &[found.tested], &[expected.tested], tolerance);
                        if is_exact {
                            assert_eq!(found.digest, expected.digest, "{what}");
                        }
                    }
                }
            }
        }
    }
}

/// Holds the memory that a plan says to the memory that a run allocates, and to that of whole positions.
pub fn shared_positions_memory(world: &World) {
    let network = Network::gpt(GptSizes { layers: 4, heads: 4, width: 64, bias: true, dropout: 0.1 });
    let (len, vocabulary) = (64, 40);
    let features = Features::Tokens { len, vocabulary };
    let model = network.build(features).unwrap();
    let shape = GridShape { data: 1, stage: 1, tensor: world.size() };
    let grid = Grid::new(world, shape).unwrap();
    for recompute in [false, true] {
        let need = |sequence_parallel| {
            let settings = settings(16, SYNC);
            let plan = ParallelPlan::single_stage(&model, 2).unwrap();
            let plan = Cpu::summed(&ParallelPlan { sequence_parallel, recompute, ..plan });
            let mut rig = Rig::<Cpu>::new(&network, features, 2, settings);
            rig = rig.with_targets(Targets::Tokens { len, vocabulary });
            rig.plan = plan;
            let (expected, found) = footprint(&rig, &grid);
            let least = expected.total() - expected.messages;
            let most = expected.total() + least / 50 + 4096;
            assert!((least..=most).contains(&found), "{found} {expected:?} {sequence_parallel}");
            expected.activations
        };
        let (whole, shared) = (need(false), need(true));
        assert!(10 * shared < 9 * whole, "{shared} and {whole} bytes of activations, {recompute}");
        log_memory(world, whole, shared);
    }
}

fn log_memory(world: &World, whole: usize, shared: usize) {
    if world.rank() == 0 {
        println!("{} ranks: {whole} bytes of activations, {shared} with shared positions", world.size());
    }
}
