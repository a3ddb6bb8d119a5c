//! Pipeline-parallel training: every rank runs some of the layers, and every batch passes through
//! them in micro-batches.
//!
//! ```text
//! mpiexec -n 4 pipeline --model deep-mlp --data synthetic --micro-batches 8
//! mpiexec -n 4 pipeline --model deep-mlp --layers 8 --data synthetic --schedule interleaved
//! pipeline --show-schedule --show-ranks 4 --schedule zero-bubble --micro-batches 8
//! ```
//!
//! On the CPU, the final parameters are bit for bit those of one rank, for any micro-batches and threads.
//! The strategy itself is in `src/parallel/pipeline/`, the schedules in `src/parallel/schedule/generate.rs`.

use std::process::ExitCode;

use clap::Parser;
use phalanx::Result;
use phalanx::app::{CommonOptions, Finished, Program};
use phalanx::comm::{Grid, GridShape, World};
use phalanx::train::{self, PipelineOptions, Strategy, TrainOptions};

/// Train a network with its layers spread over the ranks and every batch in micro-batches.
#[derive(Parser)]
#[command(name = "pipeline", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    pipeline: PipelineOptions,

    #[command(flatten)]
    train: TrainOptions,
}

const STRATEGY: Strategy = Strategy { program: "pipeline", has_replicas: false };

fn run(world: &World, arguments: &Arguments) -> Result<Finished> {
    let Arguments { pipeline, train } = arguments;
    let shape = |ranks: Option<usize>| GridShape { data: 1, stage: ranks.unwrap_or(world.size()), tensor: 1 };
    if let Some(file) = &pipeline.show_schedule {
        pipeline.show(world, file, |ranks| Ok(shape(ranks)), train)?;
        return Ok(ExitCode::SUCCESS.into());
    }
    let grid = Grid::new(world, shape(None))?;
    let plan = pipeline.planner(world, &grid, train)?;
    train::run(world, &grid, STRATEGY, train, &plan)
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.train.common
    }

    fn check_files(&self) -> Result<()> {
        train::check_files(&[self.train.files(), self.pipeline.files()].concat())
    }
}

fn main() -> ExitCode {
    phalanx::app::main(run)
}
