//! YAML documents, and JSON ones, which are YAML too, as plain values.

use std::collections::BTreeMap;

use yaml_rust2::parser::{Event, MarkedEventReceiver, Parser, Tag};
use yaml_rust2::scanner::{Marker, TScalarStyle};

use crate::limits::{DOCUMENT_DEPTH_MAX, DOCUMENT_VALUES_MAX};

/// A value. Numbers and truth values are texts, as they were written: who reads them knows what they should be, and a key such
/// as `00123` is no number.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Value {
    #[default]
    Null,
    Text(String),
    List(Vec<Value>),
    /// In the order of the document.
    Map(Vec<(String, Value)>),
}

/// Why a text is no document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    #[error("{0}")]
    Syntax(String),
    #[error("a key is not a text")]
    Key,
    #[error("line {line}: {key:?} stands there twice")]
    Twice { key: String, line: usize },
    #[error("line {line}: a tag such as !binary is not supported")]
    Tag { line: usize },
    #[error(
        "line {line}: it is nested deeper than {DOCUMENT_DEPTH_MAX}, or has more than {DOCUMENT_VALUES_MAX} values"
    )]
    TooLarge { line: usize },
}

/// The first document of `text`; `Null` when it is empty.
pub fn parse(text: &str) -> Result<Value, DocumentError> {
    let mut builder = Builder::default();
    let scanned = Parser::new_from_str(text).load(&mut builder, false);
    match (builder.failed, scanned) {
        (Some(error), _) => Err(error),
        (None, Err(error)) => Err(DocumentError::Syntax(error.to_string())),
        (None, Ok(())) => Ok(builder.root),
    }
}

/// Makes the values of what the parser meets.
#[derive(Default)]
struct Builder {
    /// Lists and maps that have begun, the outermost first, with their anchors.
    open: Vec<(Open, usize)>,
    /// By the number of the anchor.
    anchors: BTreeMap<usize, Value>,
    /// How many there are.
    values: usize,
    root: Value,
    failed: Option<DocumentError>,
}

enum Open {
    List(Vec<Value>),
    Map {
        entries: Vec<(String, Value)>,
        /// Of the entry whose value is to come.
        key: Option<String>,
    },
}

impl MarkedEventReceiver for Builder {
    fn on_event(&mut self, event: Event, mark: Marker) {
        if self.failed.is_none() {
            self.failed = self.take(event, mark.line()).err();
        }
    }
}

impl Builder {
    fn take(&mut self, event: Event, line: usize) -> Result<(), DocumentError> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let suffix = core_tag(tag.as_ref(), line)?;
                let is_null = matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL");
                let is_null = suffix == Some("null") || (is_null && style == TScalarStyle::Plain && suffix.is_none());
                self.end(if is_null { Value::Null } else { Value::Text(text) }, anchor, line)
            }
            Event::SequenceStart(anchor, tag) => self.begin(Open::List(Vec::new()), anchor, tag.as_ref(), line),
            Event::MappingStart(anchor, tag) => {
                self.begin(Open::Map { entries: Vec::new(), key: None }, anchor, tag.as_ref(), line)
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some((Open::List(items), anchor)) => self.end(Value::List(items), anchor, line),
                Some((Open::Map { entries, .. }, anchor)) => self.end(Value::Map(entries), anchor, line),
                None => Ok(()),
            },
            Event::Alias(anchor) => {
                let value = self.anchors.get(&anchor).cloned().unwrap_or_default();
                self.values += value.count();
                self.end(value, 0, line)
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart | Event::DocumentEnd => {
                Ok(())
            }
        }
    }

    fn begin(&mut self, open: Open, anchor: usize, tag: Option<&Tag>, line: usize) -> Result<(), DocumentError> {
        core_tag(tag, line)?;
        self.open.push((open, anchor));
        if self.open.len() > DOCUMENT_DEPTH_MAX { Err(DocumentError::TooLarge { line }) } else { Ok(()) }
    }

    /// A value is whole: it goes where it belongs.
    fn end(&mut self, value: Value, anchor: usize, line: usize) -> Result<(), DocumentError> {
        self.values += 1;
        if self.values > DOCUMENT_VALUES_MAX {
            return Err(DocumentError::TooLarge { line });
        }
        if anchor > 0 {
            self.anchors.insert(anchor, value.clone());
        }
        match self.open.last_mut() {
            None => self.root = value,
            Some((Open::List(items), _)) => items.push(value),
            Some((Open::Map { entries, key }, _)) => match (key.take(), value) {
                (Some(key), value) => entries.push((key, value)),
                (None, Value::Text(text)) if entries.iter().any(|(known, _)| *known == text) => {
                    return Err(DocumentError::Twice { key: text, line });
                }
                (None, Value::Text(text)) => *key = Some(text),
                (None, Value::Null | Value::List(_) | Value::Map(_)) => return Err(DocumentError::Key),
            },
        }
        Ok(())
    }
}

/// What a tag says of a value, where it is one of those that every YAML has.
///
/// Source: YAML 1.2, 10.3, "Core schema".
fn core_tag(tag: Option<&Tag>, line: usize) -> Result<Option<&str>, DocumentError> {
    const SUFFIXES: [&str; 7] = ["bool", "float", "int", "map", "null", "seq", "str"];
    match tag {
        None => Ok(None),
        Some(Tag { handle, suffix }) if handle == "tag:yaml.org,2002:" && SUFFIXES.contains(&suffix.as_str()) => {
            Ok(Some(suffix))
        }
        Some(_) => Err(DocumentError::Tag { line }),
    }
}

impl Value {
    /// Itself, and all in it.
    fn count(&self) -> usize {
        match self {
            Self::Null | Self::Text(_) => 1,
            Self::List(items) => 1 + items.iter().map(Self::count).sum::<usize>(),
            Self::Map(entries) => 1 + entries.iter().map(|(_, value)| value.count()).sum::<usize>(),
        }
    }

    /// The value as JSON, which `parse` reads again.
    pub fn to_json(&self) -> String {
        let quoted = |text: &str| {
            let escaped = text.chars().map(|c| match c {
                '"' | '\\' => format!("\\{c}"),
                c if u32::from(c) < 0x20 || u32::from(c) == 0x7f => format!("\\u{:04x}", u32::from(c)),
                c => c.to_string(),
            });
            format!("\"{}\"", escaped.collect::<String>())
        };
        match self {
            Self::Null => "null".into(),
            Self::Text(text) => quoted(text),
            Self::List(items) => {
                format!("[{}]", items.iter().map(Self::to_json).collect::<Vec<_>>().join(", "))
            }
            Self::Map(entries) => {
                let entries = entries.iter().map(|(key, value)| format!("{}: {}", quoted(key), value.to_json()));
                format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// The text of an entry of a map; `None` for another kind of value, an empty text, and where there is none.
    pub fn text(&self, key: &str) -> Option<&str> {
        let Self::Map(entries) = self else { return None };
        match entries.iter().find(|(name, _)| name == key) {
            Some((_, Self::Text(text))) if !text.is_empty() => Some(text),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: YAML and JSON give the same values. Method: one document in both, and what is none.
    #[test]
    fn yaml_and_json() {
        let yaml = parse("# comment\na: x\nb:\n  - 1\n  - true\n  - null\nc: {d: \"e\\/f\", g: 1.50}\n").expect("YAML");
        let json = parse(r#"{"a": "x", "b": [1, true, null], "c": {"d": "e\/f", "g": 1.50}}"#).expect("JSON");
        assert_eq!(yaml, json);
        assert_eq!(parse(&yaml.to_json()), Ok(yaml.clone()));
        let odd = Value::Map(vec![("http://h:1/ \"\\".into(), Value::Text("a\n\t: {}[]#\u{7f}\u{e9}".into()))]);
        assert_eq!(parse(&odd.to_json()), Ok(odd));
        assert_eq!(yaml.text("a"), Some("x"));
        assert_eq!(yaml.text("b"), None);
        assert_eq!(parse(""), Ok(Value::Null));
        assert!(matches!(parse("a: [1"), Err(DocumentError::Syntax(_))));
        assert_eq!(parse("[1]: 2"), Err(DocumentError::Key));
    }

    /// Goal: what is written is what is read, and what is no value is none. Method: texts that a parser might take for a number
    /// or a truth value, every way to say nothing, tags.
    #[test]
    fn texts_stay_as_they_are() {
        for text in
            ["00123", "0x1F", "0o17", "+5", "1_000", "1e5", "True", "yes", ".5", "'~'", "\"null\"", "!!str null"]
        {
            let value = parse(&format!("a: {text}\n")).expect("YAML");
            let expected = text.trim_start_matches("!!str ").trim_matches(['\'', '"']);
            assert_eq!(value, Value::Map(vec![("a".into(), Value::Text(expected.into()))]), "{text}");
        }
        for nothing in ["", "~", "null", "Null", "NULL", "!!null x"] {
            let value = parse(&format!("a: {nothing}\n")).expect("YAML");
            assert_eq!(value, Value::Map(vec![("a".into(), Value::Null)]), "{nothing}");
        }
        assert_eq!(parse("a: 1\nb: !binary aGk=\n"), Err(DocumentError::Tag { line: 2 }));
    }

    /// Goal: a key counts once, anchors work, and a small text makes no large value. Method: a key that comes twice, an alias,
    /// aliases of aliases, deep nesting.
    #[test]
    fn bounded() {
        let twice = parse("a: 1\nb: 2\na: 3\n");
        assert_eq!(twice, Err(DocumentError::Twice { key: "a".into(), line: 3 }));
        assert_eq!(parse("a: &x [1, {b: 2}]\nc: *x\n"), parse("a: [1, {b: 2}]\nc: [1, {b: 2}]\n"));
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..9 {
            let items = vec![format!("*a{}", n - 1); 10].join(", ");
            bomb += &format!("a{n}: &a{n} [{items}]\n");
        }
        assert!(matches!(parse(&bomb), Err(DocumentError::TooLarge { .. })));
        let deep = "[".repeat(DOCUMENT_DEPTH_MAX + 1) + &"]".repeat(DOCUMENT_DEPTH_MAX + 1);
        assert_eq!(parse(&deep), Err(DocumentError::TooLarge { line: 1 }));
        assert!(parse(&deep[1..deep.len() - 1]).is_ok());
    }
}
