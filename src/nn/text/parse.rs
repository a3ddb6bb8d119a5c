//! The reading of a network's text.

use kdl::{KdlDocument, KdlNode};

use super::fields::{Fields, LineError, Parsed};
use super::modules::{Line, each_value, module_called, names};
use super::{LONGEST_TEXT, LOSSES};
use crate::nn::{Loss, Module, Network};
use crate::{Error, Result};

/// The deepest nesting of braces.
const DEEPEST: usize = 64;

/// The most modules of a network.
const MOST_MODULES: usize = 20_000;

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
            why: first.map_or_else(
                || error.to_string(),
                |first| {
                    let said = first.to_string().replace('\n', " ");
                    let rest = text.get(first.span.offset()..).unwrap_or_default();
                    let end = rest.find(|next: char| !next.is_alphanumeric()).unwrap_or(rest.len());
                    let word = ["true", "false"].into_iter().find(|word| *word == &rest[..end]);
                    word.map_or(said, |word| format!("KDL writes #{word}, not {word}"))
                },
            ),
        }
    })?;
    let mut network = Network { name: name.to_owned(), modules: Vec::new(), loss };
    let mut nodes = document.nodes();
    if let Some((first, rest)) = nodes.split_first().filter(|(first, _)| first.name().value() == "network") {
        let mut fields = Fields::new(first);
        if let Some(name) = fields.optional_text(None)? {
            name.clone_into(&mut network.name);
        }
        network.loss = fields.optional_choice(Some("loss"), "loss", &LOSSES)?.unwrap_or(loss);
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
            let mut times = 0;
            fields.number(None, "the number of times", &mut times)?;
            let prefix = fields.optional_text(None)?;
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
        name => {
            let unknown = || {
                let names = names();
                fields.error(format!(
                    "there is no module {name:?}; there are {names}, residual, shortcut, scope, repeat"
                ))
            };
            let mut module = module_called(name).ok_or_else(unknown)?;
            each_value(&mut module, &mut fields)?;
            let name = fields.optional_text(Some("name"))?;
            fields.finish(false)?;
            Ok(vec![name.map_or(module.clone(), |name| module.named(name))])
        }
    }
}
