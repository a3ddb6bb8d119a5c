//! Audits find flipped bits in audited work, name the rank and the tensor, and find nothing else.

use phalanx::comm::{Grid, GridShape, Operation, World};
use phalanx::dataset::Targets;
use phalanx::device::Activation;
use phalanx::memory;
use phalanx::nn::{Attention, Features, Loss, Module, Network};
use phalanx::optim::{OptimizerSettings, Rule};
use phalanx::parallel::audit::{AuditAction, AuditSettings, needed_bytes};
use phalanx::parallel::layout::{self, ParallelPlan};
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::tensor::Split;
use phalanx::parallel::watch::{Fault, FaultKind};
use phalanx::parallel::zero::{Accumulation, ZeroStage};
use phalanx::train::{Trainer, TrainerSettings};

use crate::support::equivalence::{Rig, replicas, settings, take_step};
use crate::support::soak;

const KINDS: [FaultKind; 6] = [
    FaultKind::Product,
    FaultKind::Weight,
    FaultKind::Gradient,
    FaultKind::Update,
    FaultKind::Message,
    FaultKind::Received,
];

/// Faults of each kind in each layout.
const FAULTS: u64 = 2;

/// Faults of each kind in each layout under `make soak`: more than 1,000 in all.
const SOAK_FAULTS: u64 = 21;

/// Steps without a fault in each layout, of which every second is audited.
const SOUND_STEPS: u64 = 40;

/// Leaves of the audits under `make soak` that must find nothing, over all layouts of a number of ranks.
const SOAK_LEAVES: u64 = 340_000;

/// A layout and its number of micro-batches.
#[derive(Clone, Copy)]
struct Layout {
    shape: GridShape,
    schedule: PipelineScheduleKind,
    split: Split,
    num_micro_batches: usize,
    zero: ZeroStage,
    accumulation: Accumulation,
    /// For the network with residuals, the numbers of layers of its stages, of which one has no tensors.
    sizes: Option<&'static [usize]>,
    /// True for a network of sequences whose positions the ranks of the tensor axis share.
    shares_positions: bool,
}

/// Returns a small transformer, whose output has the weight of its embedding.
fn transformer() -> Network {
    let linear = |outputs| Module::linear(outputs, true);
    let (norm, dropout) = (Module::LayerNorm { bias: true }, Module::Dropout { rate: 0.1 });
    let attention = Module::Attention(Attention {
        heads: 3,
        key_value_heads: 3,
        causal: true,
        rotary: None,
        dropout: 0.1,
        bias: true,
        deviation: None,
        output_deviation: None,
    });
    let residual = |body| Module::Residual { body, shortcut: vec![] };
    let modules = vec![
        Module::Embedding { width: 12, deviation: 1.0 },
        Module::Positions { deviation: 1.0 },
        residual(vec![norm.clone(), attention, dropout.clone()]),
        residual(vec![norm.clone(), linear(20), Module::Activation(Activation::Gelu), linear(12), dropout]),
        norm,
        Module::TiedOutput,
    ];
    Network { name: "transformer".into(), modules, loss: Loss::CrossEntropy }
}

/// Returns a network of residuals that ends with an activation on its own, through which the loss takes its
/// gradient: four layers for a pipeline.
fn residuals() -> Network {
    let linear = |outputs| Module::linear(outputs, true);
    let (norm, gelu) = (Module::LayerNorm { bias: true }, Module::Activation(Activation::Gelu));
    let modules = vec![
        linear(24),
        Module::Residual { body: vec![norm.clone(), linear(20), gelu, linear(24)], shortcut: vec![] },
        Module::Residual { body: vec![norm, linear(10)], shortcut: vec![linear(10)] },
        Module::Activation(Activation::Tanh),
    ];
    Network { name: "residuals".into(), modules, loss: Loss::MeanOfSquares }
}

fn all_layouts(num_ranks: usize) -> Vec<Layout> {
    let layout = |data, stage, tensor, num_micro_batches| Layout {
        shape: GridShape { data, stage, tensor },
        schedule: PipelineScheduleKind::OneForwardOneBackward,
        split: Split::Pairs,
        num_micro_batches,
        zero: ZeroStage::Slots,
        accumulation: Accumulation::Whole,
        sizes: None,
        shares_positions: false,
    };
    let sequences = |layout| Layout { shares_positions: true, ..layout };
    let residual = |sizes, layout| Layout { sizes: Some(sizes), ..layout };
    let gather = |layout| Layout { split: Split::Gather, ..layout };
    let deferred = |layout| Layout { schedule: PipelineScheduleKind::Deferred, ..layout };
    let zero = |zero, layout| Layout { zero, accumulation: Accumulation::Parts, ..layout };
    match num_ranks {
        2 => vec![
            layout(2, 1, 1, 1),
            layout(1, 2, 1, 4),
            layout(1, 1, 2, 2),
            residual(&[], layout(1, 1, 2, 1)),
            zero(ZeroStage::Gradients, layout(2, 1, 1, 4)),
            sequences(layout(1, 1, 2, 2)),
        ],
        3 => vec![
            Layout { zero: ZeroStage::None, ..layout(3, 1, 1, 2) },
            gather(layout(1, 1, 3, 1)),
            layout(1, 1, 3, 2),
            residual(&[1, 2, 1], layout(1, 3, 1, 2)),
            deferred(layout(1, 3, 1, 9)),
            sequences(layout(1, 1, 3, 1)),
        ],
        _ => vec![
            layout(4, 1, 1, 4),
            deferred(layout(2, 2, 1, 3)),
            layout(2, 1, 2, 1),
            layout(1, 2, 2, 2),
            residual(&[3, 1], layout(2, 2, 1, 2)),
            sequences(deferred(layout(1, 2, 2, 3))),
            zero(ZeroStage::Parameters, layout(4, 1, 1, 3)),
        ],
    }
}

/// Returns the number of the network that is trained in a layout.
fn network_of(layout: &Layout) -> usize {
    if layout.shares_positions { 2 } else { usize::from(layout.sizes.is_some()) }
}

/// Calls `work` with a trainer whose audits are every second step in each layout.
fn in_each_layout(world: &World, mut work: impl FnMut(&Layout, &Grid, &mut Rig<'_>, ParallelPlan)) {
    let mlp = Network::mlp(&[24, 20, 16, 12], Activation::Relu, true, 10, Loss::CrossEntropy);
    let residuals = residuals();
    let transformer = transformer();
    for layout in all_layouts(world.size()) {
        let grid = Grid::new(world, layout.shape).unwrap();
        let Layout { zero, accumulation, .. } = layout;
        let sync = phalanx::parallel::data::SyncSettings {
            bucket_bytes: 2000,
            zero: Some(zero),
            accumulation,
            clip_norm: Some(1.0),
            ..replicas::ways()[0].0
        };
        let mut settings = settings(37, sync);
        settings.optimizer = OptimizerSettings { weight_decay: 0.01, ..OptimizerSettings::new(Rule::AdamW) };
        let (network, features) = match &layout {
            Layout { shares_positions: true, .. } => {
                (&transformer, Features::Tokens { len: 7, vocabulary: 21 })
            }
            Layout { sizes: Some(_), .. } => (&residuals, Features::Flat(30)),
            _ => (&mlp, Features::Flat(30)),
        };
        let mut rig = Rig::new(network, features, layout.num_micro_batches, settings);
        if let Features::Tokens { len, vocabulary } = features {
            rig = rig.with_targets(Targets::Tokens { len, vocabulary });
        }
        if layout.shape.stage > 1 {
            let (kind, num) = (layout.schedule, layout.num_micro_batches);
            let schedule = kind.generate(layout.shape.stage, 1, num).unwrap();
            rig.plan = ParallelPlan::pipeline(rig.model(), schedule, layout.sizes).unwrap();
        }
        rig.plan.split = layout.split;
        rig.plan.sequence_parallel = layout.shares_positions;
        rig.plan.keeps_gradients = true;
        let plan = rig.summed_plan();
        work(&layout, &grid, &mut rig, plan);
    }
}

fn audited(
    rig: &Rig<'_>,
    grid: &Grid,
    plan: &ParallelPlan,
    work: impl FnOnce(&mut Trainer<'_, phalanx::device::Cpu>),
) {
    rig.with_trainer(grid, |trainer| {
        let audits = AuditSettings { every: 2, action: AuditAction::Stop, fault: None };
        trainer.audit(plan, rig.settings().sync, rig.settings().batch_size, audits).unwrap();
        work(trainer);
    });
}

/// Flips bits of every kind, one after the other, and requires the next audit to name the rank and the
/// tensor of at least 99 of 100.
pub fn finds_faults(world: &World) {
    let (mut num_faults, mut num_found) = (0, 0);
    in_each_layout(world, |layout, grid, rig, plan| {
        audited(rig, grid, &plan, |trainer| {
            let start = rig.parameters(grid, trainer);
            let mut batches = rig.synthetic();
            let mut step = 0;
            for number in 0..if soak().is_some() { SOAK_FAULTS } else { FAULTS } {
                for kind in KINDS {
                    // a weight of which there is one copy cannot be compared
                    let has_copies = layout.shape.data > 1 && layout.zero < ZeroStage::Parameters;
                    let is_in_copy = matches!(kind, FaultKind::Weight | FaultKind::Received);
                    if is_in_copy && !has_copies {
                        continue;
                    }
                    let rank = (number as usize + 1) % world.size();
                    // a stage of activations alone has no parameters
                    let part = layout::Layout::new(rig.model(), layout.shape, rank, &plan).unwrap();
                    let is_computed = matches!(kind, FaultKind::Product | FaultKind::Message);
                    if part.tensors.is_empty() && !is_computed {
                        continue;
                    }
                    rig.restore(trainer, &start);
                    let is_stuck = number % 2 == 1;
                    let choice = 1_000_003 * (number + 1) + 7 * kind as u64;
                    // the fault of a step that is not audited stays until the next
                    let at = if is_stuck { step + 1 } else { step + 2 };
                    trainer.inject(Some(Fault { kind, rank, step: at, is_stuck, choice }));
                    take_step(trainer, step, &mut batches).unwrap();
                    let outcome = take_step(trainer, step + 1, &mut batches);
                    step += 2;
                    num_faults += 1;
                    let Err(error) = outcome else {
                        if world.is_root() {
                            println!("not found: {kind:?} {choice} on rank {rank} of {:?}", layout.shape);
                        }
                        continue;
                    };
                    num_found += 1;
                    let words = error.to_string();
                    assert!(words.contains(&format!("auditing step {step}: ")), "{words}");
                    let names_rank = words.contains(&format!("on rank {rank} differs"))
                        || is_in_copy && words.contains(&format!("rank {rank} "));
                    assert!(names_rank, "{kind:?} on rank {rank}: {words}");
                    let names_tensor = rig.tensor_names().any(|name| words.contains(name));
                    let has_no_tensor = words.contains(" has sent,")
                        || network_of(layout) > 0 && words.contains(" of layer ");
                    assert!(names_tensor || has_no_tensor, "{words}");
                    assert!(!words.contains(&format!("confirms rank {rank};")), "{words}");
                    let has_third = match layout.shape.data {
                        1 => world.size() > 2 && !words.contains("before the step"),
                        2 => false,
                        _ => layout.zero < ZeroStage::Parameters,
                    };
                    if has_third {
                        assert!(words.contains(" confirms rank "), "{words}");
                    }
                    assert_eq!(error.exit_code(), 1);
                }
            }
        });
    });
    if world.is_root() {
        println!("counted: {num_found} of {num_faults} faults found on {} ranks", world.size());
    }
    assert!(100 * num_found >= 99 * num_faults, "{num_found} of {num_faults} found");
}

/// Holds the memory that is planned for audits to that which is allocated.
fn check_memory(layout: &Layout, grid: &Grid, rig: &Rig<'_>, plan: &ParallelPlan) {
    let TrainerSettings { sync, batch_size, .. } = *rig.settings();
    let planned = needed_bytes(rig.model(), plan, layout.shape, sync, batch_size).unwrap();
    let lasting = || memory::num_mapped_bytes() - memory::scratch::num_bytes();
    rig.with_trainer(grid, |trainer| {
        let before = lasting();
        let audits = AuditSettings { every: 2, action: AuditAction::Stop, fault: None };
        trainer.audit(plan, sync, batch_size, audits).unwrap();
        let mut found = [(lasting() - before) as f64];
        grid.all.all_reduce(&mut found, Operation::Max).unwrap();
        let off = (found[0] - planned as f64).abs();
        assert!(off <= 4096.0, "{} bytes, not {planned}, for {:?}", found[0], layout.shape);
    });
}

/// Audits sound steps, which must find nothing and change no bit.
pub fn finds_nothing_else(world: &World) {
    let num_layouts = all_layouts(world.size()).len() as u64;
    let soak_steps = 2 * SOAK_LEAVES / num_layouts / world.size() as u64;
    let num_steps = if soak().is_some() { soak_steps } else { SOUND_STEPS };
    let mut digests = [Vec::new(), Vec::new(), Vec::new()];
    in_each_layout(world, |layout, grid, rig, plan| {
        let mut batches = rig.synthetic();
        check_memory(layout, grid, rig, &plan);
        audited(rig, grid, &plan, |trainer| {
            for step in 0..num_steps {
                take_step(trainer, step, &mut batches).unwrap();
            }
            digests[network_of(layout)].push(trainer.digest().unwrap());
        });
        // without audits, gradients share memory
        rig.plan.keeps_gradients = false;
        let mut batches = rig.synthetic();
        rig.with_trainer(grid, |trainer| {
            for step in 0..num_steps {
                take_step(trainer, step, &mut batches).unwrap();
            }
            digests[network_of(layout)].push(trainer.digest().unwrap());
        });
    });
    let is_same = |digests: &Vec<u128>| digests.iter().all(|digest| *digest == digests[0]);
    assert!(digests.iter().all(is_same), "{digests:x?}");
    if world.is_root() {
        let num_leaves = num_steps / 2 * num_layouts * world.size() as u64;
        println!("counted: {num_leaves} leaves audited on {} ranks, nothing found", world.size());
    }
}
