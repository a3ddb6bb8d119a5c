//! The writing of a network as text.

use std::fmt::Write as _;

use super::{ACTIVATIONS, LOSSES};
use crate::nn::{Attention, Module, Network};

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

fn attention_line(attention: &Attention) -> String {
    let Attention { heads, key_value_heads, causal, bias, deviation, output_deviation } = *attention;
    let groups =
        if key_value_heads == heads { String::new() } else { format!(" key-value-heads={key_value_heads}") };
    let causal = if causal { " causal=#true" } else { "" };
    let bias = if bias { "" } else { " bias=#false" };
    let deviations = optional("deviation", deviation) + &optional("output-deviation", output_deviation);
    format!("attention {heads}{groups}{causal}{bias}{deviations}")
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
        Module::Convolution { outputs, kernel } => format!("convolution {outputs} kernel={kernel}"),
        Module::MaxPool { size } => format!("max-pool {size}"),
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
