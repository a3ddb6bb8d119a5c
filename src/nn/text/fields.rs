//! The reading of a line's values.

use std::ops::RangeInclusive;

use kdl::{KdlDocument, KdlNode, KdlValue};

use super::modules::Line;
use crate::nn::LARGEST_SIZE;

/// The reason why a line is wrong, and its place in the text.
pub(super) struct LineError {
    pub(super) offset: usize,
    pub(super) why: String,
}

pub(super) type Parsed<T> = Result<T, LineError>;

/// The arguments and properties of a line, of which none may be left over.
pub(super) struct Fields<'k> {
    node: &'k KdlNode,
    used: Vec<bool>,
}

impl<'k> Fields<'k> {
    pub(super) fn new(node: &'k KdlNode) -> Fields<'k> {
        Fields { node, used: vec![false; node.entries().len()] }
    }

    pub(super) fn error(&self, why: String) -> LineError {
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

    fn size(&self, value: &KdlValue, what: &str, least: usize) -> Parsed<usize> {
        let number = value.as_integer().and_then(|number| usize::try_from(number).ok());
        number.filter(|number| (least..=LARGEST_SIZE).contains(number)).ok_or_else(|| {
            self.error(format!(
                "{what} is {value}, but must be a whole number from {least} to {LARGEST_SIZE}"
            ))
        })
    }

    fn number_in(&self, value: &KdlValue, what: &str, range: RangeInclusive<f32>) -> Parsed<f32> {
        let number = value.as_float().or(value.as_integer().map(|whole| whole as f64));
        let number = number.map(|number| number as f32).filter(|number| range.contains(number));
        let (least, most) = range.into_inner();
        number.ok_or_else(|| {
            self.error(format!("{what} is {value}, but must be a number from {least} to {most}"))
        })
    }

    pub(super) fn optional_text(&mut self, name: Option<&str>) -> Parsed<Option<&'k str>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let what = name.unwrap_or("its argument");
        // names are those of datasets in HDF5 files
        let is_name = |text: &&str| !text.is_empty() && *text != "." && !text.contains(['/', '\0']);
        let text = value.as_string().filter(is_name);
        let wrong = || self.error(format!("{what} is {value}, but must be a text in quotes without a /"));
        text.map(Some).ok_or_else(wrong)
    }

    pub(super) fn text(&mut self, what: &str) -> Parsed<&'k str> {
        let text = self.optional_text(None)?;
        text.ok_or_else(|| self.error(format!("{what} is missing, such as \"h\"")))
    }

    /// Takes the next argument, or the property `name`, one of the `known` texts for a `what`, if it is
    /// given.
    pub(super) fn optional_choice<T: Copy>(
        &mut self,
        name: Option<&str>,
        what: &str,
        known: &[(&str, T)],
    ) -> Parsed<Option<T>> {
        let Some(text) = self.optional_text(name)? else { return Ok(None) };
        let found = known.iter().find(|(name, _)| *name == text);
        let names = || known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let unknown = || self.error(format!("there is no {what} {text:?}; there are {}", names()));
        found.map(|(_, value)| Some(*value)).ok_or_else(unknown)
    }

    pub(super) fn children(&self) -> Parsed<&'k [KdlNode]> {
        let children = self.node.children().map(KdlDocument::nodes);
        children.ok_or_else(|| self.error("its modules are missing, in braces".into()))
    }

    /// Refuses what has not been taken.
    pub(super) fn finish(&self, has_braces: bool) -> Parsed<()> {
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

impl Line for Fields<'_> {
    type Error = LineError;

    fn number(&mut self, name: Option<&str>, what: &str, value: &mut usize) -> Parsed<()> {
        let example = name.map_or("12".to_owned(), |name| format!("{name}=12"));
        let missing = |fields: &Self| fields.error(format!("{what} is missing, such as {example}"));
        let given = self.take(name).ok_or_else(|| missing(self))?;
        *value = self.size(given, what, 1)?;
        Ok(())
    }

    fn optional_number(&mut self, name: &str, least: usize, default: usize, value: &mut usize) -> Parsed<()> {
        let given = self.take(Some(name));
        *value = given.map_or(Ok(default), |given| self.size(given, name, least))?;
        Ok(())
    }

    fn real(
        &mut self,
        name: Option<&str>,
        what: &str,
        range: RangeInclusive<f32>,
        default: Option<f32>,
        value: &mut f32,
    ) -> Parsed<()> {
        let given = self.take(name).map(|given| self.number_in(given, what, range)).transpose()?;
        let missing = || self.error(format!("{what} is missing, such as 0.1"));
        *value = given.or(default).ok_or_else(missing)?;
        Ok(())
    }

    fn optional_real(
        &mut self,
        name: &str,
        range: RangeInclusive<f32>,
        value: &mut Option<f32>,
    ) -> Parsed<()> {
        *value = self.take(Some(name)).map(|given| self.number_in(given, name, range)).transpose()?;
        Ok(())
    }

    fn switch(&mut self, name: &str, default: bool, value: &mut bool) -> Parsed<()> {
        let Some(given) = self.take(Some(name)) else {
            *value = default;
            return Ok(());
        };
        let wrong = || self.error(format!("{name} is {given}, but must be #true or #false"));
        *value = given.as_bool().ok_or_else(wrong)?;
        Ok(())
    }

    fn choice<T: Copy + PartialEq>(
        &mut self,
        what: &str,
        known: &[(&str, T)],
        default: T,
        value: &mut T,
    ) -> Parsed<()> {
        *value = self.optional_choice(None, what, known)?.unwrap_or(default);
        Ok(())
    }
}
