//! Tensor-parallel training: every rank holds a shard of every layer that can be divided, and all ranks
//! see the whole batch.
//!
//! ```text
//! mpiexec -n 4 tensor_mlp                             an mlp on the embedded digits
//! mpiexec -n 4 tensor_mlp --model deep-mlp --width 1024 --data synthetic --split gather
//! mpiexec -n 4 tensor_mlp --model gpt --sequence-parallel
//! ```
//!
//! N ranks take the step of one rank with the whole model, on the CPU with the same bits. The strategy
//! itself is in `src/parallel/tensor/`.

use std::process::ExitCode;

use clap::Parser;
use phalanx::Result;
use phalanx::app::{CommonOptions, Finished, Program};
use phalanx::comm::{Grid, GridShape, World};
use phalanx::parallel::layout::ParallelPlan;
use phalanx::train::{self, ModelName, Strategy, TensorOptions, TrainOptions};

/// Train a network with its linear layers, attention and embeddings divided among all ranks; by default an
/// mlp.
#[derive(Parser)]
#[command(name = "tensor_mlp", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    tensor: TensorOptions,

    #[command(flatten)]
    train: TrainOptions,
}

const STRATEGY: Strategy = Strategy { program: "tensor_mlp", has_replicas: false };

fn run(world: &World, arguments: &Arguments) -> Result<Finished> {
    let grid = Grid::new(world, GridShape { data: 1, stage: 1, tensor: world.size() })?;
    let options = arguments.train.clone().with_model(ModelName::Mlp);
    train::run(world, &grid, STRATEGY, &options, &|model, batch| {
        let num_micro_batches = options.micro_batches(model, batch, 1);
        Ok(arguments.tensor.divide(ParallelPlan::single_stage(model, num_micro_batches)?))
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
