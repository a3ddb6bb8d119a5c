//! The lines without braces: the module of each and the values on it, named once for reading and writing.
//! `docs/networks/README.md` has them in a table. A new module has a row in [`MODULES`] and an arm in
//! [`each_value`].
//!
//! `deviation` is the standard deviation of normal initial weights, in place of PyTorch's default.
//! `attention` may have `key-value-heads=K`, for heads that share keys and values, `rotary=B`, for rotary
//! positions of base B (10000 is usual), and `dropout=R`, for a dropout of the softmax's values;
//! `output-deviation` is for the layer after it.

use std::mem::discriminant;
use std::ops::RangeInclusive;

use crate::device::{Activation, Gate};
use crate::nn::{Attention, Convolution, DROPOUT_RATES, Module, PoolWindows};

/// The module of each line without braces, by the line's name. A line that is read replaces the values.
static MODULES: &[(&str, Module)] = &[
    ("linear", Module::Linear { outputs: 0, bias: true, deviation: None }),
    ("product", Module::Product { outputs: 0 }),
    ("convolution", Module::Convolution(CONVOLUTION)),
    ("max-pool", Module::MaxPool(PoolWindows::of(0))),
    ("average-pool", Module::AveragePool(PoolWindows::of(0))),
    ("global-average", Module::GlobalAverage),
    ("relu", Module::Activation(Activation::Relu)),
    ("gelu", Module::Activation(Activation::Gelu)),
    ("gelu-tanh", Module::Activation(Activation::GeluTanh)),
    ("silu", Module::Activation(Activation::Silu)),
    ("tanh", Module::Activation(Activation::Tanh)),
    ("gated-linear-unit", Module::GatedLinearUnit { gate: Gate::Sigmoid }),
    ("dropout", Module::Dropout { rate: 0.0 }),
    ("flatten", Module::Flatten),
    ("layer-norm", Module::LayerNorm { bias: true }),
    ("rms-norm", Module::RmsNorm),
    ("group-norm", Module::GroupNorm { groups: 0 }),
    ("layer-scale", Module::LayerScale { initial: SCALE }),
    ("embedding", Module::Embedding { width: 0, deviation: 1.0 }),
    ("positions", Module::Positions { deviation: 1.0 }),
    ("attention", Module::Attention(ATTENTION)),
    ("tied-output", Module::TiedOutput),
];

/// The initial value of scales: small, so that a residual with one at the end of its body begins almost as
/// the identity.
const SCALE: f32 = 1e-4;

const CONVOLUTION: Convolution = Convolution { outputs: 0, kernel: 0, stride: 1, padding: 0, bias: true };

const ATTENTION: Attention = Attention {
    heads: 0,
    key_value_heads: 0,
    causal: false,
    rotary: None,
    dropout: 0.0,
    bias: true,
    deviation: None,
    output_deviation: None,
};

/// The names of gates.
const GATES: [(&str, Gate); 3] = [("sigmoid", Gate::Sigmoid), ("silu", Gate::Silu), ("gelu", Gate::Gelu)];

/// The standard deviations that initial weights may have.
const DEVIATIONS: RangeInclusive<f32> = 0.0..=1e6;

/// Reads or writes the values of `module`, one without braces, in the order in which they stand on `line`.
///
/// # Errors
/// A value is missing or wrong.
pub(super) fn each_value<L: Line>(module: &mut Module, line: &mut L) -> Result<(), L::Error> {
    match module {
        Module::Linear { outputs, bias, deviation } => {
            line.number(None, "the number of outputs", outputs)?;
            line.switch("bias", true, bias)?;
            line.optional_real("deviation", DEVIATIONS, deviation)
        }
        Module::Product { outputs } => line.number(None, "the number of outputs", outputs),
        Module::Convolution(Convolution { outputs, kernel, stride, padding, bias }) => {
            line.number(None, "the number of output channels", outputs)?;
            line.number(Some("kernel"), "the height and width of the kernel", kernel)?;
            line.optional_number("stride", 1, 1, stride)?;
            line.optional_number("padding", 0, 0, padding)?;
            line.switch("bias", true, bias)
        }
        Module::MaxPool(windows) | Module::AveragePool(windows) => {
            let PoolWindows { size, stride, padding } = windows;
            line.number(None, "the height and width of the window", size)?;
            line.optional_number("stride", 1, *size, stride)?;
            line.optional_number("padding", 0, 0, padding)
        }
        Module::GatedLinearUnit { gate } => line.choice("gate", &GATES, Gate::Sigmoid, gate),
        Module::Dropout { rate } => line.real(None, "the probability of 0", DROPOUT_RATES, None, rate),
        Module::LayerNorm { bias } => line.switch("bias", true, bias),
        Module::GroupNorm { groups } => line.number(None, "the number of groups", groups),
        Module::LayerScale { initial } => {
            line.real(Some("initial"), "initial", -1e6..=1e6, Some(SCALE), initial)
        }
        Module::Embedding { width, deviation } => {
            line.number(None, "the number of features", width)?;
            line.real(Some("deviation"), "deviation", DEVIATIONS, Some(1.0), deviation)
        }
        Module::Positions { deviation } => {
            line.real(Some("deviation"), "deviation", DEVIATIONS, Some(1.0), deviation)
        }
        Module::Attention(attention) => {
            let Attention {
                heads,
                key_value_heads,
                causal,
                rotary,
                dropout,
                bias,
                deviation,
                output_deviation,
            } = attention;
            line.number(None, "the number of heads", heads)?;
            line.optional_number("key-value-heads", 1, *heads, key_value_heads)?;
            line.switch("causal", false, causal)?;
            line.optional_real("rotary", 1.0..=1e9, rotary)?;
            line.real(Some("dropout"), "dropout", DROPOUT_RATES, Some(0.0), dropout)?;
            line.switch("bias", true, bias)?;
            line.optional_real("deviation", DEVIATIONS, deviation)?;
            line.optional_real("output-deviation", DEVIATIONS, output_deviation)
        }
        Module::GlobalAverage
        | Module::Activation(_)
        | Module::Flatten
        | Module::RmsNorm
        | Module::TiedOutput => Ok(()),
        // these have braces or the line of another module
        Module::Residual { .. } | Module::Scope { .. } | Module::Named { .. } => Ok(()),
    }
}

/// Returns the module of a line called `name`, without the line's values.
pub(super) fn module_called(name: &str) -> Option<Module> {
    MODULES.iter().find(|(known, _)| *known == name).map(|(_, module)| module.clone())
}

/// Returns the name of the line of `module`, one without braces.
pub(super) fn name_of(module: &Module) -> &'static str {
    let is_it = |(_, known): &&(&str, Module)| match (known, module) {
        (Module::Activation(known), Module::Activation(activation)) => known == activation,
        _ => discriminant(known) == discriminant(module),
    };
    match module {
        // it has no line, for it does nothing
        Module::Activation(Activation::Identity) => "identity",
        _ => MODULES.iter().find(is_it).expect("a module without braces has a row").0,
    }
}

/// Returns the names of all lines without braces.
pub(super) fn names() -> String {
    MODULES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// The values of a line, which are read from it or written to it one after the other. A value has the name
/// of a property, or is the next argument.
pub(super) trait Line {
    /// The reason why a line is wrong.
    type Error;

    /// Passes a size of at least 1, which is called `what` in errors.
    fn number(&mut self, name: Option<&str>, what: &str, value: &mut usize) -> Result<(), Self::Error>;

    /// Passes a size of at least `least`, which is written unless it is the `default`.
    fn optional_number(
        &mut self,
        name: &str,
        least: usize,
        default: usize,
        value: &mut usize,
    ) -> Result<(), Self::Error>;

    /// Passes a number in `range`, which may be missing if there is a `default`.
    fn real(
        &mut self,
        name: Option<&str>,
        what: &str,
        range: RangeInclusive<f32>,
        default: Option<f32>,
        value: &mut f32,
    ) -> Result<(), Self::Error>;

    /// Passes a number in `range`, if there is one.
    fn optional_real(
        &mut self,
        name: &str,
        range: RangeInclusive<f32>,
        value: &mut Option<f32>,
    ) -> Result<(), Self::Error>;

    /// Passes a switch, which is written unless it is the `default`.
    fn switch(&mut self, name: &str, default: bool, value: &mut bool) -> Result<(), Self::Error>;

    /// Passes the next argument, one of the `known` texts for a `what`, which may be missing.
    fn choice<T: Copy + PartialEq>(
        &mut self,
        what: &str,
        known: &[(&str, T)],
        default: T,
        value: &mut T,
    ) -> Result<(), Self::Error>;
}
