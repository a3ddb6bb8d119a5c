//! Every layer and loss against finite differences, fused and on its own.

use super::*;
use crate::device::{Activation, Cpu, Device, totals};

/// A model with values, ready for passes of `rows` rows.
struct Probe {
    device: Cpu,
    model: Model,
    rows: usize,
    parameters: FlatBuffer<Cpu>,
    gradients: FlatBuffer<Cpu>,
    activations: Activations<Cpu>,
    pair: GradientPair<Cpu>,
}

impl Probe {
    fn new(modules: Vec<Module>, input: Features, loss: Loss) -> Probe {
        let device = Cpu::new(1).unwrap();
        let model = Network { name: "probe".into(), modules, loss }.build(input).unwrap();
        let rows = 3;
        let whole = Segmentation::whole(model.tensors.len());
        let mut parameters = FlatBuffer::zeros(&device, &model.tensors, &whole).unwrap();
        parameters.initialise(&device, &model.tensors, 3).unwrap();
        let gradients = FlatBuffer::zeros(&device, &model.tensors, &whole).unwrap();
        let mut activations = Activations::new(&device, &model, 0..model.layers.len(), rows).unwrap();
        Initial::Normal { deviation: 1.0 }.fill(1, "input", 0, &mut activations.input);
        if loss == Loss::CrossEntropy {
            (0..rows).for_each(|row| activations.targets[row] = (row % model.outputs) as f32);
        } else {
            Initial::Normal { deviation: 1.0 }.fill(2, "targets", 0, &mut activations.targets);
        }
        let pair = GradientPair::new(&device, &model, rows).unwrap();
        Probe { device, model, rows, parameters, gradients, activations, pair }
    }

    fn loss(&mut self) -> f64 {
        let stage = Stage::whole(&self.model);
        stage.forward(&self.device, &self.parameters, self.rows, &mut self.activations);
        let mut sums = self.device.allocate(totals::LEN).unwrap();
        let scale = 1.0 / self.rows as f32;
        stage.loss(&self.device, self.rows, scale, &self.activations, &mut self.pair, &mut sums);
        f64::from(sums[totals::LOSS]) / self.rows as f64
    }

    /// The gradients of all parameters by the backward pass, twice if it is to be accumulated.
    fn backward(&mut self, times: usize) -> Vec<f32> {
        for time in 0..times {
            self.loss();
            let stage = Stage::whole(&self.model);
            for index in stage.layers.clone().rev() {
                stage.backward_layer(
                    &self.device,
                    index,
                    self.rows,
                    &self.parameters,
                    &self.activations,
                    &mut self.gradients,
                    &mut self.pair,
                    time > 0,
                );
            }
        }
        self.gradients.segment(0).to_vec()
    }

    /// Central differences, for at most `most` parameters.
    fn check_against_differences(mut self, most: usize) {
        let found = self.backward(1);
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
        let once = self.backward(1);
        let twice = self.backward(2);
        let largest = once.iter().fold(1e-6_f32, |largest, g| largest.max(g.abs()));
        for (one, two) in once.iter().zip(&twice) {
            assert!((2.0 * one - two).abs() < 1e-5 * largest, "{one} twice is not {two}");
        }
    }
}

const IMAGE: Features = Features::Image { height: 9, width: 8, channels: 2 };

fn networks() -> Vec<(&'static str, Vec<Module>, Features)> {
    let linear = |outputs| Module::Linear { outputs, bias: true };
    let convolution = |outputs, kernel| Module::Convolution { outputs, kernel };
    let activation = Module::Activation;
    let pool = |size| Module::MaxPool { size };
    let behind = |mut front: Vec<Module>| {
        front.extend([Module::Flatten, linear(4)]);
        front
    };
    let mut cases = vec![
        ("linear", vec![linear(4)], Features::Flat(7)),
        ("linear without bias", vec![Module::Linear { outputs: 4, bias: false }, linear(4)], Features::Flat(7)),
        ("product", vec![Module::Product { outputs: 5 }, linear(4)], Features::Flat(7)),
        ("convolution", behind(vec![convolution(3, 3)]), IMAGE),
        ("convolution, ReLU", behind(vec![convolution(3, 3), activation(Activation::Relu)]), IMAGE),
        ("convolution, pool", behind(vec![convolution(3, 3), pool(2)]), IMAGE),
        ("convolution, pool, ReLU", behind(vec![convolution(3, 2), pool(2), activation(Activation::Relu)]), IMAGE),
        ("convolution, ReLU, pool", behind(vec![convolution(17, 3), activation(Activation::Relu), pool(2)]), IMAGE),
        ("two convolutions", behind(vec![convolution(3, 3), pool(2), convolution(5, 2)]), IMAGE),
        ("pool alone", behind(vec![convolution(3, 2), pool(3)]), IMAGE),
        ("GELU of an image", behind(vec![convolution(3, 3), activation(Activation::Gelu), pool(2)]), IMAGE),
        ("tanh of an image", behind(vec![convolution(3, 3), activation(Activation::Tanh)]), IMAGE),
    ];
    for function in [Activation::Relu, Activation::Gelu, Activation::Tanh] {
        cases.push(("activation", vec![linear(9), activation(function), linear(4)], Features::Flat(7)));
    }
    cases
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
fn the_models_have_the_known_numbers_of_parameters() {
    let image = |size, channels| Features::Image { height: size, width: size, channels };
    assert_eq!(Network::lenet(10).build(image(28, 1)).unwrap().num_parameters(), 21_840);
    assert_eq!(Network::cifar(10).build(image(32, 3)).unwrap().num_parameters(), 62_006);
    let mlp = Network::mlp(&[128, 64], Activation::Relu, true, 10, Loss::CrossEntropy);
    assert_eq!(mlp.build(image(28, 1)).unwrap().num_parameters(), 109_386);
    assert_eq!(Network::deep_mlp(1024, 4).build(Features::Flat(1024)).unwrap().num_parameters(), 4 << 20);
}

#[test]
fn lenet_fuses_to_five_layers_with_pytorchs_names() {
    let model = Network::lenet(10).build(Features::Image { height: 28, width: 28, channels: 1 }).unwrap();
    assert_eq!(model.layers.len(), 5);
    let names: Vec<_> = model.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names[..4], ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"]);
    assert_eq!(names[4..], ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
}

#[test]
fn what_does_not_fit_is_refused_with_the_sizes() {
    let error = |network: Network, input| network.build(input).unwrap_err().to_string();
    let text = error(Network::lenet(10), Features::Image { height: 4, width: 28, channels: 1 });
    assert!(text.contains("a kernel of 5 × 5 does not fit images of 4 × 28"), "{text}");
    let text = error(Network::lenet(10), Features::Flat(784));
    assert!(text.contains("a convolution needs images, not 784 features"), "{text}");
    let mlp = Network::mlp(&[16, 0], Activation::Relu, true, 10, Loss::CrossEntropy);
    assert!(error(mlp, Features::Flat(4)).contains("no size may be 0"));
}
