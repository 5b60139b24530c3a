//! Reads whole files that people write, and small ones of our own. Blocks: for starts, and for threads aside.
//!
//! Why bounded: a path may be that of something else, and a file of many gigabytes would be read before anybody is told.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::limits::GIVEN_FILE_LEN_MAX;

/// A file's bytes, if there are at most `len_max`.
pub fn bytes(path: &Path, len_max: u64) -> io::Result<Vec<u8>> {
    let read = head(path, len_max + 1)?;
    if read.len() as u64 > len_max {
        let problem = format!("it is larger than {} MiB, which is more than such a file has", len_max >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(read)
}

/// The first bytes of a file, `len` at most: what is behind them means nothing.
pub fn head(path: &Path, len: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    File::open(path)?.take(len).read_to_end(&mut read)?;
    Ok(read)
}

/// The bytes of a file that was given.
pub fn given(path: &Path) -> io::Result<Vec<u8>> {
    bytes(path, GIVEN_FILE_LEN_MAX)
}

/// The text of a file that was given.
pub fn text(path: &Path) -> io::Result<String> {
    String::from_utf8(given(path)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a file comes whole or not at all, and nothing of a huge one is kept. Method: at the bound, one byte above, a
    /// sparse file of a terabyte, no text.
    #[test]
    fn a_file_comes_whole_or_not_at_all() {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().join("file");
        std::fs::write(&path, "12345678").expect("written");
        assert_eq!(bytes(&path, 8).expect("small enough"), b"12345678");
        assert_eq!(bytes(&path, 7).expect_err("too large").kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(text(&path).expect("a text"), "12345678");
        File::create(&path).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
        let error = text(&path).expect_err("too large");
        assert!(error.to_string().contains("larger than 16 MiB"), "{error}");
        std::fs::write(&path, [0xff]).expect("written");
        assert_eq!(text(&path).expect_err("no text").kind(), io::ErrorKind::InvalidData);
    }
}
