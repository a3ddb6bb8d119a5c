//! A training step on a GPU, beside PyTorch on the same card and the card's own limits: `cargo
//! bench --bench gpu`, or `cargo bench --bench gpu -- lenet` for the models with that in their names.
//!
//! Everything is measured in one run of one or two minutes. PyTorch's figures come from
//! `benches/pytorch.py`, the better of eager mode and a CUDA graph; they are left out if there is
//! no PyTorch that sees the GPU.

mod pytorch;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use phalanx::comm::{Grid, GridShape, World};
use phalanx::dataset::{Batches, Order, Sampler, Synthetic, Targets};
use phalanx::device::cuda::Counters;
use phalanx::device::prelude::*;
use phalanx::device::{Activation, Cuda, LinearShape, Precision, Role, WeightLayout};
use phalanx::nn::{Features, Initial, Model, Network};
use phalanx::optim::{LearningRateSchedule, OptimizerSettings, Rule};
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::zero::{Accumulation, Gathering};
use phalanx::train::{RunRequests, Trainer, TrainerSettings};

/// The duration of each measurement in seconds.
const SECONDS: f64 = 2.0;

/// Steps before the measurement, in which the step is recorded.
const WARM_UP: u64 = 5;

struct Case {
    /// The name in `pytorch.py`.
    name: &'static str,
    model: Kind,
    batch_size: usize,
    precision: Precision,
    /// The intended ratio to PyTorch's best time.
    goal: f64,
}

enum Kind {
    DeepMlp { width: usize, layers: usize },
    LeNet,
}

const CASES: [Case; 4] = [
    Case {
        name: "deep-mlp 16384 x 8192 x 4",
        model: Kind::DeepMlp { width: 8192, layers: 4 },
        batch_size: 16384,
        precision: Precision::Bf16,
        goal: 1.18,
    },
    Case {
        name: "deep-mlp 4096 x 4096 x 8",
        model: Kind::DeepMlp { width: 4096, layers: 8 },
        batch_size: 4096,
        precision: Precision::Bf16,
        goal: 1.3,
    },
    Case {
        name: "deep-mlp 128 x 1024 x 4",
        model: Kind::DeepMlp { width: 1024, layers: 4 },
        batch_size: 128,
        precision: Precision::Bf16,
        goal: 1.8,
    },
    Case { name: "lenet 128", model: Kind::LeNet, batch_size: 128, precision: Precision::F32, goal: 4.0 },
];

/// The card's own limits.
struct Limits {
    /// Products in bf16, operations per second.
    products: f64,
    /// Bytes read and written per second.
    memory: f64,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let world = World::start()?;
    let device = match Cuda::open(0, Precision::Bf16) {
        Ok(device) => device,
        Err(error) => {
            println!("left out: {error}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    println!("{}", device.name());
    let limits = Limits { products: product_rate(&device)?, memory: copy_rate(&device)? };
    println!(
        "products of 8192 x 8192 x 8192 in bf16: {:.0} TFLOP/s; copies: {:.2} TB/s",
        limits.products / 1e12,
        limits.memory / 1e12
    );
    drop(device);
    println!(
        "{:<26} {:>9} {:>10} {:>9} {:>7} {:>6} {:>9} {:>9} {:>9}  launches, waits, allocations a step",
        "model", "ms/step", "samples/s", "PyTorch", "ratio", "goal", "TFLOP/s", "products", "memory"
    );
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let is_wanted = |case: &&Case| wanted.is_empty() || wanted.iter().any(|part| case.name.contains(part));
    for case in CASES.iter().filter(is_wanted) {
        report(&world, case, &limits)?;
    }
    println!(
        "PyTorch: ms per step, the better of eager mode and a CUDA graph; products, memory: \
         the share of the step that these"
    );
    println!(
        "would take alone at the rates above, counting the operations of products and the bytes of \
         parameters and activations"
    );
    Ok(ExitCode::SUCCESS)
}

fn report(world: &World, case: &Case, limits: &Limits) -> Result<(), Box<dyn Error>> {
    let (seconds, counters) = measure(world, case)?;
    let torch = pytorch_seconds(case.name);
    let (operations, bytes) = case.work();
    let ratio = torch.map_or("-".into(), |torch| format!("{:.2}x", torch / seconds));
    println!(
        "{:<26} {:>9.3} {:>10.0} {:>9} {ratio:>7} {:>5}x {:>9.1} {:>8.0}% {:>9}  {:.1}, {:.1}, {:.1}",
        case.name,
        seconds * 1e3,
        case.batch_size as f64 / seconds,
        torch.map_or("-".into(), |torch| format!("{:.3}", torch * 1e3)),
        case.goal,
        operations / seconds / 1e12,
        100.0 * operations / limits.products / seconds,
        if bytes > 0.0 { format!("{:.0}%", 100.0 * bytes / limits.memory / seconds) } else { "-".into() },
        counters[0],
        counters[1],
        counters[2],
    );
    Ok(())
}

impl Case {
    fn model(&self) -> phalanx::Result<(Model, Targets)> {
        match self.model {
            Kind::DeepMlp { width, layers } => {
                Ok((Network::deep_mlp(width, layers).build(Features::Flat(width))?, Targets::Nothing))
            }
            Kind::LeNet => {
                let image = Features::Image { height: 28, width: 28, channels: 1 };
                Ok((Network::lenet(10).build(image)?, Targets::Classes(10)))
            }
        }
    }

    /// Returns the operations of a step's products, and the bytes that it must read and write at
    /// least.
    fn work(&self) -> (f64, f64) {
        match self.model {
            // forward, weights, and inputs of all layers but the first
            Kind::DeepMlp { width, layers } => {
                let (rows, width, layers) = (self.batch_size as f64, width as f64, layers as f64);
                let operations = 2.0 * rows * width * width * (3.0 * layers - 1.0);
                // AdamW reads four f32 per parameter and writes three and a bf16; its gradient is
                // written before. A layer writes its output and what it saves, and reads both again
                // with the gradient, in bf16
                let bytes = layers * (34.0 * width * width + 14.0 * rows * width);
                (operations, bytes)
            }
            Kind::LeNet => (self.batch_size as f64 * (961e3 + 961e3 + 673e3), 0.0),
        }
    }
}

/// Returns the seconds of a step, and the host's launches, waits and allocations in each.
fn measure(world: &World, case: &Case) -> Result<(f64, [f64; 3]), Box<dyn Error>> {
    let device = Cuda::open(0, case.precision)?;
    let grid = Grid::new(world, GridShape::data(1))?;
    let (model, targets) = case.model()?;
    let plan = ParallelPlan::single_stage(&model, 1)?;
    let rule = if targets == Targets::Nothing { Rule::AdamW } else { Rule::Sgd };
    let sync = SyncSettings {
        bucket_bytes: 25_000_000,
        zero: None,
        accumulation: Accumulation::Whole,
        overlap: true,
        clip_norm: None,
    };
    let optimizer = OptimizerSettings { momentum: 0.9, ..OptimizerSettings::new(rule) };
    let (batch_size, learning_rate) = (case.batch_size, LearningRateSchedule::constant(1e-4));
    let settings =
        TrainerSettings { batch_size, sync, gathering: Gathering::Pass, optimizer, learning_rate, seed: 1 };
    let mut trainer = Trainer::new(&device, &grid, &model, &plan, settings)?;
    let set = Synthetic::open(model.input, targets, 0, case.batch_size, 1)?;
    let sampler = Sampler::new(case.batch_size, case.batch_size, Order::Sequential, 1);
    let mut batches = Batches::new(set, sampler, None);
    trainer.keep_samples(&mut batches)?;
    let mut step = 0;
    let mut advance = |num: u64| -> phalanx::Result<()> {
        for _ in 0..num {
            trainer.step(step, &mut batches, RunRequests::default)?;
            step += 1;
        }
        trainer.flush(RunRequests::default()).map(|_| ())
    };
    advance(WARM_UP)?;
    let start = Instant::now();
    advance(10)?;
    let num = ((SECONDS / (start.elapsed().as_secs_f64() / 10.0)) as u64).clamp(10, 50_000);
    let (before, start) = (device.counters(), Instant::now());
    advance(num)?;
    let seconds = start.elapsed().as_secs_f64() / num as f64;
    let after = device.counters();
    let each = |count: fn(&Counters) -> u64| (count(&after) - count(&before)) as f64 / num as f64;
    let launches = each(|counters| counters.launches + counters.replays);
    Ok((
        seconds,
        [launches, each(|counters| counters.synchronisations), each(|counters| counters.allocations)],
    ))
}

/// Returns PyTorch's seconds per step, if there is a PyTorch that sees the GPU.
fn pytorch_seconds(name: &str) -> Option<f64> {
    pytorch::numbers("pytorch.py", &[name])
        .into_iter()
        .reduce(f64::min)
        .map(|milliseconds| milliseconds / 1e3)
}

/// Returns the seconds per call of `start`, from many calls.
fn time(device: &Cuda, mut start: impl FnMut(&Cuda)) -> phalanx::Result<f64> {
    let end = device.allocate(1, Role::Exact)?;
    let wait = || device.read(device.view(&end, 0..1), &mut |_| Ok(()));
    let mut run = |num: u64| -> phalanx::Result<f64> {
        wait()?;
        let began = Instant::now();
        (0..num).for_each(|_| start(device));
        wait()?;
        Ok(began.elapsed().as_secs_f64() / num as f64)
    };
    run(5)?;
    let once = run(10)?;
    run((SECONDS / once).clamp(10.0, 1e5) as u64)
}

/// Measures products of random numbers, in operations per second.
fn product_rate(device: &Cuda) -> phalanx::Result<f64> {
    const SIZE: usize = 8192;
    let len = SIZE * SIZE;
    let shape = LinearShape::whole(SIZE, SIZE, SIZE, WeightLayout::InputsByOutputs, 8);
    let random = |name: &str, role| -> phalanx::Result<_> {
        let mut buffer = device.allocate(len, role)?;
        device.write(device.view_mut(&mut buffer, 0..len), &mut |values| {
            Initial::Normal { deviation: 1.0 }.fill(1, name, 0, values);
            Ok(())
        })?;
        Ok(buffer)
    };
    let (left, right) = (random("left", Role::Activations)?, random("right", Role::Parameters)?);
    let (mut product, mut none) =
        (device.allocate(len, Role::Activations)?, device.allocate(0, Role::Activations)?);
    let seconds = time(device, |device| {
        let [saved, output] =
            [(&mut none, 0), (&mut product, len)].map(|(buffer, len)| device.view_mut(buffer, 0..len));
        let (left, right) = (device.view(&left, 0..len), device.view(&right, 0..len));
        device.linear_forward(&shape, left, right, None, Activation::Identity, saved, output);
    })?;
    Ok(2.0 * (SIZE as f64).powi(3) / seconds)
}

/// Measures copies, in bytes read and written per second.
fn copy_rate(device: &Cuda) -> phalanx::Result<f64> {
    const LEN: usize = 1 << 28;
    let (from, mut into) = (device.allocate(LEN, Role::Exact)?, device.allocate(LEN, Role::Exact)?);
    let seconds =
        time(device, |device| device.copy(device.view(&from, 0..LEN), device.view_mut(&mut into, 0..LEN)))?;
    Ok(2.0 * 4.0 * LEN as f64 / seconds)
}
