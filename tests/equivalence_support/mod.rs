//! Small training runs through the library, and the trajectories that PyTorch left.

#![allow(dead_code)] // each test target uses some of it

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx::comm::{Grid, GridShape, World};
use phalanx::dataset::{self, Batches, Order, Sampler, Standardise, Synthetic, Table, Targets};
use phalanx::device::{Activation, Cpu};
use phalanx::nn::{Features, Loss, Model, Network};
use phalanx::optim::{LearningRate, OptimizerSettings, Rule, ScheduleKind};
use phalanx::parallel::data::{Reduction, SyncSettings};
use phalanx::parallel::layout::Plan;
use phalanx::parallel::tensor::Split;
use phalanx::train::{Trainer, TrainerSettings};

/// True while allocations are to be written down.
static WATCHING: AtomicBool = AtomicBool::new(false);

/// Where allocations came from, but those of `gemm`.
static FOUND: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The system's allocator, which can be watched. MPI, being C, does not come through here.
pub struct Watched;

// SAFETY: everything is the system allocator's work.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // writing it down allocates too
        if WATCHING.swap(false, Ordering::Relaxed) {
            let caller = Backtrace::force_capture().to_string();
            if let (false, Ok(mut found)) = (caller.contains("gemm_common"), FOUND.lock()) {
                found.push(caller);
            }
            WATCHING.store(true, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// This rank alone, as a grid.
pub fn serial_grid(world: &World) -> Grid {
    let alone = || world.communicator().split(world.rank(), 0).unwrap();
    Grid { shape: GridShape::data(1), all: alone(), data: alone(), stage: alone(), tensor: alone() }
}

/// Settings with plain SGD.
pub fn settings(batch_size: usize, sync: SyncSettings) -> TrainerSettings {
    TrainerSettings { batch_size, sync, optimizer: OptimizerSettings::new(Rule::Sgd), seed: 11 }
}

/// Inputs with real targets.
pub fn small_table(features: Features, inputs: &[f32], targets: &[f32]) -> Table {
    let (inputs, target_values) = (inputs.to_vec(), targets.to_vec());
    Table { source: "a test".into(), features, targets: Targets::Values(1), inputs, target_values }
}

/// Fails unless `found` is `expected` to `tolerance` of the largest expected value.
#[track_caller]
pub fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30_f64, |largest, value| largest.max(value.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs() / largest;
        assert!(off <= tolerance, "{what}: element {i} is {found}, not {expected}: off by {off:.1e} of {largest}");
    }
}

/// A network about to be trained.
pub struct Rig<'a> {
    model: Model,
    /// How the model is spread over the grid.
    pub plan: Plan,
    targets: Targets,
    settings: TrainerSettings,
    /// Samples in an epoch.
    pub num_samples: usize,
    device: Cpu,
    _network: &'a Network,
}

/// What a run left.
pub struct Run {
    /// After the last step, in logical order.
    pub parameters: Vec<f64>,
    /// Of each step.
    pub losses: Vec<f64>,
    /// Of each step's gradient.
    pub norms: Vec<f64>,
    /// Of the last step, in logical order; with all-reduce the sums over the ranks.
    pub gradients: Vec<f64>,
    /// Of the parameters.
    pub digest: u128,
    /// The loss over all samples with the final parameters.
    pub tested: f64,
}

impl<'a> Rig<'a> {
    /// `network` for inputs of shape `features`, in one stage, with the share of a rank in `num_micro_batches` parts.
    pub fn new(
        network: &'a Network,
        features: Features,
        num_micro_batches: usize,
        settings: TrainerSettings,
    ) -> Rig<'a> {
        let targets = match network.loss {
            Loss::CrossEntropy => Targets::Classes(10),
            Loss::MeanSquaredError => Targets::Values(1),
            Loss::MeanOfSquares => Targets::Nothing,
        };
        let model = network.build(features).unwrap();
        let plan = Plan::single_stage(&model, num_micro_batches, Split::Pairs).unwrap();
        Rig { model, plan, targets, settings, num_samples: 500, device: Cpu::new(1).unwrap(), _network: network }
    }

    /// The same with targets of `classes` classes.
    pub fn classes(mut self, classes: usize) -> Rig<'a> {
        self.targets = Targets::Classes(classes);
        self
    }

    fn synthetic(&self) -> Batches {
        let set = Synthetic::open(self.model.input, self.targets, 0, self.num_samples, 5).unwrap();
        Batches::new(set, Sampler::new(self.num_samples, self.settings.batch_size, Order::Shuffled, 3), None)
    }

    /// Trains on synthetic samples.
    pub fn train(&self, grid: &Grid, num_steps: u64, rate: f64) -> Run {
        let trainer = Trainer::new(&self.device, grid, &self.model, &self.plan, self.settings).unwrap();
        self.finish(grid, trainer, self.synthetic(), num_steps, rate)
    }

    /// Trains on the embedded digits.
    pub fn train_digits(&self, grid: &Grid, num_steps: u64, rate: f64) -> Run {
        let trainer = Trainer::new(&self.device, grid, &self.model, &self.plan, self.settings).unwrap();
        let set = dataset::open_digits().unwrap().train;
        let standardise = set.preset().map(Standardise::new);
        let sampler = Sampler::new(set.num_samples(), self.settings.batch_size, Order::Shuffled, 3);
        self.finish(grid, trainer, Batches::new(set, sampler, standardise), num_steps, rate)
    }

    /// Trains on `table` in order, from the parameters `start`.
    pub fn train_table(&self, grid: &Grid, num_steps: u64, rate: f64, start: &[f32], table: Table) -> Run {
        let mut trainer = Trainer::new(&self.device, grid, &self.model, &self.plan, self.settings).unwrap();
        set_parameters(&mut trainer, &self.model, start);
        let sampler = Sampler::new(2, self.settings.batch_size, Order::Sequential, 0);
        self.finish(grid, trainer, Batches::new(Box::new(table), sampler, None), num_steps, rate)
    }

    fn finish(
        &self,
        grid: &Grid,
        mut trainer: Trainer<'_, Cpu>,
        mut batches: Batches,
        num_steps: u64,
        rate: f64,
    ) -> Run {
        let outcomes: Vec<_> = (0..num_steps).map(|step| trainer.step(step, rate, &mut batches).unwrap()).collect();
        trainer.check_replicas(num_steps).unwrap();
        Run {
            tested: trainer.evaluate(&mut batches).unwrap().loss,
            digest: trainer.digest().unwrap(),
            parameters: everywhere(grid, |look| trainer.gather_parameters(look)),
            gradients: everywhere(grid, |look| trainer.gather_gradients(look)),
            losses: outcomes.iter().map(|outcome| outcome.loss).collect(),
            norms: outcomes.iter().map(|outcome| outcome.gradient_norm).collect(),
        }
    }

    /// Calls `work` with a trainer.
    pub fn with_trainer(&self, grid: &Grid, work: impl FnOnce(&mut Trainer<'_, Cpu>, &Cpu)) {
        let mut trainer = Trainer::new(&self.device, grid, &self.model, &self.plan, self.settings).unwrap();
        work(&mut trainer, &self.device);
    }

    /// Where the allocations of the step after `num_steps` others come from, but those of `gemm`.
    pub fn foreign_allocations(&self, grid: &Grid, num_steps: u64) -> Vec<String> {
        let mut trainer = Trainer::new(&self.device, grid, &self.model, &self.plan, self.settings).unwrap();
        let mut batches = self.synthetic();
        for step in 0..num_steps {
            trainer.step(step, 0.01, &mut batches).unwrap();
        }
        let maps = phalanx::memory::num_maps();
        WATCHING.store(true, Ordering::Relaxed);
        let outcome = trainer.step(num_steps, 0.01, &mut batches);
        WATCHING.store(false, Ordering::Relaxed);
        outcome.unwrap();
        let mut found = std::mem::take(&mut *FOUND.lock().unwrap());
        found.extend((maps..phalanx::memory::num_maps()).map(|_| "a memory map".to_owned()));
        found
    }
}

fn set_parameters(trainer: &mut Trainer<'_, Cpu>, model: &Model, mut values: &[f32]) {
    for (number, tensor) in model.tensors.iter().enumerate() {
        let (own, rest) = values.split_at(tensor.num_elements());
        trainer.set_tensor(number, own).unwrap();
        values = rest;
    }
}

/// Calls back with whole tensors on rank 0.
type Look<'a> = &'a mut dyn FnMut(usize, &[f32]) -> phalanx::Result<()>;

/// What `gather` brings to rank 0, on every rank, in logical order.
fn everywhere(grid: &Grid, gather: impl FnOnce(Look<'_>) -> phalanx::Result<()>) -> Vec<f64> {
    let mut values = Vec::new();
    gather(&mut |_, tensor| {
        values.extend(tensor.iter().map(|value| f64::from(*value)));
        Ok(())
    })
    .unwrap();
    let mut len = [values.len() as i64];
    grid.all.broadcast(&mut len, 0).unwrap();
    values.resize(len[0] as usize, 0.0);
    grid.all.broadcast(&mut values, 0).unwrap();
    values
}

/// A trajectory that PyTorch computed in `f64`.
pub struct Oracle {
    file: hdf5::File,
    network: Network,
    features: Features,
    targets: Targets,
    optimizer: OptimizerSettings,
    schedule: LearningRate,
}

impl Oracle {
    /// The one called `name`, with the network and optimizer that its note describes.
    pub fn open(name: &str) -> Oracle {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/oracles/{name}.h5"));
        let file = hdf5::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let image = |size, channels| Features::Image { height: size, width: size, channels };
        let sgd = OptimizerSettings::new(Rule::Sgd);
        let adam = OptimizerSettings::new(Rule::Adam);
        let (network, features, targets, optimizer, rate) = match name {
            "classifier_relu_sgd" => (
                Network::mlp(&[16, 12], Activation::Relu, true, 5, Loss::CrossEntropy),
                Features::Flat(20),
                Targets::Classes(5),
                OptimizerSettings { momentum: 0.9, nesterov: true, weight_decay: 1e-4, ..sgd },
                0.05,
            ),
            "regressor_tanh_adam_cosine" => (
                Network::mlp(&[24, 24], Activation::Tanh, true, 3, Loss::MeanSquaredError),
                Features::Flat(6),
                Targets::Values(3),
                adam,
                3e-3,
            ),
            "deep_mlp_gelu_adamw" => (
                Network::deep_mlp(32, 4),
                Features::Flat(32),
                Targets::Nothing,
                OptimizerSettings { rule: Rule::AdamW, weight_decay: 1e-2, ..adam },
                1e-3,
            ),
            "lenet_sgd" => (
                Network::lenet(10),
                image(28, 1),
                Targets::Classes(10),
                OptimizerSettings { momentum: 0.5, ..sgd },
                0.01,
            ),
            "cifar_net_adam" => (Network::cifar(10), image(32, 3), Targets::Classes(10), adam, 1e-3),
            other => panic!("there is no oracle {other}"),
        };
        let schedule = if name.contains("cosine") {
            LearningRate { kind: ScheduleKind::Cosine, last: 1e-4, num_steps: 12, ..LearningRate::constant(rate) }
        } else {
            LearningRate::constant(rate)
        };
        Oracle { file, network, features, targets, optimizer, schedule }
    }

    fn read(&self, name: &str) -> Vec<f64> {
        let dataset = self.file.dataset(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        dataset.read_raw().unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// All tensors under `group`, in the order of `model`.
    fn tensors(&self, model: &Model, group: &str) -> Vec<f64> {
        model.tensors.iter().flat_map(|tensor| self.read(&format!("{group}/{}", tensor.name))).collect()
    }

    /// One array of all steps, with images turned to channels last.
    fn inputs(&self, num_steps: usize) -> Vec<f32> {
        let step = |step| self.read(&format!("input/{step}/x"));
        let mut values: Vec<f32> = (0..num_steps).flat_map(step).map(|value| value as f32).collect();
        if let Features::Image { height, width, channels } = self.features {
            for image in values.chunks_exact_mut(self.features.len()) {
                let planes = image.to_vec();
                for (i, value) in image.iter_mut().enumerate() {
                    *value = planes[i % channels * height * width + i / channels];
                }
            }
        }
        values
    }

    /// The model of the trajectory.
    pub fn model(&self) -> Model {
        self.network.build(self.features).unwrap()
    }

    /// Takes PyTorch's steps on `grid`, the model spread as `plan` says, and compares everything on the way, to 10⁻⁵ of the
    /// largest value. Returns the digest of the final parameters.
    pub fn check(&self, grid: &Grid, sync: SyncSettings, plan: &Plan) -> u128 {
        const TOLERANCE: f64 = 1e-5;
        let losses = self.read("f64/loss");
        let inputs = self.inputs(losses.len());
        let batch_size = inputs.len() / self.features.len() / losses.len();
        let has_targets = self.targets != Targets::Nothing;
        let targets =
            (0..losses.len()).filter(|_| has_targets).flat_map(|step| self.read(&format!("input/{step}/y")));
        let target_values = targets.map(|value| value as f32).collect();
        let (features, targets) = (self.features, self.targets);
        let table = Table { source: "an oracle".into(), features, targets, inputs, target_values };
        let sampler = Sampler::new(batch_size * losses.len(), batch_size, Order::Sequential, 0);
        let mut batches = Batches::new(Box::new(table), sampler, None);

        let device = Cpu::new(1).unwrap();
        let model = self.model();
        let settings = TrainerSettings { optimizer: self.optimizer, ..settings(batch_size, sync) };
        let mut trainer = Trainer::new(&device, grid, &model, plan, settings).unwrap();
        let initial: Vec<f32> = self.tensors(&model, "initial").into_iter().map(|value| value as f32).collect();
        set_parameters(&mut trainer, &model, &initial);

        let rates: Vec<f64> = (0..losses.len() as u64).map(|step| self.schedule.at(step)).collect();
        assert_close("learning rates", &rates, &self.read("f64/learning_rate"), 1e-12);
        let (mut found_losses, mut found_norms) = (Vec::new(), Vec::new());
        for (step, rate) in rates.iter().enumerate() {
            let outcome = trainer.step(step as u64, *rate, &mut batches).unwrap();
            found_losses.push(outcome.loss);
            found_norms.push(outcome.gradient_norm);
            if step == 0 && sync.reduction == Some(Reduction::AllReduce) {
                let found = everywhere(grid, |look| trainer.gather_gradients(look));
                let mut start = 0;
                for tensor in &model.tensors {
                    let expected = self.read(&format!("f64/first_grad/{}", tensor.name));
                    let range = start..start + expected.len();
                    start = range.end;
                    assert_close(&tensor.name, &found[range], &expected, TOLERANCE);
                }
            }
        }
        assert_close("losses", &found_losses, &losses, TOLERANCE);
        assert_close("gradient norms", &found_norms, &self.read("f64/grad_norm"), TOLERANCE);
        let found = everywhere(grid, |look| trainer.gather_parameters(look));
        self.check_parameters(&model, &found, TOLERANCE);
        trainer.digest().unwrap()
    }

    /// Adam divides a gradient by its own size, so an element whose gradient is lost in the rounding of `f32` takes steps of
    /// any size up to the learning rate: PyTorch's own `f32` run is off by 1.2·10⁻⁵ and 1.8·10⁻⁵ of the largest weight of the
    /// tensor at one such element in each of the two trajectories that have them. They are the ones whose first gradient is
    /// below 2·10⁻⁶ of the largest, have ten times the tolerance, and may be no more than one in a thousand.
    fn check_parameters(&self, model: &Model, found: &[f64], tolerance: f64) {
        let gradients = self.tensors(model, "f64/first_grad");
        let largest = gradients.iter().fold(0.0_f64, |largest, g| largest.max(g.abs()));
        let adaptive = self.optimizer.rule != Rule::Sgd;
        let mut start = 0;
        let mut num_lost = 0;
        for tensor in &model.tensors {
            let expected = self.read(&format!("f64/final/{}", tensor.name));
            let range = start..start + expected.len();
            start = range.end;
            let (mut found, gradients) = (found[range.clone()].to_vec(), &gradients[range]);
            let scale = expected.iter().fold(0.0_f64, |scale, value| scale.max(value.abs()));
            for ((found, expected), g) in found.iter_mut().zip(&expected).zip(gradients) {
                let off = (*found - expected).abs() / scale;
                if adaptive && g.abs() < 2e-6 * largest && (tolerance..10.0 * tolerance).contains(&off) {
                    num_lost += 1;
                    *found = *expected;
                }
            }
            assert_close(&tensor.name, &found, &expected, tolerance);
        }
        assert!(num_lost * 1000 <= model.num_parameters(), "{num_lost} elements are off");
    }
}
