//! The models that programs know by name.

use super::*;
use crate::device::Activation;

#[test]
fn the_models_have_the_known_numbers_of_parameters() {
    let image = |size, channels| Features::Image { height: size, width: size, channels };
    assert_eq!(Network::lenet(10).build(image(28, 1)).unwrap().num_parameters(), 21_840);
    assert_eq!(Network::cifar(10).build(image(32, 3)).unwrap().num_parameters(), 62_006);
    // the 269,722 of the paper's network of 20 layers, and the products of two shortcuts
    let resnet = Network::resnet(3, 16, 10).build(image(32, 3)).unwrap();
    assert_eq!(resnet.num_parameters(), 269_722 + 16 * 32 + 32 * 64);
    let mlp = Network::mlp(&[128, 64], Activation::Relu, true, 10, Loss::CrossEntropy);
    assert_eq!(mlp.build(image(28, 1)).unwrap().num_parameters(), 109_386);
    assert_eq!(Network::deep_mlp(1024, 4).build(Features::Flat(1024)).unwrap().num_parameters(), 4 << 20);
}

#[test]
fn lenet_fuses_to_four_layers_with_pytorchs_names() {
    let model = Network::lenet(10).build(Features::Image { height: 28, width: 28, channels: 1 }).unwrap();
    assert_eq!(model.layers.len(), 4);
    let names: Vec<_> = model.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names[..4], ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"]);
    assert_eq!(names[4..], ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
}

#[test]
fn a_group_norm_adds_the_other_branch_before_the_relu() {
    let image = Features::Image { height: 6, width: 6, channels: 4 };
    let words = |modules: &str| {
        let network = Network::from_text(modules, "test", "test", Loss::CrossEntropy).unwrap();
        let model = network.build(image).unwrap();
        model.layers.iter().map(Layer::words).collect::<Vec<_>>().join("; ")
    };
    let body = "convolution 4 kernel=3 padding=1\ngroup-norm 2";
    assert_eq!(words(&format!("residual {{\n{body}\n}}\nrelu\n")), "convolution; group-norm, add, relu");
    assert_eq!(words(&format!("residual {{\n{body}\n}}\n")), "convolution; group-norm, add");
    let shortcut = format!("residual {{\n{body}\nshortcut {{\n{body}\nrelu\n}}\n}}\nrelu\n");
    let four = "convolution; group-norm; convolution; group-norm, relu; add, relu";
    assert_eq!(words(&shortcut), four);
    // a value that is added to its own norm, and a sum that has one already
    assert_eq!(words("residual {\ngroup-norm 2\n}\n"), "group-norm; add");
    let nested = format!("residual {{\nresidual {{\n{body}\n}}\n}}\n");
    assert_eq!(words(&nested), "convolution; group-norm, add; add");
    let in_scope = format!("scope \"a\" {{\nresidual {{\n{body}\n}}\n}}\nrelu\nrelu\n");
    assert_eq!(words(&in_scope), "convolution; group-norm, add, relu; activation, relu");
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

#[test]
fn layers_cost_what_their_products_do() {
    let image = |size, channels| Features::Image { height: size, width: size, channels };
    let deep = Network::deep_mlp(32, 3).build(Features::Flat(32)).unwrap();
    assert_eq!(deep.costs(), [2 * 2048, 3 * 2048, 3 * 2048]);
    let lenet = Network::lenet(10).build(image(28, 1)).unwrap();
    let products = [24 * 24 * 10 * 25, 8 * 8 * 20 * 10 * 25, 320 * 50, 50 * 10];
    for (index, (cost, products)) in lenet.costs().into_iter().zip(products).enumerate() {
        let passes = if index == 0 { 2 } else { 3 };
        assert_eq!(cost, passes * 2 * products, "layer {index}");
    }
}

/// So that a fusion of other modules changes no draws.
#[test]
fn modules_that_draw_are_numbered_among_themselves() {
    let branch = "residual { attention 2 dropout=0.1; dropout 0.1 }";
    let text = &format!("embedding 8\n{branch}\nlinear 8\nrelu\ndropout 0.2\nlinear 9");
    let network = Network::from_text(text, "test", "test", Loss::CrossEntropy).unwrap();
    let model = network.build(Features::Tokens { len: 4, vocabulary: 9 }).unwrap();
    let number = |layer: &Layer| match &layer.kind {
        LayerKind::Attention(attention) => Some(attention.number),
        LayerKind::Dropout(dropout) => Some(dropout.number),
        _ => None,
    };
    assert_eq!(model.layers.iter().filter_map(number).collect::<Vec<_>>(), [0, 1, 2]);
}
