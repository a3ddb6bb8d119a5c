//! Data parallelism: every rank computes gradients on its share of the batch, an all-reduce sums
//! them, and every rank takes the same step (Goyal et al., "Accurate, Large Minibatch SGD", 2017,
//! §3).
//!
//! ```text
//! cargo run --release --example average_gradients
//! mpiexec -n 2 target/release/examples/average_gradients
//! ```
//!
//! Look at the losses: any number of ranks gives the losses of one rank, up to the rounding of
//! sums. Look at the all-reduce: no rank computes anything until all gradients have been summed.
//! `sync_sgd` sums the gradients of the last layers while it computes those of the first.

use phalanx::Result;
use phalanx::comm::{Operation, World, shard};
use phalanx::dataset::{Batches, Order, Sampler, open_digits};
use phalanx::device::{Activation, Cpu, LossShape, MemoryOperations as _, Role, StepTotals, totals};
use phalanx::nn::{FlatBuffer, Loss, Network, Segmentation, Tape, TapedRows, TensorShard};
use phalanx::sums::Section;

const SEED: u64 = 1;
const BATCH: usize = 128;
const LEARNING_RATE: f32 = 0.2;

fn main() {
    let world = World::start().expect("this is the first start");
    // a panic ends the whole job, so that no rank waits for one that failed
    train(&world).unwrap_or_else(|error| panic!("{error}"));
}

fn train(world: &World) -> Result<()> {
    let (all, device, digits) = (world.communicator(), Cpu::new(1)?, open_digits()?.train);
    let network = Network::mlp(&[128, 64, 32], Activation::Relu, true, 10, Loss::CrossEntropy);
    let model = network.build(digits.features())?;
    let sampler = Sampler::new(digits.num_samples(), BATCH, Order::Shuffled, SEED);
    let mut batches = Batches::new(digits, sampler, None);

    let tensors: Vec<_> = model.tensors.iter().map(TensorShard::whole).collect();
    let zeros = |role| FlatBuffer::zeros(&device, &tensors, &Segmentation::whole(tensors.len()), role);
    let (mut parameters, mut gradients) = (zeros(Role::Parameters)?, zeros(Role::Exact)?);
    // the initial values depend on the seed only, so all replicas begin with the same bits
    parameters.initialise(&device, &tensors, SEED)?;

    for step in 0..50 {
        let share = shard(BATCH, all.rank(), all.size());
        let rows = share.len();
        // the input of the first layer, then the output of each
        let (mut values, mut labels) = (vec![vec![0.0; rows * model.input.len()]], vec![0.0; rows]);
        batches.read(step, share, &mut values[0], &mut labels)?;
        for (at, layer) in model.layers.iter().enumerate() {
            let mut output = vec![0.0; rows * layer.output_len()];
            layer.forward(&device, &parameters, None, rows, &values[at], &mut [], &mut output);
            values.push(output);
        }

        // every row counts 1/BATCH, so the sum over unequal shares is still the mean over the batch
        let shape = LossShape::whole(rows, model.output.len(), 1.0 / BATCH as f32);
        let (mut sums, mut gradient) = ([0.0; totals::LEN], vec![0.0; rows * model.output.len()]);
        let outputs = &values[model.layers.len()];
        model.loss.evaluate(&device, &shape, outputs, &labels, &mut gradient, &mut sums);
        for (at, layer) in model.layers.iter().enumerate().rev() {
            let tape = Tape::<'_, Cpu>::new(&values[at], &[], &values[at + 1]);
            let own = Section::of_chain(rows, false);
            let sums = Some((&mut gradients, own));
            layer.backward_activation(&device, &tape, &mut gradient, sums);
            let taped = TapedRows { tape, gradient: &gradient[..], section: own };
            layer.backward_weight(&device, &[taped], &mut gradients);
            if at > 0 {
                let mut input = vec![0.0; rows * layer.input_len()];
                layer.backward_input(&device, &parameters, rows, &tape, &gradient, &mut input);
                gradient = input;
            }
        }

        all.all_reduce(gradients.segment_mut(0), Operation::Sum)?; // MPI_Allreduce

        let updates = parameters.segment_mut(0).iter_mut().zip(gradients.segment(0).iter());
        updates.for_each(|(parameter, gradient)| *parameter -= LEARNING_RATE * gradient);
        let mut of_all_ranks = device.take_totals(&mut sums)?.into_message();
        all.all_reduce(&mut of_all_ranks, Operation::Sum)?;
        if world.is_root() {
            let loss = StepTotals::from_message(&of_all_ranks).loss.value();
            println!("step {} loss {}", step + 1, loss / BATCH as f64);
        }
    }
    Ok(())
}
