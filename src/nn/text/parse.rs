//! The reading of a network's text.

use std::ops::RangeInclusive;

use kdl::{KdlDocument, KdlNode, KdlValue};

use super::{ACTIVATIONS, GATES, LONGEST_TEXT, LOSSES};
use crate::nn::{Attention, Convolution, LARGEST_SIZE, Loss, Module, Network};
use crate::{Error, Result};

/// The deepest nesting of braces.
const DEEPEST: usize = 64;

/// The most modules of a network.
const MOST_MODULES: usize = 20_000;

/// The names of all lines but the first.
const NAMES: &str = "linear, product, convolution, max-pool, average-pool, global-average, relu, gelu, \
                     gelu-tanh, silu, tanh, gated-linear-unit, dropout, flatten, layer-norm, rms-norm, \
                     group-norm, embedding, positions, attention, tied-output, residual, shortcut, scope, \
                     repeat";

/// The reason why a line is wrong, and its place in the text.
struct LineError {
    offset: usize,
    why: String,
}

type Parsed<T> = std::result::Result<T, LineError>;

impl Network {
    /// Reads a network from the `text` of `source`, a file's name. Its name is `name` and its loss `loss`
    /// unless the text says otherwise. Not collective.
    ///
    /// # Errors
    /// The text is no network; the message has the line.
    pub fn from_text(text: &str, source: &str, name: &str, loss: Loss) -> Result<Network> {
        let doing = || format!("reading the network {source}");
        if text.len() > LONGEST_TEXT {
            let why = format!("it has {} bytes, and {LONGEST_TEXT} are the limit", text.len());
            return Err(Error::input(doing(), why));
        }
        let network = check_nesting(text).and_then(|()| read(text, name, loss));
        network.map_err(|LineError { offset, why }| {
            let line = 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
            Error::input(doing(), format!("line {line}: {why}"))
        })
    }
}

/// Refuses braces that are nested so deep that reading them would overflow the stack.
fn check_nesting(text: &str) -> Parsed<()> {
    let mut depth = 0_usize;
    for (offset, byte) in text.bytes().enumerate() {
        match byte {
            b'{' | b'(' => depth += 1,
            b'}' | b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            return Err(LineError { offset, why: format!("braces are nested more than {DEEPEST} deep") });
        }
    }
    Ok(())
}

fn read(text: &str, name: &str, loss: Loss) -> Parsed<Network> {
    let document = KdlDocument::parse(text).map_err(|error| {
        let first = error.diagnostics.first();
        LineError {
            offset: first.map_or(0, |first| first.span.offset()),
            why: first.map_or_else(|| error.to_string(), |first| first.to_string().replace('\n', " ")),
        }
    })?;
    let mut network = Network { name: name.to_owned(), modules: Vec::new(), loss };
    let mut nodes = document.nodes();
    if let Some((first, rest)) = nodes.split_first().filter(|(first, _)| first.name().value() == "network") {
        let mut fields = Fields::new(first);
        if let Some(name) = fields.optional_text(None)? {
            name.clone_into(&mut network.name);
        }
        if let Some(loss) = fields.optional_text(Some("loss"))? {
            let known = LOSSES.iter().find(|(name, _)| *name == loss);
            let names = LOSSES.map(|(name, _)| name).join(", ");
            let unknown = || fields.error(format!("there is no loss {loss:?}; there are {names}"));
            network.loss = known.ok_or_else(unknown)?.1;
        }
        fields.finish(false)?;
        nodes = rest;
    }
    network.modules = modules(nodes)?;
    let num_modules = count(&network.modules);
    match nodes.first() {
        Some(node) if num_modules > MOST_MODULES => {
            let why = format!("there are {num_modules} modules, and {MOST_MODULES} are the limit");
            Err(Fields::new(node).error(why))
        }
        None => Err(LineError { offset: 0, why: "there is no module".into() }),
        Some(_) => Ok(network),
    }
}

/// Returns the number of modules, those in others included.
fn count(modules: &[Module]) -> usize {
    let of_one = |module: &Module| match module {
        Module::Residual { body, shortcut } => 1 + count(body) + count(shortcut),
        Module::Scope { modules, .. } => 1 + count(modules),
        _ => 1,
    };
    modules.iter().map(of_one).sum()
}

fn modules(nodes: &[KdlNode]) -> Parsed<Vec<Module>> {
    let mut all = Vec::new();
    for node in nodes {
        all.extend(lines(node)?);
    }
    Ok(all)
}

/// Returns the modules of a line, with those in its braces.
fn lines(node: &KdlNode) -> Parsed<Vec<Module>> {
    let mut fields = Fields::new(node);
    match node.name().value() {
        "residual" => {
            fields.finish(true)?;
            let (mut body, mut shortcut) = (fields.children()?, &[][..]);
            if let Some((last, rest)) =
                body.split_last().filter(|(last, _)| last.name().value() == "shortcut")
            {
                let fields = Fields::new(last);
                fields.finish(true)?;
                (body, shortcut) = (rest, fields.children()?);
            }
            Ok(vec![Module::Residual { body: modules(body)?, shortcut: modules(shortcut)? }])
        }
        "shortcut" => Err(fields.error("a shortcut is the last line in the braces of a residual".into())),
        "scope" => {
            let prefix = fields.text("a name")?.to_owned();
            fields.finish(true)?;
            Ok(vec![Module::Scope { prefix, modules: modules(fields.children()?)? }])
        }
        "repeat" => {
            let (times, prefix) = (fields.number(None, "the number of times")?, fields.optional_text(None)?);
            fields.finish(true)?;
            let inner = modules(fields.children()?)?;
            if times.saturating_mul(count(&inner) + 1) > MOST_MODULES {
                return Err(fields.error(format!("{times} times is more than {MOST_MODULES} modules")));
            }
            Ok((0..times)
                .flat_map(|time| match prefix {
                    None => inner.clone(),
                    Some(prefix) => {
                        vec![Module::Scope { prefix: format!("{prefix}.{time}"), modules: inner.clone() }]
                    }
                })
                .collect())
        }
        "network" => Err(fields.error("the line network is the first, and there is one".into())),
        _ => {
            let module = one(&mut fields)?;
            let name = fields.optional_text(Some("name"))?;
            fields.finish(false)?;
            Ok(vec![name.map_or(module.clone(), |name| module.named(name))])
        }
    }
}

/// Returns the module of a line without braces.
fn one(fields: &mut Fields<'_>) -> Parsed<Module> {
    let name = fields.node.name().value();
    if let Some((_, activation)) = ACTIVATIONS.iter().find(|(known, _)| *known == name) {
        return Ok(Module::Activation(*activation));
    }
    Ok(match name {
        "linear" => {
            let outputs = fields.number(None, "the number of outputs")?;
            let bias = fields.switch("bias", true)?;
            Module::Linear { outputs, bias, deviation: fields.deviation("deviation")? }
        }
        "product" => Module::Product { outputs: fields.number(None, "the number of outputs")? },
        "convolution" => Module::Convolution(Convolution {
            outputs: fields.number(None, "the number of output channels")?,
            kernel: fields.number(Some("kernel"), "the height and width of the kernel")?,
            stride: fields.optional_number("stride", 1)?.unwrap_or(1),
            padding: fields.optional_number("padding", 0)?.unwrap_or(0),
            bias: fields.switch("bias", true)?,
        }),
        "max-pool" => Module::MaxPool { size: fields.number(None, "the height and width of the window")? },
        "average-pool" => {
            Module::AveragePool { size: fields.number(None, "the height and width of the window")? }
        }
        "global-average" => Module::GlobalAverage,
        "embedding" => {
            let width = fields.number(None, "the number of features")?;
            Module::Embedding { width, deviation: fields.deviation("deviation")?.unwrap_or(1.0) }
        }
        "positions" => Module::Positions { deviation: fields.deviation("deviation")?.unwrap_or(1.0) },
        "attention" => {
            let heads = fields.number(None, "the number of heads")?;
            Module::Attention(Attention {
                heads,
                key_value_heads: fields.optional_number("key-value-heads", 1)?.unwrap_or(heads),
                causal: fields.switch("causal", false)?,
                rotary: fields.real(Some("rotary"), "rotary", 1.0..=1e9)?,
                bias: fields.switch("bias", true)?,
                deviation: fields.deviation("deviation")?,
                output_deviation: fields.deviation("output-deviation")?,
            })
        }
        "tied-output" => Module::TiedOutput,
        "flatten" => Module::Flatten,
        "layer-norm" => Module::LayerNorm { bias: fields.switch("bias", true)? },
        "rms-norm" => Module::RmsNorm,
        "group-norm" => Module::GroupNorm { groups: fields.number(None, "the number of groups")? },
        "gated-linear-unit" => {
            let name = fields.optional_text(None)?.unwrap_or("sigmoid");
            let known = GATES.iter().find(|(known, _)| *known == name);
            let names = GATES.map(|(name, _)| name).join(", ");
            let unknown = || fields.error(format!("there is no gate {name:?}; there are {names}"));
            Module::GatedLinearUnit { gate: known.ok_or_else(unknown)?.1 }
        }
        "dropout" => {
            let rate = fields.real(None, "the probability of 0", 0.0..=0.999)?;
            let missing = || fields.error("the probability of 0 is missing, such as 0.1".into());
            Module::Dropout { rate: rate.ok_or_else(missing)? }
        }
        other => return Err(fields.error(format!("there is no module {other:?}; there are {NAMES}"))),
    })
}

/// The arguments and properties of a line, of which none may be left over.
struct Fields<'k> {
    node: &'k KdlNode,
    used: Vec<bool>,
}

impl<'k> Fields<'k> {
    fn new(node: &'k KdlNode) -> Fields<'k> {
        Fields { node, used: vec![false; node.entries().len()] }
    }

    fn error(&self, why: String) -> LineError {
        LineError { offset: self.node.span().offset(), why: format!("{}: {why}", self.node.name().value()) }
    }

    /// Takes the next argument, or the property `name`.
    fn take(&mut self, name: Option<&str>) -> Option<&'k KdlValue> {
        let entries = self.node.entries();
        let is_wanted = |at: &usize| !self.used[*at] && entries[*at].name().map(|name| name.value()) == name;
        let at = (0..entries.len()).find(is_wanted)?;
        self.used[at] = true;
        Some(entries[at].value())
    }

    /// Takes a size from 1 to [`LARGEST_SIZE`].
    fn number(&mut self, name: Option<&str>, what: &str) -> Parsed<usize> {
        let example = name.map_or("12".to_owned(), |name| format!("{name}=12"));
        let Some(value) = self.take(name) else {
            return Err(self.error(format!("{what} is missing, such as {example}")));
        };
        self.size(value, what, 1)
    }

    /// Takes a size from `least` on, if it is given.
    fn optional_number(&mut self, name: &str, least: usize) -> Parsed<Option<usize>> {
        self.take(Some(name)).map(|value| self.size(value, name, least)).transpose()
    }

    fn size(&self, value: &KdlValue, what: &str, least: usize) -> Parsed<usize> {
        let number = value.as_integer().and_then(|number| usize::try_from(number).ok());
        number.filter(|number| (least..=LARGEST_SIZE).contains(number)).ok_or_else(|| {
            self.error(format!(
                "{what} is {value}, but must be a whole number from {least} to {LARGEST_SIZE}"
            ))
        })
    }

    /// Takes a standard deviation, if it is given.
    fn deviation(&mut self, name: &str) -> Parsed<Option<f32>> {
        self.real(Some(name), name, 0.0..=1e6)
    }

    /// Takes a number in `range`, the next argument or the property `name`, if it is given.
    fn real(&mut self, name: Option<&str>, what: &str, range: RangeInclusive<f32>) -> Parsed<Option<f32>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_float().or(value.as_integer().map(|whole| whole as f64));
        let number = number.map(|number| number as f32).filter(|number| range.contains(number));
        let (least, most) = range.clone().into_inner();
        let wrong = || self.error(format!("{what} is {value}, but must be a number from {least} to {most}"));
        number.map(Some).ok_or_else(wrong)
    }

    fn switch(&mut self, name: &str, default: bool) -> Parsed<bool> {
        let Some(value) = self.take(Some(name)) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(format!("{name} is {value}, but must be #true or #false")))
    }

    fn optional_text(&mut self, name: Option<&str>) -> Parsed<Option<&'k str>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let what = name.unwrap_or("its name");
        let text = value.as_string().filter(|text| !text.is_empty() && !text.contains('/'));
        let wrong = || self.error(format!("{what} is {value}, but must be a text in quotes without a /"));
        text.map(Some).ok_or_else(wrong)
    }

    fn text(&mut self, what: &str) -> Parsed<&'k str> {
        let text = self.optional_text(None)?;
        text.ok_or_else(|| self.error(format!("{what} is missing, such as \"h\"")))
    }

    fn children(&self) -> Parsed<&'k [KdlNode]> {
        let children = self.node.children().map(KdlDocument::nodes);
        children.ok_or_else(|| self.error("its modules are missing, in braces".into()))
    }

    /// Refuses what has not been taken.
    fn finish(&self, has_braces: bool) -> Parsed<()> {
        if let Some(at) = self.used.iter().position(|used| !used) {
            return Err(
                self.error(format!("it does not take {}", self.node.entries()[at].to_string().trim()))
            );
        }
        if !has_braces && self.node.children().is_some() {
            return Err(self.error("it has no modules, so there can be no braces".into()));
        }
        Ok(())
    }
}
