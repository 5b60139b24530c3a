//! Secrets: nobody prints one by accident.

use std::fmt;

/// A text that must not be printed. Compared in constant time.
#[derive(Clone)]
pub struct Secret(Box<str>);

impl Secret {
    pub fn new(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// The text itself, for whoever signs or sends it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether `other` is the same text, in a time that tells only the lengths.
    pub fn is(&self, other: &str) -> bool {
        same(self.0.as_bytes(), other.as_bytes())
    }
}

/// Whether both are the same bytes, in a time that tells only the lengths.
pub fn same(ours: &[u8], theirs: &[u8]) -> bool {
    let differ = ours.iter().zip(theirs).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
    ours.len() == theirs.len() && differ == 0
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a secret compares and never shows. Method: equal, unequal and prefix texts, and its debug form.
    #[test]
    fn compares_and_hides() {
        let secret = Secret::new("hunter2");
        assert!(secret.is("hunter2") && !secret.is("hunter3") && !secret.is("hunter") && !secret.is(""));
        assert!(!format!("{secret:?} {:?}", Some(&secret)).contains("hunter"));
    }
}
