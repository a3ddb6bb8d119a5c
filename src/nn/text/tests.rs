//! Networks as text.

use crate::device::Activation;
use crate::nn::{Features, GptSizes, Initial, LONGEST_TEXT, Loss, Module, Network};

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
    let all = "\
        convolution 4 kernel=3 stride=2 padding=1 bias=#false\n\
        group-norm 2\nsilu\naverage-pool 2\nmax-pool 3 stride=2 padding=1\nglobal-average\ndropout 0.25\n\
        gated-linear-unit \"silu\"\nrms-norm\nlayer-scale initial=0.1\ngelu-tanh\n\
        attention 4 key-value-heads=2 causal=#true rotary=10000.0 dropout=0.25 bias=#false \
        output-deviation=0.5\n";
    let all = Network { name: "all".into(), modules: modules(all), loss: Loss::CrossEntropy };
    let gpt = Network::gpt(GptSizes { layers: 2, heads: 3, width: 24, bias: false, dropout: 0.2 });
    let images = [Network::lenet(10), Network::cifar(10), Network::resnet(2, 16, 10)];
    for network in images.into_iter().chain([Network::deep_mlp(32, 4), mlp, residual, all, gpt]) {
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

/// `/-` comments out values, lines and blocks, few blocks and any number of others.
#[test]
fn comments_are_left_out() {
    let plain = "/-tanh\n/- residual bias=#true // was here\nlinear 12 /-bias=#false\n//-- {\n";
    let text = format!("{}scope \"h\" {{\n/-residual {{ linear 3 }}\nlinear 12\n}}\n", plain.repeat(20));
    let found = modules(&text);
    assert_eq!(found[..20], vec![LINEAR; 20]);
    assert_eq!(found[20..], [Module::Scope { prefix: "h".into(), modules: vec![LINEAR] }]);
    let blocks = |num: usize| format!("linear 12\n{}", "/-residual { linear 12 }\n".repeat(num));
    assert_eq!(modules(&blocks(4)), [LINEAR]);
    assert!(read(&blocks(5)).is_err());
    for hidden in ["/-\n{ } ", "/- /* { */ a { } ", "/-\"\" { } ", "/-a\\\n{ } ", "/*//-{*//-a { } "] {
        let text = format!("linear 12\n{}", hidden.repeat(5));
        assert!(read(&text).unwrap_err().to_string().contains("more than 4 `/-`"), "{hidden}");
    }
}

/// Checks that a network for `input` is refused in one line that says what is `expected`.
fn assert_refused(input: Features, text: &str, expected: &str) {
    let error = read(text).and_then(|network| network.build(input)).expect_err(text);
    let said = error.to_string();
    assert!(said.contains(expected) && !said.contains('\n'), "{text}\ngives {said}\nnot {expected}");
    assert_eq!(error.exit_code(), 2, "{text}");
}

/// Every malformed text gets a line that names the line or the module, and the sizes.
#[test]
fn malformed_texts_are_refused_with_the_reason() {
    let deep = format!("{}linear 12{}", "residual { ".repeat(100), " }".repeat(100));
    let long = "linear 12\n".repeat(30_000);
    let many = "repeat 10000 { relu }\n".repeat(100);
    // the library takes twice as long for each line
    let commented = "linear 12 /-{\n".repeat(60);
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
        ("product 12 name=\".\"", "without a /"),
        ("linear 12 name=\"\"", "must be a text"),
        ("linear 12 { relu }", "linear: it has no modules, so there can be no braces"),
        ("relu 3", "relu: it does not take 3"),
        ("relu name=\"a\"", "it is named a, but has no tensors"),
        ("flatten 2", "flatten: it does not take 2"),
        ("layer-norm 12", "layer-norm: it does not take 12"),
        ("convolution 3", "the height and width of the kernel is missing, such as kernel=12"),
        ("convolution kernel=3", "the number of output channels is missing"),
        ("convolution 3 kernel=3", "a convolution needs images, not 12 features"),
        ("max-pool 2", "pooling needs images, not 12 features"),
        ("average-pool 2", "pooling needs images, not 12 features"),
        ("average-pool", "the height and width of the window is missing"),
        ("global-average", "pooling needs images, not 12 features"),
        ("convolution 3 kernel=3 stride=0", "stride is 0, but must be a whole number from 1"),
        ("convolution 3 kernel=3 padding=-1", "padding is -1, but must be a whole number from 0"),
        ("group-norm", "the number of groups is missing"),
        ("group-norm 3", "a group norm needs images, not 12 features"),
        ("rms-norm 3", "rms-norm: it does not take 3"),
        ("layer-scale 3", "layer-scale: it does not take 3"),
        ("layer-scale initial=\"small\"", "initial is small, but must be a number from -1000000"),
        ("layer-scale initial=1e7", "from -1000000 to 1000000"),
        ("dropout", "the probability of 0 is missing, such as 0.1"),
        ("dropout 1.5", "the probability of 0 is 1.5, but must be a number from 0 to 0.999"),
        ("dropout \"half\"", "must be a number from 0 to 0.999"),
        ("linear 7\ngated-linear-unit", "needs an even number of features, not 7 features"),
        ("gated-linear-unit \"relu\"", "there is no gate \"relu\"; there are sigmoid, silu, gelu"),
        ("embedding 8", "an embedding needs tokens, as texts have, not 12 features"),
        ("embedding 8 deviation=-1", "deviation is -1, but must be a number from 0 to 1000000"),
        ("positions", "positions are added to sequences of features, not 12 features"),
        ("attention 4", "attention needs sequences of features, not 12 features"),
        ("attention", "the number of heads is missing"),
        ("attention 4 rotary=0", "rotary is 0, but must be a number from 1"),
        ("attention 4 dropout=1", "dropout is 1, but must be a number from 0 to 0.999"),
        ("attention 4 causal=1", "causal is 1, but must be #true or #false"),
        ("tied-output", "there is no embedding before it whose weight it could use"),
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
        ("scope \"a\" { linear 12; max-pool 2 }", "module 0 `scope \"a\"`, its module 1 `max-pool 2`"),
        ("residual { max-pool 2 }", "body module 0 `max-pool 2`"),
        ("residual { linear 12; shortcut { max-pool 2 } }", "shortcut module 0 `max-pool 2`"),
        ("scope { linear 12 }", "scope: a name is missing, such as \"h\""),
        ("scope \"h\"", "scope: its modules are missing"),
        ("repeat { linear 12 }", "the number of times is missing"),
        ("repeat 3", "repeat: its modules are missing"),
        ("repeat 1000000 { linear 12 }", "repeat: with this line, the network has more than 20000 modules"),
        ("repeat 200 { repeat 200 { linear 12 } }", "more than 20000 modules"),
        ("repeat 268435456 { }", "more than 20000 modules"),
        (&many, "line 3: relu: with this line, the network has more than 20000 modules, the limit"),
        (&commented, "line 5: more than 4 `/-` stand before braces or quotes"),
        ("linear 12 name=\"a\"\nlinear 12 name=\"a\"", "there is another tensor named a.weight"),
        ("network \"a\" loss=\"hinge\"\nlinear 12", "there is no loss \"hinge\"; there are cross-entropy,"),
        ("linear 12\nnetwork \"a\"", "line 2: network: the line network is the first, and there is one"),
        ("network \"a\" \"b\"\nlinear 12", "network: it does not take \"b\""),
        ("linear 12\nresidual { linear 12", "line 2"),
        ("linear 12 }", "line 1"),
        ("linear \"12", "line 1"),
        ("linear 12 bias=", "line 1"),
        (&deep, "braces are nested more than 64 deep"),
        (&long, "it has 300000 bytes, and 262144 are the limit"),
        ("linear 268435456\nlinear 268435456", "parameters, and 1099511627776 are the limit"),
    ];
    assert!(cases.len() >= 50, "{}", cases.len());
    for (text, expected) in cases {
        assert_refused(Features::Flat(12), text, expected);
    }
    let image = Features::Image { height: 6, width: 8, channels: 6 };
    let tokens = Features::Tokens { len: 5, vocabulary: 9 };
    let cases = [
        (image, "convolution 3 kernel=7", "a kernel of 7 × 7 does not fit images of 6 × 8"),
        (image, "convolution 3 kernel=9 padding=1", "images of 6 × 8, padded by 1 on each side"),
        (image, "convolution 3 kernel=3 padding=3", "a padding of 3 must be smaller than the kernel, 3"),
        (image, "average-pool 7", "windows of 7 × 7 do not fit images of 6 × 8"),
        (image, "max-pool 9 padding=1", "do not fit images of 6 × 8, padded by 1 on each side"),
        (image, "max-pool 3 padding=2", "a padding of 2 is more than half of windows of 3 × 3"),
        (image, "group-norm 4", "4 groups do not divide 6 channels"),
        (image, "linear 4", "images of 6 × 8 with 6 channels: flatten first"),
        (
            image,
            "residual { convolution 6 kernel=3 stride=2 padding=1 }",
            "ends with images of 3 × 4 with 6 channels, the shortcut with images of 6 × 8 with 6 channels",
        ),
        (tokens, "linear 4", "an embedding makes some"),
        (tokens, "flatten", "tokens have no features"),
        (tokens, "layer-scale", "a layer scale needs features"),
        (tokens, "layer-norm\nembedding 8", "a norm needs features, not"),
        (tokens, "rms-norm\nembedding 8", "a norm needs features, not"),
        (tokens, "tanh\nembedding 8", "an activation needs features, not"),
        (tokens, "dropout 0.5", "a dropout needs features"),
        (tokens, "embedding 8\nattention 3", "3 heads do not divide 8 features"),
        (
            tokens,
            "embedding 8\nattention 4 key-value-heads=3",
            "3 heads with keys and values do not divide 4",
        ),
        (tokens, "embedding 6\nattention 2 rotary=100", "need heads of an even width, not 3"),
        (tokens, "embedding 512\nattention 1", "a head would have 512 features, and 256 are the limit"),
        (tokens, "embedding 8\nlinear 6\ntied-output", "the embedding has 8 features"),
        (
            tokens,
            "embedding 8\ntied-output\nlinear 8\ntied-output",
            "uses the weight of the embedding already",
        ),
    ];
    for (input, text, expected) in cases {
        assert_refused(input, text, expected);
    }
}

/// The page of networks shows two of the files beside it, and all of them fit their data.
#[test]
fn the_files_of_the_page_are_networks() {
    let page = include_str!("../../../docs/networks/README.md");
    let image = |size, channels| Features::Image { height: size, width: size, channels };
    let text = Features::Tokens { len: 64, vocabulary: 65 };
    let files = [
        (include_str!("../../../docs/networks/residual.kdl"), image(28, 1), false),
        (include_str!("../../../docs/networks/resnet-cifar.kdl"), image(32, 3), true),
        (include_str!("../../../docs/networks/gpt.kdl"), text, true),
        (include_str!("../../../docs/networks/transformer.kdl"), text, false),
    ];
    for (file, input, is_shown) in files {
        read(file).unwrap().build(input).unwrap();
        let (_, lines) = file.split_once("\nnetwork ").unwrap();
        assert!(!is_shown || page.contains(lines), "{lines}");
    }
    let sizes = GptSizes { layers: 4, heads: 4, width: 128, bias: true, dropout: 0.1 };
    let built_in = |sizes| Network::gpt(sizes).build(text).unwrap();
    let (of_file, own) = (read(files[2].0).unwrap().build(text).unwrap(), built_in(sizes));
    // the layers with all their numbers, and the tensors, whose deviations the page gives to three decimals
    assert_eq!(format!("{:?}", of_file.layers), format!("{:?}", own.layers));
    assert_ne!(
        format!("{:?}", of_file.layers),
        format!("{:?}", built_in(GptSizes { dropout: 0.2, ..sizes }).layers)
    );
    assert_eq!(of_file.tensors.len(), own.tensors.len());
    for (shown, tensor) in of_file.tensors.iter().zip(&own.tensors) {
        assert_eq!((&shown.name, &shown.shape), (&tensor.name, &tensor.shape));
        match (shown.initial, tensor.initial) {
            (Initial::Normal { deviation: shown }, Initial::Normal { deviation }) => {
                assert!((shown / deviation - 1.0).abs() < 0.02, "{shown} stands for {deviation}");
            }
            (shown, initial) => assert_eq!(shown, initial, "{}", tensor.name),
        }
    }
}

#[test]
fn a_text_that_is_wrong_everywhere_has_an_error() {
    for wrong in ["}", "{}", "a=", "/*", "[section]\n", "\"", "\\"] {
        let text = wrong.repeat(LONGEST_TEXT / wrong.len());
        assert!(Network::from_text(&text, "a test", "wrong", Loss::CrossEntropy).is_err(), "{wrong}");
    }
}
