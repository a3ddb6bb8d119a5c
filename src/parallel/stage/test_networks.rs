//! Networks with every layer, fused and on its own, for tests.

use crate::device::{Activation, Gate};
use crate::nn::{Attention, Convolution, Features, Module, PoolWindows};

const IMAGE: Features = Features::Image { height: 9, width: 8, channels: 2 };

/// Returns networks with their names and inputs.
pub(super) fn networks() -> Vec<(&'static str, Vec<Module>, Features)> {
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
    let (gelu, dropout) = (activation(Activation::Gelu), Module::Dropout { rate: 0.3 });
    let residuals = [
        ("norm", vec![linear(5), norm.clone(), linear(4)]),
        ("norm without bias", vec![linear(5), Module::LayerNorm { bias: false }, linear(4)]),
        ("residual", residual(vec![norm.clone(), linear(8), gelu.clone(), linear(5)], vec![])),
        ("activation at the end of a body", residual(vec![linear(5), gelu.clone()], vec![])),
        ("activation alone at the end of a body", residual(vec![norm.clone(), gelu.clone()], vec![])),
        ("activation at the start of a body", residual(vec![gelu.clone(), linear(5)], vec![])),
        ("dropout at the end of a body", residual(vec![norm.clone(), linear(5), dropout.clone()], vec![])),
        ("dropouts in both branches", residual(vec![linear(5), dropout.clone()], vec![dropout])),
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
    let residual = |body, shortcut| Module::Residual { body, shortcut };
    // a sum that the last norm adds up
    let block = || residual(vec![convolution(4, 3, 1, 1), norm(2)], vec![]);
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
                relu.clone(),
            ]),
        ),
        (
            "residuals that end with norms",
            network(vec![convolution(4, 3, 1, 1), block(), relu.clone(), block(), block(), relu.clone()]),
        ),
        (
            "norms at the ends of both branches",
            network(vec![
                convolution(3, 3, 1, 1),
                residual(
                    vec![convolution(4, 3, 1, 1), norm(4), relu.clone(), norm(2)],
                    vec![convolution(4, 1, 1, 0), norm(1)],
                ),
            ]),
        ),
        (
            "norm and residual as bodies",
            network(vec![
                convolution(4, 3, 1, 1),
                residual(vec![norm(2)], vec![]),
                relu.clone(),
                residual(vec![block()], vec![norm(1), relu.clone()]),
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
