//! The reading of a network's text.

use kdl::{KdlDocument, KdlNode};

use super::fields::{Fields, LineError, Parsed};
use super::modules::{Line, each_value, module_called, names};
use super::{LONGEST_TEXT, LOSSES};
use crate::nn::{Loss, Module, Network};
use crate::{Error, Result};

/// The deepest nesting of braces.
const DEEPEST: usize = 64;

/// The most blocks that `/-` comments out. The KDL library reads each twice, with those in it
/// ([kdl-rs #177](https://github.com/kdl-org/kdl-rs/issues/177)).
const MOST_COMMENTED_BLOCKS: usize = 4;

/// The stack for reading a text, and what each of its bytes may add if it is wrong.
const STACK_BYTES: [usize; 2] = [8 << 20, 2 << 10];

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
        let checks = check_nesting(text).and_then(|()| check_comments(text));
        let read = || checks.and_then(|()| read(text, name, loss));
        // the KDL library calls itself at each error that it finds
        let network = std::thread::scope(|scope| {
            let stack_bytes = STACK_BYTES[0] + STACK_BYTES[1] * text.len();
            let reader = std::thread::Builder::new().stack_size(stack_bytes).spawn_scoped(scope, read)?;
            Ok(reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let network = network.map_err(|error: std::io::Error| Error::failed(doing(), error))?;
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

/// Refuses a text in which `/-` comments out so many blocks that reading them could take hours. Anything but
/// plain words counts as a block, so that quotes and other comments cannot hide one.
fn check_comments(text: &str) -> Parsed<()> {
    let mut num_blocks = 0;
    for (offset, mark) in text.match_indices("/-") {
        let before = &text[..offset];
        let is_in_comment = before.ends_with('/') && !before.ends_with("*/");
        let commented = text[offset + mark.len()..].trim_start();
        let end = commented.find(['\n', ';', '{', '"', '\\', '/']).unwrap_or(commented.len());
        let (words, rest) = commented.split_at(end);
        let ends_there = rest.is_empty() || rest.starts_with(['\n', ';']) || rest.starts_with("//");
        let is_plain = ends_there && words.starts_with(|first: char| first.is_ascii_alphanumeric());
        num_blocks += usize::from(!is_in_comment && !is_plain);
        if num_blocks > MOST_COMMENTED_BLOCKS {
            let why = format!(
                "more than {MOST_COMMENTED_BLOCKS} `/-` stand before braces or quotes; comment lines out \
                 with // alone"
            );
            return Err(LineError { offset, why });
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
    if nodes.is_empty() {
        return Err(LineError { offset: 0, why: "there is no module".into() });
    }
    let mut room = MOST_MODULES;
    network.modules = modules(nodes, &mut room)?;
    Ok(network)
}

/// Returns the modules of `nodes`, which leave as many fewer of `room`.
fn modules(nodes: &[KdlNode], room: &mut usize) -> Parsed<Vec<Module>> {
    let mut all = Vec::new();
    for node in nodes {
        all.extend(lines(node, room)?);
    }
    Ok(all)
}

/// Takes `num` modules, those in others included, from the `room` that is left, or says at the line of
/// `fields` that there are too many.
fn take(num: usize, room: &mut usize, fields: &Fields<'_>) -> Parsed<()> {
    let left = room.checked_sub(num);
    *room = left.ok_or_else(|| {
        fields.error(format!("with this line, the network has more than {MOST_MODULES} modules, the limit"))
    })?;
    Ok(())
}

/// Returns the modules of a line, with those in its braces, which leave as many fewer of `room`.
fn lines(node: &KdlNode, room: &mut usize) -> Parsed<Vec<Module>> {
    let mut fields = Fields::new(node);
    match node.name().value() {
        "residual" => {
            fields.finish(true)?;
            take(1, room, &fields)?;
            let (mut body, mut shortcut) = (fields.children()?, &[][..]);
            if let Some((last, rest)) =
                body.split_last().filter(|(last, _)| last.name().value() == "shortcut")
            {
                let fields = Fields::new(last);
                fields.finish(true)?;
                (body, shortcut) = (rest, fields.children()?);
            }
            let (body, shortcut) = (modules(body, room)?, modules(shortcut, room)?);
            Ok(vec![Module::Residual { body, shortcut }])
        }
        "shortcut" => Err(fields.error("a shortcut is the last line in the braces of a residual".into())),
        "scope" => {
            let prefix = fields.text("a name")?.to_owned();
            fields.finish(true)?;
            take(1, room, &fields)?;
            Ok(vec![Module::Scope { prefix, modules: modules(fields.children()?, room)? }])
        }
        "repeat" => {
            let mut times = 0;
            fields.number(None, "the number of times", &mut times)?;
            let prefix = fields.optional_text(None)?;
            fields.finish(true)?;
            let before = *room;
            let inner = modules(fields.children()?, room)?;
            let once = before - *room;
            // an empty block takes time as well
            let each = (once + usize::from(prefix.is_some())).max(1);
            let all = times.saturating_mul(each);
            take(all.saturating_sub(once), room, &fields)?;
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
            take(1, room, &fields)?;
            each_value(&mut module, &mut fields)?;
            let name = fields.optional_text(Some("name"))?;
            fields.finish(false)?;
            Ok(vec![name.map_or(module.clone(), |name| module.named(name))])
        }
    }
}
