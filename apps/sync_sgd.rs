//! Synchronous data-parallel training: every rank is a replica, and gradients are summed over all
//! of them in each step.
//!
//! ```text
//! sync_sgd                                  one rank, LeNet on the embedded digits
//! mpiexec -n 4 sync_sgd --batch-size 256    the same model, each batch divided among four ranks
//! mpiexec -n 4 sync_sgd --data file.h5 --inputs /x --targets /y --model mlp --hidden 256,256
//! ```
//!
//! N ranks that divide a batch take the step that one rank takes with all of it. The strategy
//! itself is in `src/parallel/data/`.

use std::process::ExitCode;

use clap::Parser;
use phalanx::Result;
use phalanx::app::{CommonOptions, Finished, Program};
use phalanx::comm::{Grid, GridShape, World};
use phalanx::parallel::layout::ParallelPlan;
use phalanx::train::{self, Strategy, TrainOptions};

/// Train a network with a replica on every rank, summing gradients over all ranks in each step.
#[derive(Parser)]
#[command(name = "sync_sgd", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    train: TrainOptions,
}

const STRATEGY: Strategy = Strategy { program: "sync_sgd", has_replicas: true };

fn run(world: &World, arguments: &Arguments) -> Result<Finished> {
    let grid = Grid::new(world, GridShape::data(world.size()))?;
    let options = &arguments.train;
    train::run(world, &grid, STRATEGY, options, &|model, batch| {
        ParallelPlan::single_stage(model, options.micro_batches(model, batch, world.size()))
    })
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.train.common
    }

    fn check_files(&self) -> Result<()> {
        train::check_files(&self.train.files())
    }
}

fn main() -> ExitCode {
    phalanx::app::main(run)
}
