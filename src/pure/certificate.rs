//! The name of whom a certificate is for. It has been verified before; here only its fields are walked.

/// The common name of the certificate's subject; without one, its first alternative name that is a URI or a host name.
/// `None` when it has none of these.
///
/// Source: RFC 5280, 4.1 and 4.2.1.6; the bytes are DER (X.690, 10).
pub fn name(der: &[u8]) -> Option<String> {
    let (certificate, _) = Element::read(der)?;
    let (to_be_signed, _) = Element::read(certificate.content)?;
    let mut fields = to_be_signed.elements();
    let mut field = fields.next()?;
    if field.tag == VERSION {
        field = fields.next()?;
    }
    if field.tag != SERIAL_NUMBER {
        return None;
    }
    // Behind it are signature, issuer, validity, subject, key.
    let subject = fields.nth(3)?;
    let extensions = fields.find(|field| field.tag == EXTENSIONS);
    common_name(&subject).or_else(|| alternative_name(&extensions?))
}

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

    /// Goal: no bytes make it fail. Method: every prefix of the certificates, and every byte changed to several others.
    #[test]
    fn damaged_ones_are_only_unnamed() {
        for text in [COMMON, ALTERNATIVE, NEITHER] {
            let whole = der(text);
            for end in 0..whole.len() {
                let _ = name(&whole[..end]);
            }
            for at in 0..whole.len() {
                for value in [0, 1, 0x7f, 0x80, 0x81, 0x83, 0x84, 0xff] {
                    let mut changed = whole.clone();
                    changed[at] = value;
                    let _ = name(&changed);
                }
            }
        }
    }
}
