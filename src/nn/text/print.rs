//! The writing of a network as text.

use std::fmt::Write as _;

use super::{ACTIVATIONS, GATES, LOSSES};
use crate::nn::{Attention, Convolution, Module, Network};

impl Network {
    /// Returns this network as text, which [`Network::from_text`] reads.
    pub fn to_text(&self) -> String {
        let loss = LOSSES.iter().find(|(_, loss)| *loss == self.loss).map_or("", |(name, _)| *name);
        let mut text = format!("network {:?} loss={loss:?}\n", self.name);
        write_all(&mut text, &self.modules, 0);
        text
    }
}

fn write_all(text: &mut String, modules: &[Module], depth: usize) {
    modules.iter().for_each(|module| write_module(text, module, depth));
}

fn write_module(text: &mut String, module: &Module, depth: usize) {
    let indent = "    ".repeat(depth);
    // writing to a `String` cannot fail
    let _ = write!(text, "{indent}{}", head(module));
    match module {
        Module::Residual { body, shortcut } => {
            text.push_str(" {\n");
            write_all(text, body, depth + 1);
            if !shortcut.is_empty() {
                let _ = writeln!(text, "{indent}    shortcut {{");
                write_all(text, shortcut, depth + 2);
                let _ = writeln!(text, "{indent}    }}");
            }
            let _ = writeln!(text, "{indent}}}");
        }
        Module::Scope { modules, .. } => {
            text.push_str(" {\n");
            write_all(text, modules, depth + 1);
            let _ = writeln!(text, "{indent}}}");
        }
        _ => text.push('\n'),
    }
}

/// Returns a property that may be missing.
fn optional(name: &str, value: Option<f32>) -> String {
    value.map_or(String::new(), |value| format!(" {name}={value:?}"))
}

fn convolution_line(convolution: &Convolution) -> String {
    let Convolution { outputs, kernel, stride, padding, bias } = *convolution;
    let property = |name: &str, value: usize, default| {
        if value == default { String::new() } else { format!(" {name}={value}") }
    };
    let bias = if bias { "" } else { " bias=#false" };
    let (stride, padding) = (property("stride", stride, 1), property("padding", padding, 0));
    format!("convolution {outputs} kernel={kernel}{stride}{padding}{bias}")
}

fn attention_line(attention: &Attention) -> String {
    let Attention { heads, key_value_heads, causal, rotary, bias, deviation, output_deviation } = *attention;
    let groups =
        if key_value_heads == heads { String::new() } else { format!(" key-value-heads={key_value_heads}") };
    let causal = if causal { " causal=#true" } else { "" };
    let bias = if bias { "" } else { " bias=#false" };
    let rotary = optional("rotary", rotary);
    let deviations = optional("deviation", deviation) + &optional("output-deviation", output_deviation);
    format!("attention {heads}{groups}{causal}{rotary}{bias}{deviations}")
}

/// Returns the line of a module, without the modules in its braces.
pub(in crate::nn) fn head(module: &Module) -> String {
    let without_bias = |bias: &bool| if *bias { "" } else { " bias=#false" };
    match module {
        Module::Linear { outputs, bias, deviation } => {
            format!("linear {outputs}{}{}", without_bias(bias), optional("deviation", *deviation))
        }
        Module::Embedding { width, deviation } => format!("embedding {width} deviation={deviation:?}"),
        Module::Positions { deviation } => format!("positions deviation={deviation:?}"),
        Module::Attention(attention) => attention_line(attention),
        Module::TiedOutput => "tied-output".to_owned(),
        Module::Product { outputs } => format!("product {outputs}"),
        Module::Convolution(convolution) => convolution_line(convolution),
        Module::MaxPool { size } => format!("max-pool {size}"),
        Module::AveragePool { size } => format!("average-pool {size}"),
        Module::GlobalAverage => "global-average".to_owned(),
        Module::RmsNorm => "rms-norm".to_owned(),
        Module::GroupNorm { groups } => format!("group-norm {groups}"),
        Module::Dropout { rate } => format!("dropout {rate:?}"),
        Module::GatedLinearUnit { gate } => {
            let known = GATES.iter().find(|(_, known)| known == gate);
            format!("gated-linear-unit {:?}", known.map_or("", |(name, _)| *name))
        }
        Module::Activation(activation) => {
            let known = ACTIVATIONS.iter().find(|(_, known)| known == activation);
            known.map_or("identity", |(name, _)| *name).to_owned()
        }
        Module::Flatten => "flatten".to_owned(),
        Module::LayerNorm { bias } => format!("layer-norm{}", without_bias(bias)),
        Module::Residual { .. } => "residual".to_owned(),
        Module::Named { name, module } => format!("{} name={name:?}", head(module)),
        Module::Scope { prefix, .. } => format!("scope {prefix:?}"),
    }
}
