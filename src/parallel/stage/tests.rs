//! Every layer and loss against finite differences, fused and on its own.

use super::test_networks::networks;
use super::*;
use crate::device::{Activation, Cpu, MemoryOperations, Role};
use crate::nn::{Draws, Features, Initial, Module, Network, Segmentation, TensorShard};
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
        let mut activations = stage.allocate_activations(&device, rows, None).unwrap();
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
        let gradients = stage.allocate_gradients(&device, rows).unwrap();
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
        let totals = self.device.take_totals(&mut sums).unwrap();
        totals.loss.value() / (self.rows * predictions) as f64
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
        self.stage.share_gradients();
        self.gradients = self.stage.allocate_gradients(&self.device, self.rows).unwrap();
        self.gradients.values.iter_mut().flatten().for_each(|array| array.fill(f32::NAN));
        assert_eq!(self.backward(1, Pass::Whole), once, "in shared arrays");
    }
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

/// The loss takes the gradient through the last activation, with the same bits.
#[test]
fn losses_join_the_last_activation() {
    let linear = |bias| Module::linear(5, bias);
    use Activation::{Gelu, GeluTanh, Relu, Silu, Tanh};
    for activation in [Relu, Gelu, GeluTanh, Silu, Tanh] {
        // fused with the layer before, and on its own
        for last in [vec![linear(true)], vec![linear(false)], vec![linear(true), Module::RmsNorm]] {
            let modules = [vec![linear(true)], last, vec![Module::Activation(activation)]].concat();
            for pass in [Pass::Whole, Pass::Inputs] {
                for loss in [Loss::MeanSquaredError, Loss::MeanOfSquares] {
                    let new = || Probe::new(modules.clone(), Features::Flat(4), loss);
                    let (mut apart, mut joined) = (new(), new());
                    joined.stage.join_loss_and_activation();
                    assert_eq!(joined.stage.loss_activation, Some(activation));
                    assert_eq!(joined.backward(2, pass), apart.backward(2, pass), "{activation:?}, {pass:?}");
                }
            }
        }
    }
    let mut logits = Probe::new(vec![linear(true)], Features::Flat(4), Loss::CrossEntropy);
    logits.stage.join_loss_and_activation();
    assert_eq!(logits.stage.loss_activation, None);
}

/// Returns a stage of all layers of a network.
fn stage(modules: Vec<Module>, width: usize) -> Stage {
    let loss = Loss::MeanSquaredError;
    let model = Network { name: "probe".into(), modules, loss }.build(Features::Flat(width)).unwrap();
    let parts = split(&model, Split::Pairs, 0, FeatureDivision::new(Summation::ByLayout, 1));
    Stage::new(0, None, &parts, width, 0, Some(Head::new(&model)))
}

#[test]
fn gradients_of_a_deep_stage_share_few_arrays() {
    let residual = |body| Module::Residual { body, shortcut: vec![] };
    let products = vec![Module::Product { outputs: 64 }; 16];
    let residuals = vec![residual(vec![Module::Product { outputs: 64 }; 3]); 8];
    // both ends, and those that are there at a time: two, and that of the residual's end
    for (modules, most) in [(products, 4), (residuals, 5)] {
        let mut stage = stage(modules, 64);
        let num_pieces = stage.num_pieces();
        assert!(stage.row_widths(&stage.one_group()).gradients >= num_pieces * 64 / 2);
        stage.share_gradients();
        assert!(stage.row_widths(&stage.one_group()).gradients <= most * 64, "{num_pieces} pieces");
    }
}

#[test]
fn groups_cover_a_stage_and_need_less_memory() {
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
