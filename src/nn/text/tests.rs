//! Networks as text.

use crate::device::Activation;
use crate::nn::{Features, Loss, Module, Network};

fn read(text: &str) -> crate::Result<Network> {
    Network::from_text(text, "net.kdl", "net", Loss::CrossEntropy)
}

fn modules(text: &str) -> Vec<Module> {
    read(text).unwrap().modules
}

const LINEAR: Module = Module::Linear { outputs: 12, bias: true, deviation: None };

#[test]
fn known_networks_are_read_as_they_are_written() {
    let mlp = Network::mlp(&[16, 12], Activation::Tanh, false, 5, Loss::MeanSquaredError);
    let residual = Network {
        name: "residual".into(),
        modules: vec![
            LINEAR,
            Module::Residual {
                body: vec![
                    Module::LayerNorm { bias: false },
                    Module::Residual { body: vec![LINEAR.named("up")], shortcut: vec![] },
                ],
                shortcut: vec![Module::Scope { prefix: "side".into(), modules: vec![LINEAR] }],
            },
        ],
        loss: Loss::CrossEntropy,
    };
    for network in [Network::lenet(10), Network::cifar(10), Network::deep_mlp(32, 4), mlp, residual] {
        let text = network.to_text();
        assert_eq!(read(&text).unwrap(), network, "{text}");
    }
}

#[test]
fn lines_stand_for_modules() {
    let found = read("linear 12 // a comment\n").unwrap();
    assert_eq!((found.name.as_str(), found.loss, found.modules), ("net", Loss::CrossEntropy, vec![LINEAR]));
    assert_eq!(modules("repeat 2 { linear 12; gelu }").len(), 4);
    let scopes = modules("repeat 2 \"h\" { linear 12 }");
    let scope = |prefix: &str| Module::Scope { prefix: prefix.into(), modules: vec![LINEAR] };
    assert_eq!(scopes, [scope("h.0"), scope("h.1")]);
    let text =
        "network \"mine\" loss=\"mean-of-squares\"\nresidual {\n linear 12\n shortcut {\n linear 12\n}\n}\n";
    let found = read(text).unwrap();
    assert_eq!((found.name.as_str(), found.loss), ("mine", Loss::MeanOfSquares));
    assert_eq!(found.modules, [Module::Residual { body: vec![LINEAR], shortcut: vec![LINEAR] }]);
    let names = |text: &str| -> Vec<String> {
        let model = read(text).unwrap().build(Features::Flat(12)).unwrap();
        model.tensors.into_iter().map(|tensor| tensor.name).collect()
    };
    let expected = ["h.0.norm1.weight", "h.0.norm1.bias", "h.0.up.weight", "h.1.norm1.weight"];
    let found = names("repeat 2 \"h\" { residual { layer-norm; linear 12 name=\"up\" bias=#false } }");
    assert_eq!(found[..4], expected);
}

/// Every malformed text gets a line that names the line or the module, and the sizes.
#[test]
fn malformed_texts_are_refused_with_the_reason() {
    let deep = format!("{}linear 12{}", "residual { ".repeat(100), " }".repeat(100));
    let long = "linear 12\n".repeat(4000);
    let cases: &[(&str, &str)] = &[
        ("", "line 1: there is no module"),
        ("// nothing\n", "line 1: there is no module"),
        ("network \"a\"\n", "there is no module"),
        ("lineer 12", "there is no module \"lineer\"; there are linear,"),
        ("Linear 12", "there is no module \"Linear\""),
        ("linear 12\nlinear", "line 2: linear: the number of outputs is missing"),
        ("linear 0", "the number of outputs is 0, but must be a whole number from 1"),
        ("linear -3", "the number of outputs is -3"),
        ("linear 1.5", "the number of outputs is 1.5"),
        ("linear \"12\"", "must be a whole number"),
        ("linear 99999999999999999999999", "must be a whole number from 1 to 268435456"),
        ("linear 268435457", "the number of outputs is 268435457"),
        ("linear 12 13", "linear: it does not take 13"),
        ("linear 12 size=3", "linear: it does not take size=3"),
        ("linear 12 bias=1", "bias is 1, but must be #true or #false"),
        ("linear 12 bias=\"no\"", "must be #true or #false"),
        ("linear 12 name=7", "name is 7, but must be a text"),
        ("linear 12 name=\"a/b\"", "without a /"),
        ("linear 12 name=\"\"", "must be a text"),
        ("linear 12 { relu }", "linear: it has no modules, so there can be no braces"),
        ("relu 3", "relu: it does not take 3"),
        ("relu name=\"a\"", "it is named a, but has no tensors"),
        ("flatten 2", "flatten: it does not take 2"),
        ("layer-norm 12", "layer-norm: it does not take 12"),
        ("convolution 3", "the height and width of the kernel is missing, such as kernel=12"),
        ("convolution kernel=3", "the number of output channels is missing"),
        ("convolution 3 kernel=3", "a convolution needs images, not 12 features"),
        ("max-pool 2", "max-pooling of size 2 does not fit 12 features"),
        ("max-pool", "the height and width of the window is missing"),
        ("residual", "residual: its modules are missing, in braces"),
        ("residual {\n}", "the body of a residual needs a layer"),
        ("residual { flatten }", "the body of a residual needs a layer"),
        ("residual 3 { linear 12 }", "residual: it does not take 3"),
        (
            "linear 12\nresidual { linear 7 }",
            "(module 1 `residual`): the branches of a residual must end alike, but the body ends with 7 \
             features, the shortcut with 12 features",
        ),
        (
            "residual { linear 7; shortcut { linear 8 } }",
            "the body ends with 7 features, the shortcut with 8",
        ),
        ("residual { shortcut { linear 12 } }", "the body of a residual needs a layer"),
        ("residual { shortcut { linear 12 }; linear 12 }", "a shortcut is the last line"),
        ("shortcut { linear 12 }", "a shortcut is the last line in the braces of a residual"),
        ("residual { max-pool 2 }", "body module 0 `max-pool 2`"),
        ("residual { linear 12; shortcut { max-pool 2 } }", "shortcut module 0 `max-pool 2`"),
        ("scope { linear 12 }", "scope: a name is missing, such as \"h\""),
        ("scope \"h\"", "scope: its modules are missing"),
        ("repeat { linear 12 }", "the number of times is missing"),
        ("repeat 3", "repeat: its modules are missing"),
        ("repeat 1000000 { linear 12 }", "1000000 times is more than 20000 modules"),
        ("repeat 200 { repeat 200 { linear 12 } }", "200 times is more than 20000 modules"),
        ("linear 12 name=\"a\"\nlinear 12 name=\"a\"", "there is another tensor named a.weight"),
        ("network \"a\" loss=\"hinge\"\nlinear 12", "there is no loss \"hinge\"; there are cross-entropy,"),
        ("linear 12\nnetwork \"a\"", "line 2: network: the line network is the first, and there is one"),
        ("network \"a\" \"b\"\nlinear 12", "network: it does not take \"b\""),
        ("linear 12\nresidual { linear 12", "line 2"),
        ("linear 12 }", "line 1"),
        ("linear \"12", "line 1"),
        ("linear 12 bias=", "line 1"),
        (&deep, "braces are nested more than 64 deep"),
        (&long, "it has 40000 bytes, and 32768 are the limit"),
        ("linear 268435456\nlinear 268435456", "parameters, and 1099511627776 are the limit"),
    ];
    assert!(cases.len() >= 50, "{}", cases.len());
    for (text, expected) in cases {
        let found = read(text).and_then(|network| network.build(Features::Flat(12)));
        let error = found.expect_err(text);
        let said = error.to_string();
        assert!(said.contains(expected) && !said.contains('\n'), "{text}\ngives {said}\nnot {expected}");
        assert_eq!(error.exit_code(), 2, "{text}");
    }
}
