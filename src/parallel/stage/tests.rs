//! Every layer and loss against finite differences, fused and on its own.

use super::*;
use crate::device::{Activation, Cpu, Gate, MemoryOperations, Role};
use crate::nn::{
    Attention, Convolution, Draws, Features, Initial, Module, Network, PoolWindows, Segmentation, TensorShard,
};
use crate::parallel::batch::Summation;
use crate::parallel::tensor::division::FeatureDivision;
use crate::parallel::tensor::{Split, split};
use crate::sums::Section;

/// A model with values, ready for passes of `rows` rows.
struct Probe {
    device: Cpu,
    stage: Stage,
    rows: usize,
    parameters: FlatBuffer<Cpu>,
    parameter_gradients: FlatBuffer<Cpu>,
    activations: Activations<Cpu>,
    gradients: Gradients<Cpu>,
}

impl Probe {
    fn new(modules: Vec<Module>, input: Features, loss: Loss) -> Probe {
        let device = Cpu::new(1).unwrap();
        let model = Network { name: "probe".into(), modules, loss }.build(input).unwrap();
        let rows = 3;
        let whole = Segmentation::whole(model.tensors.len());
        let shards: Vec<TensorShard> = model.tensors.iter().map(TensorShard::whole).collect();
        let mut parameters = FlatBuffer::zeros(&device, &shards, &whole, Role::Parameters).unwrap();
        parameters.initialise(&device, &shards, 3).unwrap();
        let parameter_gradients = FlatBuffer::zeros(&device, &shards, &whole, Role::Parameters).unwrap();
        let division = FeatureDivision::new(Summation::ByLayout, 1);
        let head = Head::new(&model);
        let stage =
            Stage::new(0, None, &split(&model, Split::Pairs, 0, division), input.len(), 0, Some(head));
        let exchanger = Exchanger::alone(&device);
        let mut activations = stage.activations(&exchanger, rows, None).unwrap();
        let (inputs, targets) = activations.samples();
        let inputs = inputs.as_mut().unwrap();
        match input {
            Features::Tokens { vocabulary, .. } => {
                inputs
                    .iter_mut()
                    .enumerate()
                    .for_each(|(at, token)| *token = (3 * at * at % vocabulary) as f32);
            }
            _ => Initial::Normal { deviation: 1.0 }.fill(1, "input", 0, inputs),
        }
        if loss == Loss::CrossEntropy {
            (0..rows * head.predictions).for_each(|row| targets[row] = (row % head.outputs) as f32);
        } else {
            Initial::Normal { deviation: 1.0 }.fill(2, "targets", 0, targets);
        }
        let gradients = stage.gradients(&exchanger, rows).unwrap();
        activations.draws = Some(Draws { seed: 5, step: 3, first_row: 7 });
        Probe { device, stage, rows, parameters, parameter_gradients, activations, gradients }
    }

    fn loss(&mut self) -> f64 {
        let mut exchanger = Exchanger::alone(&self.device);
        for at in 0..self.stage.num_pieces() {
            let (parameters, activations) = (&self.parameters, &mut self.activations);
            self.stage.forward_piece(&mut exchanger, parameters, at, self.rows, activations).unwrap();
        }
        let mut sums = self.device.allocate(totals::LEN, Role::Exact).unwrap();
        let scale = 1.0 / self.rows as f32;
        let (activations, gradients) = (&self.activations, &mut self.gradients);
        self.stage.loss(&mut exchanger, self.rows, scale, activations, gradients, &mut sums).unwrap();
        let predictions = self.stage.head.as_ref().unwrap().predictions;
        f64::from(sums[totals::LOSS]) / (self.rows * predictions) as f64
    }

    /// The gradients of all parameters by the backward pass, whole or in halves, twice if it is to
    /// be accumulated.
    fn backward(&mut self, times: usize, pass: Pass) -> Vec<f32> {
        for time in 0..times {
            self.loss();
            let section = Section::of_chain(self.rows, time > 0);
            for at in (0..self.stage.num_pieces()).rev() {
                let mut context = BackwardContext {
                    exchanger: &mut Exchanger::alone(&self.device),
                    parameters: &self.parameters,
                    gradients: &mut self.parameter_gradients,
                    section,
                };
                let (activations, gradients) = (&mut self.activations, &mut self.gradients);
                self.stage.backward_piece(&mut context, at, pass, activations, gradients).unwrap();
            }
            for at in (0..self.stage.num_pieces()).rev().filter(|_| pass == Pass::Inputs) {
                let (activations, gradients) = (&mut self.activations, &mut self.gradients);
                let rows = WeightRows { activations, gradients, first_row: 0, section };
                let (exchanger, sums) = (&mut Exchanger::alone(&self.device), &mut self.parameter_gradients);
                self.stage.weights_piece(exchanger, sums, at, &mut [rows]).unwrap();
            }
        }
        self.parameter_gradients.segment(0).to_vec()
    }

    /// Central differences, for at most `most` parameters.
    fn check_against_differences(mut self, most: usize) {
        let found = self.backward(1, Pass::Whole);
        let largest = found.iter().fold(1e-3_f32, |largest, g| largest.max(g.abs()));
        let step = 1e-3_f32;
        let mut bad = 0;
        let stride = (found.len() / most).max(1);
        for index in (0..found.len()).step_by(stride) {
            let before = self.parameters.segment(0)[index];
            let mut at = |value: f32| {
                self.parameters.segment_mut(0)[index] = value;
                self.loss()
            };
            let (above, below) = (at(before + step), at(before - step));
            at(before);
            let expected = (above - below) / f64::from(2.0 * step);
            bad += usize::from((f64::from(found[index]) - expected).abs() > 1e-2 * f64::from(largest));
        }
        // a kink of ReLU or of a maximum may lie within the step, but rarely
        let tried = found.len().div_ceil(stride);
        assert!(bad * 50 <= tried, "{bad} of {tried} gradients are off, largest {largest}");
    }

    fn check_accumulation(mut self) {
        let once = self.backward(1, Pass::Whole);
        let twice = self.backward(2, Pass::Whole);
        let largest = once.iter().fold(1e-6_f32, |largest, g| largest.max(g.abs()));
        assert_eq!(self.backward(1, Pass::Inputs), once, "in halves");
        for (one, two) in once.iter().zip(&twice) {
            assert!((2.0 * one - two).abs() < 1e-5 * largest, "{one} twice is not {two}");
        }
    }
}

const IMAGE: Features = Features::Image { height: 9, width: 8, channels: 2 };

fn networks() -> Vec<(&'static str, Vec<Module>, Features)> {
    let linear = |outputs| Module::linear(outputs, true);
    let convolution = Module::convolution;
    let activation = Module::Activation;
    let pool = |size| Module::MaxPool(PoolWindows::of(size));
    let behind = |mut front: Vec<Module>| {
        front.extend([Module::Flatten, linear(4)]);
        front
    };
    let mut cases = vec![
        ("linear", vec![linear(4)], Features::Flat(7)),
        ("linear without bias", vec![Module::linear(4, false), linear(4)], Features::Flat(7)),
        ("product", vec![Module::Product { outputs: 5 }, linear(4)], Features::Flat(7)),
        ("convolution", behind(vec![convolution(3, 3)]), IMAGE),
        ("convolution, ReLU", behind(vec![convolution(3, 3), activation(Activation::Relu)]), IMAGE),
        ("convolution, pool", behind(vec![convolution(3, 3), pool(2)]), IMAGE),
        (
            "convolution, pool, ReLU",
            behind(vec![convolution(3, 2), pool(2), activation(Activation::Relu)]),
            IMAGE,
        ),
        (
            "convolution, ReLU, pool",
            behind(vec![convolution(17, 3), activation(Activation::Relu), pool(2)]),
            IMAGE,
        ),
        ("two convolutions", behind(vec![convolution(3, 3), pool(2), convolution(5, 2)]), IMAGE),
        ("pool alone", behind(vec![convolution(3, 2), pool(3)]), IMAGE),
        ("GELU of an image", behind(vec![convolution(3, 3), activation(Activation::Gelu), pool(2)]), IMAGE),
        ("tanh of an image", behind(vec![convolution(3, 3), activation(Activation::Tanh)]), IMAGE),
    ];
    let norm = Module::LayerNorm { bias: true };
    let residual = |body: Vec<Module>, shortcut: Vec<Module>| {
        vec![linear(5), Module::Residual { body, shortcut }, linear(4)]
    };
    let gelu = activation(Activation::Gelu);
    let residuals = [
        ("norm", vec![linear(5), norm.clone(), linear(4)]),
        ("norm without bias", vec![linear(5), Module::LayerNorm { bias: false }, linear(4)]),
        ("residual", residual(vec![norm.clone(), linear(8), gelu.clone(), linear(5)], vec![])),
        ("activation at the end of a body", residual(vec![linear(5), gelu.clone()], vec![])),
        ("activation alone at the end of a body", residual(vec![norm.clone(), gelu.clone()], vec![])),
        ("activation at the start of a body", residual(vec![gelu.clone(), linear(5)], vec![])),
        ("shortcut", residual(vec![linear(6), gelu.clone(), linear(3)], vec![linear(3)])),
        (
            "activations at the ends of both branches",
            residual(
                vec![linear(3), gelu.clone()],
                vec![norm.clone(), linear(3), activation(Activation::Tanh)],
            ),
        ),
        (
            "activation at the start of both branches",
            residual(vec![gelu.clone(), linear(3)], vec![gelu.clone(), linear(3)]),
        ),
        (
            "residual in a residual",
            residual(
                vec![Module::Residual { body: vec![norm.clone(), linear(5)], shortcut: vec![] }, linear(5)],
                vec![],
            ),
        ),
        (
            "residuals in both branches",
            residual(
                vec![
                    linear(5),
                    Module::Residual { body: vec![norm.clone(), gelu.clone()], shortcut: vec![linear(5)] },
                ],
                vec![Module::Residual { body: vec![linear(5)], shortcut: vec![] }, gelu.clone()],
            ),
        ),
        (
            "residuals one after the other",
            vec![
                linear(5),
                Module::Residual { body: vec![norm.clone(), linear(5)], shortcut: vec![] },
                Module::Residual { body: vec![norm.clone(), linear(5), gelu.clone()], shortcut: vec![] },
                gelu.clone(),
                linear(4),
            ],
        ),
        (
            "residual at the start and the end",
            vec![Module::Residual { body: vec![linear(7)], shortcut: vec![] }],
        ),
    ];
    cases.extend(residuals.map(|(name, modules)| (name, modules, Features::Flat(7))));
    cases.push((
        "residual of images",
        behind(vec![
            convolution(3, 3),
            Module::Residual {
                body: vec![norm.clone(), gelu, convolution(4, 3)],
                shortcut: vec![convolution(4, 3)],
            },
        ]),
        IMAGE,
    ));
    cases.extend(images());
    cases.extend(sequences());
    let functions =
        [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Tanh];
    for function in functions {
        cases.push(("activation", vec![linear(9), activation(function), linear(4)], Features::Flat(7)));
    }
    cases
}

/// Returns networks of images as residual networks have them.
fn images() -> Vec<(&'static str, Vec<Module>, Features)> {
    let convolution = |outputs, kernel, stride, padding| {
        Module::Convolution(Convolution { outputs, kernel, stride, padding, bias: false })
    };
    let relu = Module::Activation(Activation::Relu);
    let norm = |groups| Module::GroupNorm { groups };
    let network = |front: Vec<Module>| [front, vec![Module::GlobalAverage, Module::linear(4, true)]].concat();
    let cases = [
        ("convolution with padding", network(vec![convolution(4, 3, 1, 1)])),
        ("convolution with padding, pool, ReLU", {
            network(vec![convolution(4, 3, 1, 1), Module::MaxPool(PoolWindows::of(2)), relu.clone()])
        }),
        ("convolution with a stride", network(vec![convolution(5, 3, 2, 1), convolution(6, 1, 2, 0)])),
        ("average pool", network(vec![convolution(4, 3, 1, 1), Module::AveragePool(PoolWindows::of(3))])),
        ("windows that overlap", {
            let windows = PoolWindows { size: 3, stride: 2, padding: 1 };
            network(vec![convolution(4, 3, 1, 1), Module::MaxPool(windows), Module::AveragePool(windows)])
        }),
        ("group norm", network(vec![convolution(6, 3, 1, 1), norm(3), relu.clone()])),
        ("dropout", network(vec![convolution(6, 3, 1, 1), Module::Dropout { rate: 0.3 }, relu.clone()])),
        (
            "residual of images in steps",
            network(vec![
                convolution(4, 3, 1, 1),
                norm(2),
                Module::Residual {
                    body: vec![convolution(6, 3, 2, 1), norm(3), relu.clone(), convolution(6, 3, 1, 1)],
                    shortcut: vec![convolution(6, 1, 2, 0), norm(1)],
                },
                relu,
            ]),
        ),
    ];
    cases.map(|(name, modules)| (name, modules, IMAGE)).into()
}

/// Returns networks of sequences; without positions, most tokens have several places.
fn sequences() -> Vec<(&'static str, Vec<Module>, Features)> {
    let attention = |heads, key_value_heads, causal: bool| {
        let (bias, deviation, output_deviation) = (true, None, None);
        // keys of a position see others
        let rotary = causal.then_some(100.0);
        Module::Attention(Attention {
            heads,
            key_value_heads,
            causal,
            rotary,
            dropout: 0.3,
            bias,
            deviation,
            output_deviation,
        })
    };
    let front = [Module::Embedding { width: 8, deviation: 1.0 }, Module::Positions { deviation: 1.0 }];
    let network = |modules: &[Module]| [&front[..], modules, &[Module::linear(4, true)]].concat();
    let block = |attention| Module::Residual {
        body: vec![Module::LayerNorm { bias: true }, attention],
        shortcut: vec![],
    };
    let cases = [
        ("embedding", vec![front[0].clone(), Module::linear(4, true)]),
        ("positions", network(&[])),
        ("linear over positions", network(&[Module::linear(5, true), Module::Activation(Activation::Gelu)])),
        ("attention", network(&[attention(2, 2, false)])),
        ("causal attention", network(&[block(attention(4, 4, true))])),
        (
            "attention with shared keys",
            network(&[block(attention(4, 2, true)), block(attention(2, 1, false))]),
        ),
        ("flattened", network(&[Module::Flatten])),
        ("root mean square norm", network(&[Module::RmsNorm])),
        ("layer scale", network(&[block(Module::LayerScale { initial: 0.3 })])),
        (
            "gated linear units",
            network(&[
                Module::linear(6, true),
                Module::GatedLinearUnit { gate: Gate::Silu },
                Module::linear(6, true),
                Module::GatedLinearUnit { gate: Gate::Sigmoid },
                Module::linear(4, true),
                Module::GatedLinearUnit { gate: Gate::Gelu },
            ]),
        ),
    ];
    // a length that is no multiple of a block of queries
    let input = Features::Tokens { len: 19, vocabulary: 11 };
    cases.map(|(name, modules)| (name, modules, input)).into()
}

#[test]
fn every_layer_agrees_with_finite_differences_under_every_loss() {
    for (name, modules, input) in networks() {
        for loss in [Loss::CrossEntropy, Loss::MeanSquaredError, Loss::MeanOfSquares] {
            println!("{name}, {loss:?}");
            Probe::new(modules.clone(), input, loss).check_against_differences(300);
        }
    }
}

#[test]
fn gradients_accumulate_in_every_layer() {
    for (name, modules, input) in networks() {
        println!("{name}");
        Probe::new(modules, input, Loss::CrossEntropy).check_accumulation();
    }
}

#[test]
fn groups_cover_a_stage_and_need_less_memory() {
    let stage = |modules: Vec<Module>, width: usize| {
        let loss = Loss::MeanSquaredError;
        let model = Network { name: "probe".into(), modules, loss }.build(Features::Flat(width)).unwrap();
        let division = FeatureDivision::new(Summation::ByLayout, 1);
        let parts = split(&model, Split::Pairs, 0, division);
        let head = Head::new(&model);
        Stage::new(0, None, &parts, width, 0, Some(head))
    };
    let deep = stage(vec![Module::Product { outputs: 64 }; 16], 64);
    let with_activations = vec![Module::linear(64, true), Module::Activation(Activation::Gelu)];
    let mlp = stage(vec![with_activations; 8].concat(), 64);
    for (stage, num_slots) in [(&deep, 1), (&deep, 4), (&mlp, 1), (&stage(vec![], 3), 1)] {
        let groups = stage.smallest_groups(num_slots, 2);
        let mut end = 0;
        for group in &groups {
            assert_eq!(group.pieces.start, end);
            end = group.pieces.end;
        }
        assert_eq!(end, stage.num_pieces());
        let whole = stage.row_widths(&stage.one_group());
        let memory = |groups: &[PieceGroup]| {
            let widths = stage.row_widths(groups);
            (num_slots * widths.kept, 2 * widths.inner())
        };
        let (kept, inner) = memory(&groups);
        assert!(kept + inner <= num_slots * whole.kept + 2 * whole.inner(), "{groups:?}");
        if stage.num_pieces() > 0 {
            let without = num_slots * (whole.kept + whole.inner());
            assert!(3 * (kept + inner) <= 2 * without, "{kept} + {inner} of {without}");
        }
    }
}
