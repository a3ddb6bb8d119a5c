//! The writing of a network as text.

use std::convert::Infallible;
use std::fmt::{Display, Write as _};
use std::ops::RangeInclusive;

use super::LOSSES;
use super::modules::{Line, each_value, name_of};
use crate::nn::{Module, Network};

impl Network {
    /// Returns this network as text. [`Network::from_text`] reads it, unless a module is an identity, which
    /// has no line of its own.
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

/// Returns the line of a module, without the modules in its braces.
pub(in crate::nn) fn head(module: &Module) -> String {
    match module {
        Module::Residual { .. } => "residual".to_owned(),
        Module::Named { name, module } => format!("{} name={name:?}", head(module)),
        Module::Scope { prefix, .. } => format!("scope {prefix:?}"),
        _ => {
            let mut line = WrittenLine(name_of(module).to_owned());
            // a copy, because reading has to change the module
            let Ok(()) = each_value(&mut module.clone(), &mut line);
            line.0
        }
    }
}

/// A line that is being written.
struct WrittenLine(String);

impl WrittenLine {
    /// Adds a value, unless it is the default.
    fn add(&mut self, is_default: bool, name: Option<&str>, value: impl Display) -> Result<(), Infallible> {
        let name = name.map_or(String::new(), |name| format!("{name}="));
        if !is_default {
            // writing to a `String` cannot fail
            let _ = write!(self.0, " {name}{value}");
        }
        Ok(())
    }
}

impl Line for WrittenLine {
    type Error = Infallible;

    fn number(&mut self, name: Option<&str>, _what: &str, value: &mut usize) -> Result<(), Infallible> {
        self.add(false, name, value)
    }

    fn optional_number(
        &mut self,
        name: &str,
        _least: usize,
        default: usize,
        value: &mut usize,
    ) -> Result<(), Infallible> {
        self.add(*value == default, Some(name), value)
    }

    fn real(
        &mut self,
        name: Option<&str>,
        _what: &str,
        _range: RangeInclusive<f32>,
        _default: Option<f32>,
        value: &mut f32,
    ) -> Result<(), Infallible> {
        self.add(false, name, format_args!("{value:?}"))
    }

    fn optional_real(
        &mut self,
        name: &str,
        _range: RangeInclusive<f32>,
        value: &mut Option<f32>,
    ) -> Result<(), Infallible> {
        value.map_or(Ok(()), |value| self.add(false, Some(name), format_args!("{value:?}")))
    }

    fn switch(&mut self, name: &str, default: bool, value: &mut bool) -> Result<(), Infallible> {
        self.add(*value == default, Some(name), format_args!("#{value}"))
    }

    fn choice<T: Copy + PartialEq>(
        &mut self,
        _what: &str,
        known: &[(&str, T)],
        _default: T,
        value: &mut T,
    ) -> Result<(), Infallible> {
        let known = known.iter().find(|(_, known)| known == value);
        self.add(false, None, format_args!("{:?}", known.map_or("", |(name, _)| *name)))
    }
}
