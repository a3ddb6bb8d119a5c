//! Hybrid training: the world as a grid of data × stage × tensor ranks, with ZeRO over the data axis.
//!
//! ```text
//! mpiexec -n 8 hybrid --data 2 --stage 2 --tensor 2 --zero 3      two replicas of four ranks each
//! mpiexec -n 4 hybrid --tensor 2 --model deep-mlp --data synthetic --zero 2 --accumulate parts \
//!     --micro-batches 4
//! mpiexec -n 4 hybrid --data 2 --tensor 2 --sequence-parallel --model gpt
//! mpiexec -n 6 hybrid --replicas 3 --data file.h5 --model mlp --hidden 64,64 --schedule zero-bubble
//! ```
//!
//! Along the data axis ranks are replicas, as in `sync_sgd`; along the stage axis they hold
//! consecutive layers, as in `pipeline`; along the tensor axis they share every layer, as in
//! `tensor_mlp`. The axes are put together in `src/parallel/layout.rs`, ZeRO is in
//! `src/parallel/zero/`.

use std::process::ExitCode;

use clap::Parser;
use phalanx::Result;
use phalanx::app::{CommonOptions, Finished, Program};
use phalanx::comm::World;
use phalanx::train::{self, GridOptions, PipelineOptions, Strategy, TensorOptions, TrainOptions};

/// Train a network on a grid of replicas, pipeline stages and ranks that share layers.
#[derive(Parser)]
#[command(name = "hybrid", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    pipeline: PipelineOptions,

    #[command(flatten)]
    grid: GridOptions,

    #[command(flatten)]
    tensor: TensorOptions,

    #[command(flatten)]
    train: TrainOptions,
}

const STRATEGY: Strategy = Strategy { program: "hybrid", has_replicas: true };

fn run(world: &World, arguments: &Arguments) -> Result<Finished> {
    let Arguments { pipeline, grid, tensor, train } = arguments;
    let (grid, train) = grid.with_data(train);
    if let Some(file) = &pipeline.show_schedule {
        pipeline.show(world, file, |ranks| grid.drawn_shape(world.size(), ranks), &train)?;
        return Ok(ExitCode::SUCCESS.into());
    }
    let grid = grid.grid(world)?;
    let plan = pipeline.planner(world, &grid, &train)?;
    train::run(world, &grid, STRATEGY, &train, &|model, batch| Ok(tensor.divide(plan(model, batch)?)))
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.train.common
    }

    fn check_files(&self) -> Result<()> {
        let (_, train) = self.grid.with_data(&self.train);
        train::check_files(&[train.files(), self.pipeline.files()].concat())
    }
}

fn main() -> ExitCode {
    phalanx::app::main(run)
}
