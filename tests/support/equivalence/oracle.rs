//! PyTorch's trajectories.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

use phalanx::comm::Grid;
use phalanx::dataset::{Batches, Order, Sampler, Table, Targets};
use phalanx::device::{Activation, Gate};
use phalanx::nn::{Attention, Convolution, Features, GptSizes, Loss, Model, Module, Network};
use phalanx::optim::{DecayScope, LearningRateSchedule, LearningRateScheduleKind, OptimizerSettings, Rule};
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::zero::ZeroStage;
use phalanx::train::{Trainer, TrainerSettings};

use super::{TestDevice, assert_close, everywhere, set_parameters, settings, take_step};

/// Returns a linear layer, two residuals with two more each, and one at the end.
fn residual_mlp() -> Network {
    let linear = |outputs, name: &str| Module::linear(outputs, true).named(name);
    let residual = |number: usize| Module::Residual {
        body: vec![
            Module::LayerNorm { bias: true }.named(&format!("ln.{number}")),
            linear(24, &format!("up.{number}")),
            Module::Activation(Activation::Gelu),
            linear(12, &format!("down.{number}")),
        ],
        shortcut: vec![],
    };
    let modules = vec![linear(12, "fc1"), residual(0), residual(1), linear(4, "fc2")];
    Network { name: "residual".into(), modules, loss: Loss::CrossEntropy }
}

/// Returns a residual network of images: a block that keeps their size, then one that halves it.
fn residual_conv() -> Network {
    let convolution = |outputs, kernel, stride, name: &str| {
        let padding = kernel / 2;
        Module::Convolution(Convolution { outputs, kernel, stride, padding, bias: false }).named(name)
    };
    let norm = |name: &str| Module::GroupNorm { groups: 4 }.named(name);
    let relu = Module::Activation(Activation::Relu);
    let block = |names: [&str; 4], outputs, stride, shortcut| Module::Residual {
        body: vec![
            convolution(outputs, 3, stride, names[0]),
            norm(names[1]),
            relu.clone(),
            convolution(outputs, 3, 1, names[2]),
            norm(names[3]),
        ],
        shortcut,
    };
    let modules = vec![
        convolution(8, 3, 1, "conv1"),
        norm("n1"),
        relu.clone(),
        block(["a1", "an1", "a2", "an2"], 8, 1, vec![]),
        relu.clone(),
        block(["b1", "bn1", "b2", "bn2"], 16, 2, vec![convolution(16, 1, 2, "short")]),
        relu.clone(),
        Module::GlobalAverage,
        Module::linear(5, true).named("fc"),
    ];
    Network { name: "residual".into(), modules, loss: Loss::CrossEntropy }
}

/// Returns a transformer of the LLaMA family: the first block with SwiGLU, the second with GEGLU.
fn transformer() -> Network {
    let linear = |outputs, name: &str| Module::linear(outputs, false).named(name);
    let norm = |number: usize| Module::RmsNorm.named(&format!("norm.{number}"));
    let attention = Attention {
        heads: 6,
        key_value_heads: 2,
        causal: true,
        rotary: Some(100.0),
        dropout: 0.0,
        bias: false,
        deviation: None,
        output_deviation: None,
    };
    let mut modules = vec![Module::Embedding { width: 24, deviation: 1.0 }.named("embedding")];
    for (block, gate) in [Gate::Silu, Gate::Gelu].into_iter().enumerate() {
        let attention = Module::Attention(attention).named(&format!("attention.{block}"));
        let gated = vec![
            norm(2 * block + 1),
            linear(40, &format!("up.{block}")),
            Module::GatedLinearUnit { gate },
            linear(24, &format!("down.{block}")),
        ];
        modules.push(Module::Residual { body: vec![norm(2 * block), attention], shortcut: vec![] });
        modules.push(Module::Residual { body: gated, shortcut: vec![] });
    }
    modules.extend([norm(4), linear(19, "output")]);
    Network { name: "transformer".into(), modules, loss: Loss::CrossEntropy }
}

thread_local! {
    /// The arrays that have been read, by the names of the trajectory and of the array: many layouts are
    /// compared with one trajectory.
    static ARRAYS: RefCell<HashMap<String, Rc<[f64]>>> = RefCell::default();
}

/// A trajectory that PyTorch computed in `f64`.
pub struct Oracle {
    name: String,
    file: hdf5::File,
    network: Network,
    features: Features,
    targets: Targets,
    optimizer: OptimizerSettings,
    schedule: LearningRateSchedule,
    clip_norm: Option<f64>,
}

impl Oracle {
    /// Opens the trajectory `name`, with the network and optimizer that its note describes.
    pub fn open(name: &str) -> Oracle {
        let path =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/oracles/{name}.h5"));
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
            "classifier_tanh_lion" => (
                Network::mlp(&[16, 12], Activation::Tanh, true, 5, Loss::CrossEntropy),
                Features::Flat(20),
                Targets::Classes(5),
                OptimizerSettings { weight_decay: 0.1, ..OptimizerSettings::new(Rule::Lion) },
                1e-3,
            ),
            "gpt_bias_adamw" => (
                Network::gpt(GptSizes { layers: 2, heads: 2, width: 16, bias: true, dropout: 0.0 }),
                Features::Tokens { len: 8, vocabulary: 17 },
                Targets::Tokens { len: 8, vocabulary: 17 },
                OptimizerSettings { rule: Rule::AdamW, weight_decay: 1e-2, ..adam },
                1e-3,
            ),
            "gpt_nobias_decay_clip" => (
                Network::gpt(GptSizes { layers: 3, heads: 3, width: 24, bias: false, dropout: 0.0 }),
                Features::Tokens { len: 16, vocabulary: 29 },
                Targets::Tokens { len: 16, vocabulary: 29 },
                OptimizerSettings {
                    rule: Rule::AdamW,
                    betas: [0.9, 0.99],
                    weight_decay: 0.1,
                    decay: DecayScope::Matrices,
                    ..adam
                },
                1e-3,
            ),
            "transformer_adamw" => (
                transformer(),
                Features::Tokens { len: 9, vocabulary: 19 },
                Targets::Tokens { len: 9, vocabulary: 19 },
                OptimizerSettings { rule: Rule::AdamW, weight_decay: 1e-2, ..adam },
                1e-3,
            ),
            "residual_conv_sgd" => (
                residual_conv(),
                image(12, 3),
                Targets::Classes(5),
                OptimizerSettings { momentum: 0.9, nesterov: true, weight_decay: 5e-4, ..sgd },
                0.05,
            ),
            "residual_mlp_adam" => (residual_mlp(), Features::Flat(10), Targets::Classes(4), adam, 2e-3),
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
            LearningRateSchedule {
                kind: LearningRateScheduleKind::Cosine,
                last: 1e-4,
                num_steps: 12,
                ..LearningRateSchedule::constant(rate)
            }
        } else if name.contains("clip") {
            LearningRateSchedule {
                kind: LearningRateScheduleKind::Cosine,
                last: 1e-4,
                warmup_steps: 4,
                num_steps: 16,
                ..LearningRateSchedule::constant(rate)
            }
        } else {
            LearningRateSchedule::constant(rate)
        };
        let clip_norm = name.contains("clip").then_some(1.0);
        Oracle { name: name.into(), file, network, features, targets, optimizer, schedule, clip_norm }
    }

    fn read(&self, name: &str) -> Rc<[f64]> {
        let key = format!("{}/{name}", self.name);
        if let Some(array) = ARRAYS.with_borrow(|arrays| arrays.get(&key).cloned()) {
            return array;
        }
        let dataset = self.file.dataset(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let array: Rc<[f64]> = dataset.read_raw().unwrap_or_else(|error| panic!("{name}: {error}")).into();
        ARRAYS.with_borrow_mut(|arrays| arrays.insert(key, array.clone()));
        array
    }

    /// Reads arrays one after the other into one.
    fn read_all(&self, names: impl Iterator<Item = String>) -> Vec<f64> {
        names.map(|name| self.read(&name)).collect::<Vec<_>>().concat()
    }

    /// Reads all tensors under `group`, in the order of `model`.
    fn tensors(&self, model: &Model, group: &str) -> Vec<f64> {
        self.read_all(model.tensors.iter().map(|tensor| format!("{group}/{}", tensor.name)))
    }

    /// Reads the inputs of all steps into one array, images converted to channels last.
    fn inputs(&self, num_steps: usize) -> Vec<f32> {
        let values = self.read_all((0..num_steps).map(|step| format!("input/{step}/x")));
        let mut values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
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

    /// Returns the model of the trajectory.
    pub fn model(&self) -> Model {
        self.network.build(self.features).unwrap()
    }

    /// Takes PyTorch's steps on `grid`, with the model divided by `plan`, and compares every
    /// intermediate result within 10⁻⁵ of the largest value. Returns the digest of the final
    /// parameters.
    pub fn check<D: TestDevice>(&self, grid: &Grid, sync: SyncSettings, plan: &ParallelPlan) -> u128 {
        const TOLERANCE: f64 = 1e-5;
        let losses = self.read("f64/loss");
        let inputs = self.inputs(losses.len());
        let batch_size = inputs.len() / self.features.len() / losses.len();
        let has_targets = self.targets != Targets::Nothing;
        let steps = (0..losses.len()).filter(|_| has_targets);
        let targets = self.read_all(steps.map(|step| format!("input/{step}/y")));
        let target_values = targets.into_iter().map(|value| value as f32).collect();
        let (features, targets) = (self.features, self.targets);
        let table = Table { source: "an oracle".into(), features, targets, inputs, target_values };
        let sampler = Sampler::new(batch_size * losses.len(), batch_size, Order::Sequential, 0);
        let mut batches = Batches::new(Box::new(table), sampler, None);

        let model = self.model();
        let (optimizer, learning_rate) = (self.optimizer, self.schedule);
        let sync = SyncSettings { clip_norm: self.clip_norm, ..sync };
        let settings = TrainerSettings { optimizer, learning_rate, ..settings(batch_size, sync) };
        let mut trainer = Trainer::new(D::shared(), grid, &model, &D::summed(plan), settings).unwrap();
        let initial: Vec<f32> =
            self.tensors(&model, "initial").into_iter().map(|value| value as f32).collect();
        set_parameters(&mut trainer, &model, &initial);

        let rates: Vec<f64> = (0..losses.len() as u64).map(|step| self.schedule.at(step)).collect();
        assert_close("learning rates", &rates, &self.read("f64/learning_rate"), 1e-12);
        let (mut found_losses, mut found_norms) = (Vec::new(), Vec::new());
        for (step, rate) in rates.iter().enumerate() {
            let outcome = take_step(&mut trainer, step as u64, &mut batches).unwrap();
            assert_eq!(outcome.learning_rate, *rate);
            found_losses.push(outcome.loss);
            found_norms.push(outcome.gradient_norm);
            if step == 0 && sync.zero == Some(ZeroStage::None) {
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

    /// Compares the final parameters. Adam divides a gradient by its own size, so an element whose
    /// gradient is lost in the rounding of `f32` takes steps of any size up to the learning rate:
    /// PyTorch's own `f32` run is off by 1.2·10⁻⁵ and 1.8·10⁻⁵ of the largest weight of the tensor
    /// at one such element in each of the two trajectories that have them. Elements whose first
    /// gradient is below 2·10⁻⁶ of the largest have ten times the tolerance, and those below 6·10⁻⁷
    /// that are not 0, ten roundings of the largest, a hundred times: such a gradient belongs to an
    /// input just above the kink of a ReLU, the difference of two sums. They may be no more than one in
    /// a thousand. The biases of attention's keys have no gradient at all, for they add the same to all
    /// scores of a query, so rounding alone makes their steps: they do not count.
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
            for ((found, expected), g) in found.iter_mut().zip(expected.iter()).zip(gradients) {
                let off = (*found - expected).abs() / scale;
                let times = match g.abs() / largest {
                    share if (1e-14..6e-7).contains(&share) => 100.0,
                    share if share < 2e-6 => 10.0,
                    _ => 1.0,
                };
                if adaptive && (tolerance..times * tolerance).contains(&off) {
                    num_lost += usize::from(g.abs() > 1e-14 * largest);
                    *found = *expected;
                }
            }
            assert_close(&tensor.name, &found, &expected, tolerance);
        }
        assert!(num_lost * 1000 <= model.num_parameters(), "{num_lost} elements are off");
    }
}
