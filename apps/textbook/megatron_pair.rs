//! Tensor parallelism: a pair of linear layers, the first split by outputs, the second by inputs,
//! takes one all-reduce forward (g) and one backward (f). The values between the two stay where
//! they are (Shoeybi et al., "Megatron-LM", 2019, §3).
//!
//! ```text
//! cargo run --release --example megatron_pair
//! mpiexec -n 2 target/release/examples/megatron_pair
//! ```
//!
//! Look at the losses: any number of ranks gives the losses of one rank, up to the rounding of
//! sums. Look at the all-reduces: two pairs take three in a step, because the input of the first
//! pair needs no gradient. `tensor_mlp` computes the gradients of weights during f.

use phalanx::Result;
use phalanx::comm::{Operation, World, shard};
use phalanx::dataset::{Batches, Order, Sampler, open_digits};
use phalanx::device::{Activation, Cpu, LossShape, MemoryOperations as _, Role, totals};
use phalanx::nn::{
    FlatBuffer, LayerKind, LinearLayer, Loss, Network, Segmentation, Tape, TapedRows, TensorShard,
};
use phalanx::sums::{Leaves, Section};

const SEED: u64 = 1;
const BATCH: usize = 128;

fn main() {
    let world = World::start().expect("this is the first start");
    train(&world).unwrap_or_else(|error| panic!("{error}")); // a panic ends the whole job
}

fn train(world: &World) -> Result<()> {
    let (all, device, digits) = (world.communicator(), Cpu::new(1)?, open_digits()?.train);
    let network = Network::mlp(&[128, 64, 32], Activation::Relu, true, 10, Loss::CrossEntropy);
    let mut model = network.build(digits.features())?;
    let sampler = Sampler::new(digits.num_samples(), BATCH, Order::Shuffled, SEED);
    let mut batches = Batches::new(digits, sampler, None);
    let mut tensors: Vec<_> = model.tensors.iter().map(TensorShard::whole).collect();
    // layers 0 and 2 are split by outputs, 1 and 3 by inputs; each has a weight and a bias
    for (at, layer) in model.layers.iter_mut().enumerate() {
        let LayerKind::Linear(layer) = &mut layer.kind else { unreachable!() };
        let LinearLayer { inputs, outputs, input_terms, output_terms, activation, bias, .. } = layer;
        let (width, terms) = if at % 2 == 0 { (outputs, output_terms) } else { (inputs, input_terms) };
        let own = shard(*width, all.rank(), all.size());
        (*width, *terms) = (own.len(), Section::whole(Leaves { len: own.len(), num: 1 }));
        if at % 2 == 0 {
            (tensors[2 * at].rows, tensors[2 * at + 1].rows) = (vec![own.clone(); 1], vec![own; 1]);
        } else {
            tensors[2 * at].columns = own;
            // one rank adds the bias to the sum, and the activation follows the sum
            (*bias, *activation) = (*bias && all.is_root(), Activation::Identity);
        }
    }
    let zeros = |role| FlatBuffer::zeros(&device, &tensors, &Segmentation::whole(tensors.len()), role);
    let (mut parameters, mut gradients) = (zeros(Role::Parameters)?, zeros(Role::Exact)?);
    parameters.initialise(&device, &tensors, SEED)?;
    for step in 0..50 {
        let (mut values, mut labels) = (vec![vec![0.0; BATCH * model.input.len()]], vec![0.0; BATCH]);
        batches.read(step, 0..BATCH, &mut values[0], &mut labels)?;
        for (at, layer) in model.layers.iter().enumerate() {
            let mut output = vec![0.0; BATCH * layer.output_len()];
            layer.forward(&device, &parameters, None, BATCH, &values[at], &mut [], &mut output);
            if at % 2 == 1 {
                all.all_reduce(&mut output, Operation::Sum)?; // g: MPI_Allreduce
            }
            if at == 1 {
                output.iter_mut().for_each(|value| *value = value.max(0.0));
            }
            values.push(output);
        }
        let shape = LossShape::whole(BATCH, model.output.len(), 1.0 / BATCH as f32);
        let (mut sums, mut gradient) = ([0.0; totals::LEN], vec![0.0; BATCH * model.output.len()]);
        model.loss.evaluate(&device, &shape, &values[4], &labels, &mut gradient, &mut sums);
        for (at, layer) in model.layers.iter().enumerate().rev() {
            let tape = Tape::<'_, Cpu>::new(&values[at], &[], &values[at + 1]);
            let own = Section::of_chain(BATCH, false);
            let sums = Some((&mut gradients, own));
            layer.backward_activation(&device, &tape, &mut gradient, sums);
            let taped = TapedRows { tape, gradient: &gradient[..], section: own };
            layer.backward_weight(&device, &[taped], &mut gradients);
            let mut input = vec![0.0; BATCH * layer.input_len()];
            layer.backward_input(&device, &parameters, BATCH, &tape, &gradient, &mut input);
            if at == 2 {
                all.all_reduce(&mut input, Operation::Sum)?; // f: MPI_Allreduce
                input.iter_mut().zip(&values[2]).for_each(|(g, value)| *g *= f32::from(*value > 0.0));
            }
            gradient = input;
        }
        let updates = parameters.segment_mut(0).iter_mut().zip(gradients.segment(0).iter());
        updates.for_each(|(parameter, gradient)| *parameter -= 0.2 * gradient);
        if world.is_root() {
            let loss = device.take_totals(&mut sums)?.loss.value();
            println!("step {} loss {}", step + 1, loss / BATCH as f64);
        }
    }
    Ok(())
}
