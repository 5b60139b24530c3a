//! Values as operators write them.

use std::net::ToSocketAddrs;
use std::time::Duration;

use super::ConfigError;
use crate::limits::MAX_SIZE_MAX;
use crate::pure::secret::Secret;
use crate::rt::listen::{self, Address};

/// GiB with fractions, to bytes.
pub fn gib(text: &str) -> Result<u64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number of GiB; write 100 or 0.5".to_owned())?;
    if !value.is_finite() || value <= 0.0 || value > (MAX_SIZE_MAX >> 30) as f64 {
        return Err("must be more than 0 GiB and at most 65536 GiB".into());
    }
    Ok((value * (1u64 << 30) as f64) as u64)
}

/// The size of a blob: bytes, more than none.
pub fn blob_len(text: &str) -> Result<u64, String> {
    // Why by itself: bazel-remote's default is the largest number there is, and no size of a machine.
    let len = text.parse().or_else(|_| bytes(text))?;
    let is_size = (1..=i64::MAX as u64).contains(&len);
    if is_size { Ok(len) } else { Err("must be at least 1 byte, and at most 9223372036854775807".to_owned()) }
}

/// A number of seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "not a number of seconds, such as 0.01".to_owned())
}

/// Bytes with an optional suffix K, M, G or T (powers of 1024).
pub fn bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim_end_matches("iB").trim_end_matches('B');
    let (digits, shift) = match trimmed.char_indices().last() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 10),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 20),
        Some((at, 'g' | 'G')) => (&trimmed[..at], 30),
        Some((at, 't' | 'T')) => (&trimmed[..at], 40),
        _ => (trimmed, 0),
    };
    let value: f64 = digits.parse().map_err(|_| "not a size; write 512M, 4G or a number of bytes".to_owned())?;
    if !value.is_finite() || value < 0.0 || value * (1u64 << shift) as f64 > (1u64 << 60) as f64 {
        return Err("not a size that a machine can have".into());
    }
    Ok((value * (1u64 << shift) as f64) as u64)
}

/// A duration that is not below zero; see `signed_duration`.
pub fn duration(text: &str) -> Result<Duration, String> {
    signed_duration(text)?.ok_or_else(|| "below zero".to_owned())
}

/// `250ms`, `45s`, `1h30m`, `1.5h`; a plain number is seconds. `None` below zero.
///
/// Source: Go, `time.ParseDuration`.
pub fn signed_duration(text: &str) -> Result<Option<Duration>, String> {
    const FORM: &str = "not a duration; write 250ms, 45s, 5m or 1h30m";
    let (is_negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest.is_empty() {
        return Err(FORM.into());
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let value: f64 = rest[..digits].parse().map_err(|_| FORM.to_owned())?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len() - digits);
        seconds += match &rest[digits..digits + unit] {
            "ns" => value * 1e-9,
            // Both signs for micro.
            "us" | "\u{b5}s" | "\u{3bc}s" => value * 1e-6,
            "ms" => value * 1e-3,
            "s" => value,
            // Only alone: `1h30` says nothing about the 30.
            "" if digits == text.len() => value,
            "m" => value * 60.0,
            "h" => value * 3600.0,
            _ => return Err(FORM.into()),
        };
        rest = &rest[digits + unit..];
    }
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    Ok((!is_negative || duration.is_zero()).then_some(duration))
}

/// A truth value as Go's flags and YAML have it.
///
/// Source: Go, `strconv.ParseBool`; YAML 1.1.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "t" | "true" | "y" | "yes" | "on" => Ok(true),
        "0" | "f" | "false" | "n" | "no" | "off" => Ok(false),
        _ => Err("neither true nor false".into()),
    }
}

/// A text that is printed nowhere.
pub fn secret(text: &str) -> Result<Secret, String> {
    Ok(Secret::new(text))
}

/// `host:port`, `:port` for all interfaces (both IP versions where the machine has IPv6), `[v6]:port`; `unix:path`,
/// `unix://path`.
pub fn address(setting: &'static str, value: &str) -> Result<Address, ConfigError> {
    let bad = |problem: String| ConfigError::Address { setting, value: value.to_owned(), problem };
    if let Some(path) = value.strip_prefix("unix:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        return if path.is_empty() { Err(bad("there is no path".into())) } else { Ok(Address::Unix(path.into())) };
    }
    if let Some(port) = value.strip_prefix(':') {
        let port = port.parse().map_err(|_| bad("the port is not a number up to 65535".into()))?;
        return Ok(Address::Tcp(listen::any_interface(port)));
    }
    let mut found = value.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
    found.next().map(Address::Tcp).ok_or_else(|| bad("the host has no address".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: units are what they say, nonsense is refused. Method: one example for each form.
    #[test]
    fn units() {
        assert_eq!(gib("0.25"), Ok(256 << 20));
        assert!(gib("0").is_err() && gib("-1").is_err() && gib("NaN").is_err() && gib("x").is_err());
        assert_eq!(gib("65536"), Ok(64 << 40));
        assert!(gib("65537").is_err() && gib("1e9").is_err());
        assert_eq!(blob_len("100M"), Ok(100 << 20));
        assert_eq!(blob_len("9223372036854775807"), Ok(i64::MAX as u64));
        assert!(blob_len("0").is_err() && blob_len("9223372036854775808").is_err() && blob_len("x").is_err());
        assert!(seconds("0.5").is_ok() && seconds("1s").is_err());
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("1.5G"), Ok(3 << 29));
        assert_eq!(bytes("4096"), Ok(4096));
        assert!(bytes("M").is_err() && bytes("-1").is_err() && bytes("9e99").is_err());
    }

    /// Goal: durations and truth values as Go has them. Method: one example for each form, and what is none.
    #[test]
    fn as_in_go() {
        for (text, ms) in [
            ("250ms", 250),
            ("2m", 120_000),
            ("7", 7000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            ("2s500ms", 2500),
            ("+3000us", 3),
            ("4000\u{b5}s", 4),
            ("0", 0),
            ("-0s", 0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(signed_duration("-5m"), Ok(None));
        for text in ["", "-", "s", "5 parsecs", "-1s", "1h30", "1..5s", ".", "1e3s", "9999999999999999999999h"] {
            assert!(duration(text).is_err(), "{text}");
        }
        for (text, expected) in [("1", true), ("T", true), ("TRUE", true), ("on", true), ("0", false), ("False", false)]
        {
            assert_eq!(boolean(text), Ok(expected), "{text}");
        }
        assert!(boolean("2").is_err() && boolean("").is_err());
    }

    /// Goal: addresses as bazel-remote takes them. Method: one example for each form.
    #[test]
    fn addresses() {
        let tcp = |text: &str| match address("--grpc_address", text) {
            Ok(Address::Tcp(address)) => Some(address),
            _ => None,
        };
        assert_eq!(tcp(":9092").map(|a| a.port()), Some(9092));
        assert_eq!(tcp("127.0.0.1:1"), Some(([127, 0, 0, 1], 1).into()));
        assert_eq!(tcp("[::1]:7").map(|a| a.is_ipv6()), Some(true));
        for text in ["unix:/run/ringcas", "unix:///run/ringcas"] {
            assert_eq!(address("--grpc_address", text).ok(), Some(Address::Unix("/run/ringcas".into())));
        }
        assert_eq!(address("--grpc_address", "unix:here").ok(), Some(Address::Unix("here".into())));
        assert!(address("--grpc_address", "unix://").is_err());
        let error = address("--grpc_address", "127.0.0.1").expect_err("no port");
        assert!(error.to_string().starts_with("--grpc_address \"127.0.0.1\""), "{error}");
        assert!(address("--grpc_address", ":99999").is_err());
    }
}
