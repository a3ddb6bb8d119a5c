//! The serial run's numbers from every layout: stages, shared layers, replicas, and all of them at once.

mod equivalence_support;
mod support;

use clap::ValueEnum;
use equivalence_support::{Rig, layouts};
use phalanx::comm::{Grid, GridShape, World};
use phalanx::device::Cpu;
use phalanx::nn::{Features, Network};
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::tensor::Split;
use support::cases::{self, Case};

#[global_allocator]
static ALLOCATOR: equivalence_support::Watched = equivalence_support::Watched;

const ALL: &[usize] = &[1, 2, 3, 4];

static CASES: &[Case] = &[
    Case { name: "tensor_oracles", ranks: ALL, run: layouts::tensor_oracles::<Cpu> },
    Case { name: "pipeline_oracles", ranks: ALL, run: layouts::pipeline_oracles::<Cpu> },
    Case { name: "pipeline_images", ranks: ALL, run: layouts::pipeline_images::<Cpu> },
    Case { name: "pipeline_same_bits", ranks: &[2, 3, 4, 5], run: layouts::pipeline_same_bits::<Cpu> },
    Case { name: "stages_that_share_a_rank", ranks: &[2], run: layouts::stages_that_share_a_rank::<Cpu> },
    Case { name: "activations_on_their_own", ranks: &[2], run: layouts::activations_on_their_own::<Cpu> },
    Case { name: "odd_widths", ranks: &[2, 3, 4, 5], run: layouts::odd_widths::<Cpu> },
    Case { name: "grids", ranks: &[4, 8], run: layouts::grids::<Cpu> },
    Case { name: "grids_clipped", ranks: &[8], run: layouts::grids_clipped::<Cpu> },
    Case { name: "initial_weights", ranks: ALL, run: layouts::initial_weights::<Cpu> },
    Case { name: "a_step_allocates_nothing_of_ours", ranks: &[2, 3, 4], run: no_allocation },
];

fn main() -> std::process::ExitCode {
    cases::main(CASES, &[])
}

/// At steady state, as in the test of data parallelism.
fn no_allocation(world: &World) {
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
