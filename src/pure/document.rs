//! YAML documents, and JSON ones, which are YAML too, as plain values.

use yaml_rust2::{Yaml, YamlLoader};

/// A value. Numbers and truth values are texts: who reads them knows what they should be.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
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
    #[error("aliases and tags are not supported")]
    Unsupported,
}

/// The first document of `text`; `Null` when it is empty.
pub fn parse(text: &str) -> Result<Value, DocumentError> {
    let documents = YamlLoader::load_from_str(text).map_err(|error| DocumentError::Syntax(error.to_string()))?;
    documents.into_iter().next().map_or(Ok(Value::Null), value)
}

fn value(yaml: Yaml) -> Result<Value, DocumentError> {
    Ok(match yaml {
        Yaml::Null => Value::Null,
        Yaml::Real(text) | Yaml::String(text) => Value::Text(text),
        Yaml::Integer(number) => Value::Text(number.to_string()),
        Yaml::Boolean(truth) => Value::Text(truth.to_string()),
        Yaml::Array(items) => Value::List(items.into_iter().map(value).collect::<Result<_, _>>()?),
        Yaml::Hash(entries) => {
            let entries = entries.into_iter().map(|(key, item)| match value(key)? {
                Value::Text(key) => Ok((key, value(item)?)),
                Value::Null | Value::List(_) | Value::Map(_) => Err(DocumentError::Key),
            });
            Value::Map(entries.collect::<Result<_, _>>()?)
        }
        Yaml::Alias(_) | Yaml::BadValue => return Err(DocumentError::Unsupported),
    })
}

impl Value {
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
}
