//! JSON for machines, written by hand: flat objects of numbers and texts need no library.

use std::fmt::{Display, Write};

/// An object or a list being written.
pub struct Json {
    out: String,
    close: char,
    is_empty: bool,
}

impl Json {
    pub fn object() -> Self {
        Self { out: "{".into(), close: '}', is_empty: true }
    }

    pub fn list() -> Self {
        Self { out: "[".into(), close: ']', is_empty: true }
    }

    /// A member that is a number, or JSON already.
    pub fn raw(mut self, name: &str, value: impl Display) -> Self {
        self.separate();
        // Writing to a String cannot fail.
        let _ = write!(self.out, "{}:{value}", quoted(name));
        self
    }

    /// A member that is a text.
    pub fn text(self, name: &str, value: &str) -> Self {
        self.raw(name, quoted(value))
    }

    /// An item of a list, JSON already.
    pub fn item(mut self, value: impl Display) -> Self {
        self.separate();
        // As above.
        let _ = write!(self.out, "{value}");
        self
    }

    /// An item that is a text.
    pub fn text_item(self, value: &str) -> Self {
        self.item(quoted(value))
    }

    pub fn end(mut self) -> String {
        self.out.push(self.close);
        self.out
    }

    fn separate(&mut self) {
        if !std::mem::replace(&mut self.is_empty, false) {
            self.out.push(',');
        }
    }
}

/// A JSON string. Source: RFC 8259, section 7.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                // As above.
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what is written is JSON, whatever the texts. Method: by hand, with every kind of member and of character.
    #[test]
    fn members_and_escapes() {
        let list = Json::list().item(1).text_item("x").item(Json::object().end()).end();
        let text = Json::object().raw("a", 1.5).text("b\"", "c\\\n\u{1}é").raw("d", list).end();
        assert_eq!(text, r#"{"a":1.5,"b\"":"c\\\u000a\u0001é","d":[1,"x",{}]}"#);
    }
}
