//! Pipeline parallelism: each rank is a stage of consecutive layers; micro-batches pass through,
//! all forward, then all backward (Huang et al., "GPipe", NeurIPS 2019, §2, without recomputation).
//!
//! ```text
//! cargo run --release --example gpipe
//! mpiexec -n 3 target/release/examples/gpipe
//! ```
//!
//! Look at the losses: up to four ranks give the losses of one. Look at the first receive of either
//! loop: a rank waits there in the bubble, which `pipeline --schedule gpipe --trace FILE` draws.

use phalanx::Result;
use phalanx::comm::{World, shard};
use phalanx::dataset::{Batches, Order, Sampler, open_digits};
use phalanx::device::{Activation, Cpu, LossShape, MemoryOperations as _, Role, totals};
use phalanx::nn::{FlatBuffer, Loss, Network, Segmentation, Tape, TapedRows, TensorShard};
use phalanx::sums::Section;

const SEED: u64 = 1;
const BATCH: usize = 128;
const MICRO_BATCHES: usize = 4;
const ROWS: usize = BATCH / MICRO_BATCHES;

fn main() {
    let world = World::start().expect("this is the first start");
    train(&world).unwrap_or_else(|error| panic!("{error}")); // a panic ends the whole job
}

fn train(world: &World) -> Result<()> {
    let (all, device, digits) = (world.communicator(), Cpu::new(1)?, open_digits()?.train);
    let network = Network::mlp(&[128, 64, 32], Activation::Relu, true, 10, Loss::CrossEntropy);
    let model = network.build(digits.features())?;
    let sampler = Sampler::new(digits.num_samples(), BATCH, Order::Shuffled, SEED);
    let mut batches = Batches::new(digits, sampler, None);
    let (rank, last) = (all.rank(), all.size() - 1);
    assert!(all.size() <= model.layers.len(), "every rank needs one of the {} layers", model.layers.len());
    let own = shard(model.layers.len(), rank, all.size());
    let tensors: Vec<_> = model.tensors[2 * own.start..2 * own.end].iter().map(TensorShard::whole).collect();
    let numbered = model.layers[own].iter().zip((0..).step_by(2)); // a layer has a weight and a bias
    let stage: Vec<_> = numbered.map(|(layer, first)| layer.clone().with_tensors_from(first)).collect();
    let zeros = |role| FlatBuffer::zeros(&device, &tensors, &Segmentation::whole(tensors.len()), role);
    let (mut parameters, mut gradients) = (zeros(Role::Parameters)?, zeros(Role::Exact)?);
    parameters.initialise(&device, &tensors, SEED)?;
    for step in 0..50 {
        let (mut kept, mut sums, mut labels) = (Vec::new(), [0.0; totals::LEN], vec![0.0; ROWS]);
        for micro_batch in 0..MICRO_BATCHES {
            let mut values = vec![vec![0.0; ROWS * stage[0].input_len()]];
            if rank == 0 {
                batches.read(step, ROWS * micro_batch..ROWS * (micro_batch + 1), &mut values[0], &mut [])?;
            } else {
                all.receive(&mut values[0], rank - 1, micro_batch as i32)?; // MPI_Recv
            }
            for (at, layer) in stage.iter().enumerate() {
                let mut output = vec![0.0; ROWS * layer.output_len()];
                layer.forward(&device, &parameters, None, ROWS, &values[at], &mut [], &mut output);
                values.push(output);
            }
            if rank < last {
                all.send(&values[stage.len()], rank + 1, micro_batch as i32)?; // MPI_Send
            }
            kept.push(values);
        }
        gradients.segment_mut(0).fill(0.0); // the backward passes add to them
        for (micro_batch, values) in kept.iter().enumerate().rev() {
            let mut gradient = vec![0.0; values[stage.len()].len()];
            if rank == last {
                let shape = LossShape::whole(ROWS, model.output.len(), 1.0 / BATCH as f32);
                batches.read(step, ROWS * micro_batch..ROWS * (micro_batch + 1), &mut [], &mut labels)?;
                model.loss.evaluate(&device, &shape, &values[stage.len()], &labels, &mut gradient, &mut sums);
            } else {
                all.receive(&mut gradient, rank + 1, micro_batch as i32)?;
            }
            for (at, layer) in stage.iter().enumerate().rev() {
                let tape = Tape::<'_, Cpu>::new(&values[at], &[], &values[at + 1]);
                let own = Section::of_chain(ROWS, true);
                let sums = Some((&mut gradients, own));
                layer.backward_activation(&device, &tape, &mut gradient, sums);
                let taped = TapedRows { tape, gradient: &gradient[..], section: own };
                layer.backward_weight(&device, &[taped], &mut gradients);
                let mut input = vec![0.0; ROWS * layer.input_len()];
                layer.backward_input(&device, &parameters, ROWS, &tape, &gradient, &mut input);
                gradient = input;
            }
            if rank > 0 {
                all.send(&gradient, rank - 1, micro_batch as i32)?;
            }
        }
        let updates = parameters.segment_mut(0).iter_mut().zip(gradients.segment(0).iter());
        updates.for_each(|(parameter, gradient)| *parameter -= 0.2 * gradient);
        if rank == last {
            let loss = device.take_totals(&mut sums)?.loss.value();
            println!("step {} loss {}", step + 1, loss / BATCH as f64);
        }
    }
    Ok(())
}
