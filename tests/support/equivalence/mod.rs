//! Small training runs through the library, and PyTorch's trajectories.

pub mod layouts;
mod oracle;
pub mod positions;
pub mod replicas;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::OnceCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

pub use oracle::Oracle;
use phalanx::comm::{Grid, World};
use phalanx::dataset::{self, Batches, Order, Sampler, Standardise, Synthetic, Table, Targets};
use phalanx::device::{Cpu, Cuda, Device, Precision};
use phalanx::nn::{Features, Loss, Model, Network};
use phalanx::optim::{LearningRateSchedule, OptimizerSettings, Rule};
use phalanx::parallel::batch::Summation;
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::zero::{Gathering, ZeroStage};
use phalanx::train::{RunRequests, StepOutcome, Trainer, TrainerSettings};

/// True while allocations are recorded.
static WATCHING: AtomicBool = AtomicBool::new(false);

/// The callers of recorded allocations.
static FOUND: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The system's allocator, with a switch to record its callers. MPI, written in C, does not use it.
pub struct Watched;

// SAFETY: every call is passed on unchanged to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // recording allocates too
        if WATCHING.swap(false, Ordering::Relaxed) {
            let caller = Backtrace::force_capture().to_string();
            if let Ok(mut found) = FOUND.lock() {
                found.push(caller);
            }
            WATCHING.store(true, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is the one required
        // here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` comes from `alloc` above, so from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// A device to compare with the others.
pub trait TestDevice: Device + 'static {
    /// The order of sums that ranks share.
    const SUMMATION: Summation;
    /// The trajectories that are compared in every layout.
    const ORACLES: &[&str];
    /// The number of combinations of which long tests take one: an emulated GPU takes its time.
    const EVERY: usize;

    /// Returns the one device of this rank.
    fn shared() -> &'static Self;

    /// Returns `plan` with the sums of this device.
    fn summed(plan: &ParallelPlan) -> ParallelPlan {
        ParallelPlan { summation: Self::SUMMATION, ..plan.clone() }
    }
}

impl TestDevice for Cpu {
    const SUMMATION: Summation = Summation::Canonical { num_leaves: 8 };
    const ORACLES: &[&str] = &layouts::ORACLES;
    const EVERY: usize = 1;

    fn shared() -> &'static Cpu {
        thread_local!(static DEVICE: &'static Cpu = Box::leak(Box::new(Cpu::new(1).unwrap())));
        DEVICE.with(|device| *device)
    }
}

impl TestDevice for Cuda {
    const SUMMATION: Summation = Summation::ByLayout;
    // an emulated GPU takes its time: a network of each kind
    const ORACLES: &[&str] = &[
        "classifier_relu_sgd",
        "deep_mlp_gelu_adamw",
        "residual_mlp_adam",
        "residual_conv_sgd",
        "gpt_bias_adamw",
    ];
    const EVERY: usize = 5;

    fn shared() -> &'static Cuda {
        let open = || Box::leak(Box::new(Cuda::open(0, Precision::F32).unwrap()));
        thread_local!(static DEVICE: OnceCell<&'static Cuda> = const { OnceCell::new() });
        DEVICE.with(|device| *device.get_or_init(|| open()))
    }
}

/// A sample of combinations: one in a number of them, other ones for each number of ranks, or all if
/// `PHALANX_SOAK` is set.
struct Sample {
    every: usize,
    number: usize,
}

impl Sample {
    fn new(world: &World, every: usize) -> Sample {
        let every = if super::soak().is_some() { 1 } else { every };
        Sample { every, number: world.size() }
    }

    /// Returns true if the next combination is in the sample.
    fn takes_next(&mut self) -> bool {
        self.number += 1;
        self.number.is_multiple_of(self.every)
    }

    /// Returns true if every combination is in the sample.
    fn takes_all(&self) -> bool {
        self.every == 1
    }
}

/// Returns a grid of this rank alone.
pub fn serial_grid(world: &World) -> Grid {
    Grid::alone(world).unwrap()
}

/// Returns settings with plain SGD.
pub fn settings(batch_size: usize, sync: SyncSettings) -> TrainerSettings {
    let (optimizer, learning_rate) =
        (OptimizerSettings::new(Rule::Sgd), LearningRateSchedule::constant(0.01));
    TrainerSettings { batch_size, sync, gathering: Gathering::Pass, optimizer, learning_rate, seed: 11 }
}

/// Returns a table of inputs with real targets.
pub fn small_table(features: Features, inputs: &[f32], targets: &[f32]) -> Table {
    let (inputs, target_values) = (inputs.to_vec(), targets.to_vec());
    Table { source: "a test".into(), features, targets: Targets::Values(1), inputs, target_values }
}

/// Fails unless `found` equals `expected` within `tolerance` of the largest expected value.
#[track_caller]
pub fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30_f64, |largest, value| largest.max(value.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs() / largest;
        assert!(
            off <= tolerance,
            "{what}: element {i} is {found}, not {expected}: off by {off:.1e} of {largest}"
        );
    }
}

/// A network and its settings, ready to be trained on any grid.
pub struct Rig<'a, D: TestDevice = Cpu> {
    model: Model,
    /// The division of the model over the grid.
    pub plan: ParallelPlan,
    targets: Targets,
    settings: TrainerSettings,
    /// Samples in an epoch.
    pub num_samples: usize,
    /// True if synthetic samples are kept on the device.
    pub keeps_samples: bool,
    device: &'static D,
    _network: &'a Network,
}

/// The outcome of a run.
pub struct Run {
    /// Parameters after the last step, in logical order.
    pub parameters: Vec<f64>,
    /// The loss of each step.
    pub losses: Vec<f64>,
    /// The gradient norm of each step.
    pub norms: Vec<f64>,
    /// In stage 0 of ZeRO, the gradients of the last step, in logical order, summed over the ranks.
    pub gradients: Vec<f64>,
    /// The digest of the parameters.
    pub digest: u128,
    /// The loss over all samples with the final parameters; NaN if none were evaluated.
    pub tested: f64,
}

impl<'a, D: TestDevice> Rig<'a, D> {
    /// Returns a rig for `network` with inputs of shape `features`, in one stage, with a rank's
    /// share of a batch in `num_micro_batches` parts.
    pub fn new(
        network: &'a Network,
        features: Features,
        num_micro_batches: usize,
        settings: TrainerSettings,
    ) -> Rig<'a, D> {
        let targets = match network.loss {
            Loss::CrossEntropy => Targets::Classes(10),
            Loss::MeanSquaredError => Targets::Values(1),
            Loss::MeanOfSquares => Targets::Nothing,
        };
        let model = network.build(features).unwrap();
        let plan = ParallelPlan::single_stage(&model, num_micro_batches).unwrap();
        Rig {
            model,
            plan,
            targets,
            settings,
            num_samples: 500,
            keeps_samples: false,
            device: D::shared(),
            _network: network,
        }
    }

    /// Sets the number of classes of the targets.
    pub fn classes(mut self, classes: usize) -> Rig<'a, D> {
        self.targets = Targets::Classes(classes);
        self
    }

    /// Sets the targets.
    pub fn with_targets(self, targets: Targets) -> Rig<'a, D> {
        Rig { targets, ..self }
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the settings.
    pub fn settings(&self) -> &TrainerSettings {
        &self.settings
    }

    /// Returns the plan with which trainers are made.
    pub fn summed_plan(&self) -> ParallelPlan {
        D::summed(&self.plan)
    }

    /// Returns the names of the model's tensors.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.model.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// Returns all parameters of a trainer on every rank.
    pub fn parameters(&self, grid: &Grid, trainer: &Trainer<'_, D>) -> Vec<f32> {
        let values = everywhere(grid, |look| trainer.gather_parameters(look));
        values.into_iter().map(|value| value as f32).collect()
    }

    /// Gives a trainer these parameters, and slots of zeros.
    pub fn restore(&self, trainer: &mut Trainer<'_, D>, parameters: &[f32]) {
        set_parameters(trainer, &self.model, parameters);
        for slot in 0..trainer.slot_names().len() {
            for (number, tensor) in self.model.tensors.iter().enumerate() {
                trainer.write_part(Some(slot), number, &vec![0.0; tensor.num_elements()]).unwrap();
            }
        }
    }

    /// Returns batches of synthetic samples.
    pub fn synthetic(&self) -> Batches {
        let set = Synthetic::open(self.model.input, self.targets, 0, self.num_samples, 5).unwrap();
        Batches::new(set, Sampler::new(self.num_samples, self.settings.batch_size, Order::Shuffled, 3), None)
    }

    /// Trains on synthetic samples.
    pub fn train(&self, grid: &Grid, num_steps: u64, rate: f64) -> Run {
        let (mut trainer, mut batches) = (self.trainer(grid, rate), self.synthetic());
        if self.keeps_samples {
            trainer.keep_samples(&mut batches).unwrap();
        }
        self.finish(grid, trainer, batches, num_steps)
    }

    /// Trains on the embedded digits, and evaluates nothing: they are many for an emulated device.
    pub fn train_digits(&self, grid: &Grid, num_steps: u64, rate: f64) -> Run {
        let set = dataset::open_digits().unwrap().train;
        let standardise = set.preset().map(|pairs| {
            let pairs: Vec<_> = pairs.into_iter().map(|pair| pair.map(f64::from)).collect();
            Standardise::new(&pairs)
        });
        let sampler = Sampler::new(set.num_samples(), self.settings.batch_size, Order::Shuffled, 3);
        let mut batches = Batches::new(set, sampler, standardise);
        let mut trainer = self.trainer(grid, rate);
        self.take_steps(grid, &mut trainer, &mut batches, num_steps)
    }

    /// Trains on `table` in order, from the parameters `start`.
    pub fn train_table(&self, grid: &Grid, num_steps: u64, rate: f64, start: &[f32], table: Table) -> Run {
        let mut trainer = self.trainer(grid, rate);
        set_parameters(&mut trainer, &self.model, start);
        let sampler = Sampler::new(2, self.settings.batch_size, Order::Sequential, 0);
        self.finish(grid, trainer, Batches::new(Box::new(table), sampler, None), num_steps)
    }

    fn trainer<'g>(&'g self, grid: &'g Grid, rate: f64) -> Trainer<'g, D> {
        let learning_rate = LearningRateSchedule::constant(rate);
        let settings = TrainerSettings { learning_rate, ..self.settings };
        Trainer::new(self.device, grid, &self.model, &D::summed(&self.plan), settings).unwrap()
    }

    fn finish(&self, grid: &Grid, mut trainer: Trainer<'_, D>, mut batches: Batches, num_steps: u64) -> Run {
        let run = self.take_steps(grid, &mut trainer, &mut batches, num_steps);
        let tested = trainer.evaluate(&mut batches, || false).unwrap().continue_value().unwrap().loss;
        Run { tested, ..run }
    }

    fn take_steps(
        &self,
        grid: &Grid,
        trainer: &mut Trainer<'_, D>,
        batches: &mut Batches,
        num_steps: u64,
    ) -> Run {
        let outcomes: Vec<_> =
            (0..num_steps).map(|step| take_step(trainer, step, batches).unwrap()).collect();
        trainer.check_replicas(num_steps).unwrap();
        Run {
            tested: f64::NAN,
            digest: trainer.digest().unwrap(),
            parameters: everywhere(grid, |look| trainer.gather_parameters(look)),
            gradients: match trainer.zero_stage() {
                ZeroStage::None => everywhere(grid, |look| trainer.gather_gradients(look)),
                _ => Vec::new(),
            },
            losses: outcomes.iter().map(|outcome| outcome.loss).collect(),
            norms: outcomes.iter().map(|outcome| outcome.gradient_norm).collect(),
        }
    }

    /// Calls `work` with a trainer.
    pub fn with_trainer(&self, grid: &Grid, work: impl FnOnce(&mut Trainer<'_, D>)) {
        let mut trainer =
            Trainer::new(self.device, grid, &self.model, &D::summed(&self.plan), self.settings).unwrap();
        work(&mut trainer);
    }

    /// Returns the callers of the allocations in one step after `num_steps` others.
    pub fn foreign_allocations(&self, grid: &Grid, num_steps: u64) -> Vec<String> {
        let mut trainer =
            Trainer::new(self.device, grid, &self.model, &D::summed(&self.plan), self.settings).unwrap();
        let mut batches = self.synthetic();
        for step in 0..num_steps {
            take_step(&mut trainer, step, &mut batches).unwrap();
        }
        let maps = phalanx::memory::num_maps();
        WATCHING.store(true, Ordering::Relaxed);
        let outcome = take_step(&mut trainer, num_steps, &mut batches);
        WATCHING.store(false, Ordering::Relaxed);
        outcome.unwrap();
        let mut found = std::mem::take(&mut *FOUND.lock().unwrap());
        found.extend((maps..phalanx::memory::num_maps()).map(|_| "a memory map".to_owned()));
        found
    }
}

/// Takes step `step` and waits for its outcome.
pub fn take_step<D: Device>(
    trainer: &mut Trainer<'_, D>,
    step: u64,
    batches: &mut Batches,
) -> phalanx::Result<StepOutcome> {
    trainer.step(step, batches, RunRequests::default)?;
    Ok(trainer.flush(RunRequests::default())?.expect("the step is open"))
}

fn set_parameters<D: TestDevice>(trainer: &mut Trainer<'_, D>, model: &Model, mut values: &[f32]) {
    for (number, tensor) in model.tensors.iter().enumerate() {
        let (own, rest) = values.split_at(tensor.num_elements());
        trainer.write_part(None, number, own).unwrap();
        values = rest;
    }
}

/// A function that is called with whole tensors on rank 0.
type Look<'a> = &'a mut dyn FnMut(usize, &[f32]) -> phalanx::Result<()>;

/// Returns, on every rank and in logical order, the tensors that `gather` collects on rank 0.
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
