//! Whom a certificate is for, and until when. Others verify it; here only its fields are walked.

use super::civil_time::Civil;

/// The common name of the certificate's subject; without one, its first alternative name that is a URI or a host name.
/// `None` when it has none of these.
///
/// Source: RFC 5280, 4.1 and 4.2.1.6; the bytes are DER (X.690, 10).
pub fn name(der: &[u8]) -> Option<String> {
    let mut fields = after_serial_number(der)?;
    let subject = fields.nth(3)?;
    let extensions = fields.find(|field| field.tag == EXTENSIONS);
    common_name(&subject).or_else(|| alternative_name(&extensions?))
}

/// When it ends to be valid, in seconds since 1970.
///
/// Source: RFC 5280, 4.1.2.5: times are UTC and have seconds; those until 2049 have two digits of the year.
pub fn not_after(der: &[u8]) -> Option<u64> {
    let validity = after_serial_number(der)?.nth(2)?;
    let until = validity.elements().nth(1)?;
    let text = std::str::from_utf8(until.content).ok()?.strip_suffix('Z')?;
    let (century, text) = match (until.tag, text.len()) {
        (UTC_TIME, 12) => (if text < "50" { 2000 } else { 1900 }, text),
        (GENERALIZED_TIME, 14) => (two_digits(text, 0)? * 100, &text[2..]),
        _ => return None,
    };
    let [year, month, day, hour, minute, second] = [0, 2, 4, 6, 8, 10].map(|at| two_digits(text, at));
    let civil =
        Civil { year: century + year?, month: month?, day: day?, hour: hour?, minute: minute?, second: second? };
    civil.to_unix()
}

fn two_digits(text: &str, at: usize) -> Option<u32> {
    let digits = text.get(at..at + 2)?;
    digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// The fields that stand behind the serial number: signature, issuer, validity, subject, key and more.
fn after_serial_number(der: &[u8]) -> Option<impl Iterator<Item = Element<'_>>> {
    let (certificate, _) = Element::read(der)?;
    let (to_be_signed, _) = Element::read(certificate.content)?;
    let mut fields = to_be_signed.elements();
    let first = fields.next()?;
    let number = if first.tag == VERSION { fields.next()? } else { first };
    (number.tag == SERIAL_NUMBER).then_some(fields)
}

const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SERIAL_NUMBER: u8 = 0x02;
const BOOLEAN: u8 = 0x01;
const OBJECT: u8 = 0x06;
/// Context tags of TBSCertificate and GeneralName.
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
const DNS_NAME: u8 = 0x82;
const URI: u8 = 0x86;
/// 2.5.4.3 and 2.5.29.17.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
/// UTF8String, PrintableString, IA5String: what is text in our sense.
const TEXTS: [u8; 3] = [0x0c, 0x13, 0x16];

struct Element<'a> {
    tag: u8,
    content: &'a [u8],
}

impl<'a> Element<'a> {
    /// The first element of `bytes`, and what is behind it.
    fn read(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (&tag, rest) = bytes.split_first()?;
        let (&first, mut rest) = rest.split_first()?;
        let len = match first {
            0..=0x7f => usize::from(first),
            // Longer forms of the length cannot be within a certificate that TLS takes.
            0x81..=0x83 => {
                let (digits, behind) = rest.split_at_checked(usize::from(first & 0x0f))?;
                rest = behind;
                digits.iter().fold(0, |len, &digit| len << 8 | usize::from(digit))
            }
            _ => return None,
        };
        let (content, behind) = rest.split_at_checked(len)?;
        Some((Self { tag, content }, behind))
    }

    /// What is in it, up to what is no element.
    fn elements(&self) -> impl Iterator<Item = Element<'a>> + use<'a> {
        let mut rest = self.content;
        std::iter::from_fn(move || {
            let (element, behind) = Self::read(rest)?;
            rest = behind;
            Some(element)
        })
    }

    fn text(&self) -> Option<String> {
        let text = std::str::from_utf8(self.content).ok()?;
        // A name is shown in logs.
        (!text.is_empty() && !text.contains(char::is_control)).then(|| text.to_owned())
    }
}

/// The last one, which is the most specific.
fn common_name(subject: &Element<'_>) -> Option<String> {
    let attributes = subject.elements().flat_map(|set| set.elements());
    let names = attributes.filter_map(|attribute| {
        let mut parts = attribute.elements();
        let (kind, value) = (parts.next()?, parts.next()?);
        let is_name = kind.tag == OBJECT && kind.content == COMMON_NAME && TEXTS.contains(&value.tag);
        is_name.then_some(value)?.text()
    });
    names.last()
}

fn alternative_name(extensions: &Element<'_>) -> Option<String> {
    let list = extensions.elements().next()?;
    let extension = list.elements().find(|extension| {
        extension.elements().next().is_some_and(|kind| kind.tag == OBJECT && kind.content == SUBJECT_ALT_NAME)
    })?;
    let value = extension.elements().skip(1).find(|part| part.tag != BOOLEAN)?;
    let (names, _) = Element::read(value.content)?;
    let found = |tag| names.elements().find(|name| name.tag == tag).and_then(|name| name.text());
    found(URI).or_else(|| found(DNS_NAME))
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    // Made by `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256`, with the subjects "/O=Org/CN=build agent" and
    // "/O=Org", and the second one with `-addext subjectAltName=critical,DNS:agent.example,URI:spiffe://org/agent`.
    const COMMON: &str = "MIIBuDCCAV+gAwIBAgIUJRn2Jblfdh3Tt9RDGgeuvScE61wwCgYIKoZIzj0EAwIwJDEMMAoGA1UECgwDT3JnMRQwEgYDVQQDDAti\
        dWlsZCBhZ2VudDAgFw0yNjExMzAwNzI5MThaGA8yMTI2MTEwNjA3MjkxOFowJDEMMAoGA1UECgwDT3JnMRQwEgYDVQQDDAtidWls\
        ZCBhZ2VudDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABCCWnGTJ9k+KaLe6dAv5ueLrBKwB3bW5UXhEgwrp27neFttgDlkP8M+J\
        weNTSeBpDYzff6PPjLQ+2vIrcKSXeYyjbTBrMB0GA1UdDgQWBBS4in7GB3wKsoFUapj9F5gAXvwbOzAfBgNVHSMEGDAWgBS4in7G\
        B3wKsoFUapj9F5gAXvwbOzAPBgNVHRMBAf8EBTADAQH/MBgGA1UdEQQRMA+CDWFnZW50LmV4YW1wbGUwCgYIKoZIzj0EAwIDRwAw\
        RAIgLif1NIw6HfEgc8r3sWrfYEo4TXLwkVoWJFWYs9QK6goCIFL5yCDDmEw0iv6MHvvCR5oqcMhNUDe/94mqWL8QKbye";
    const ALTERNATIVE: &str = "MIIBpTCCAUygAwIBAgIUZTd8SwLqwg+FS8nKmYEv8zKBKJQwCgYIKoZIzj0EAwIwDjEMMAoGA1UECgwDT3JnMCAXDTI2MTEzMDA3\
        MjkxOFoYDzIxMjYxMTA2MDcyOTE4WjAOMQwwCgYDVQQKDANPcmcwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATW8UBDcmYHLslV\
        gvJsXm1lwF+HdbOVIPgqFSGjE3fn3Jy4D6NaqU0UMsiCRqfyWlPqj8TtyWXrHgNlmzC/2FWdo4GFMIGCMB0GA1UdDgQWBBQ2bEC2\
        Nmji8XNP/BSAX05u3Q9jyjAfBgNVHSMEGDAWgBQ2bEC2Nmji8XNP/BSAX05u3Q9jyjAPBgNVHRMBAf8EBTADAQH/MC8GA1UdEQEB\
        /wQlMCOCDWFnZW50LmV4YW1wbGWGEnNwaWZmZTovL29yZy9hZ2VudDAKBggqhkjOPQQDAgNHADBEAiB9//m76pAJhHISYp3EtSdt\
        9Nh4xKxH42414MABr15p/AIgJP8Hj7Lp7RwLrjjJlWrrxau5eVAczM5H1mA0nkRhQBU=";
    const NEITHER: &str = "MIIBczCCARmgAwIBAgIUIpk8xhrW22ZMFsX5iV13ZFKVcXAwCgYIKoZIzj0EAwIwDjEMMAoGA1UECgwDT3JnMCAXDTI2MTEzMDA3\
        MjkxOFoYDzIxMjYxMTA2MDcyOTE4WjAOMQwwCgYDVQQKDANPcmcwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARITe7rJ4Kcsn7v\
        CXC+ugLiprEXYPAqk7CB+qIPj5It5KAYHNBKz4SAVyoF1fSkzdRHDfU9jL1Jz1992O5/C1RYo1MwUTAdBgNVHQ4EFgQUkuX9RK3I\
        lgS4Hd+apWXhRCAPBZgwHwYDVR0jBBgwFoAUkuX9RK3IlgS4Hd+apWXhRCAPBZgwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQD\
        AgNIADBFAiEAnLnA9hlJ0IQ36WF7FGJ4iWhUd6zSZfHmf8e3l30VuygCIA6IiGTFeTBAGKhDV9heG4CH590F6nX4MEgkYc8z7JiM";

    fn der(text: &str) -> Vec<u8> {
        STANDARD.decode(text).expect("base64")
    }

    /// Goal: the common name goes before other names, a URI before a host. Method: three certificates by openssl.
    #[test]
    fn names() {
        assert_eq!(name(&der(COMMON)).as_deref(), Some("build agent"));
        assert_eq!(name(&der(ALTERNATIVE)).as_deref(), Some("spiffe://org/agent"));
        assert_eq!(name(&der(NEITHER)), None);
    }

    /// Goal: the end of validity in both forms. Method: the certificate as it is, which ends in 2126, and with a time of the
    /// older form in the place of the first.
    #[test]
    fn ends() {
        let whole = der(COMMON);
        assert_eq!(not_after(&whole), Some(4_949_623_758));
        let at = whole.windows(17).position(|part| part == b"\x18\x0f21261106072918Z").expect("the end");
        for (text, expected) in [
            (&b"\x17\x0d261106072918Z"[..], Some(1_793_950_158)),
            (b"\x17\x0d991231235959Z", Some(946_684_799)),
            (b"\x17\x0d26110607291xZ", None),
        ] {
            let mut changed = whole.clone();
            // An empty element behind it keeps the lengths.
            changed[at..at + 17].copy_from_slice(&[text, b"\x05\x00"].concat());
            assert_eq!(not_after(&changed), expected, "{text:?}");
        }
    }

    /// Goal: no bytes make it fail. Method: every prefix of the certificates, and every byte changed to several others.
    #[test]
    fn damaged_ones_are_only_unnamed() {
        for text in [COMMON, ALTERNATIVE, NEITHER] {
            let whole = der(text);
            for end in 0..whole.len() {
                let _ = (name(&whole[..end]), not_after(&whole[..end]));
            }
            for at in 0..whole.len() {
                for value in [0, 1, 0x7f, 0x80, 0x81, 0x83, 0x84, 0xff] {
                    let mut changed = whole.clone();
                    changed[at] = value;
                    let _ = (name(&changed), not_after(&changed));
                }
            }
        }
    }
}
