//! AWS Signature Version 4 in the Authorization header, as S3 wants it.
//!
//! S3 differs from other services: a path is percent-encoded once and never normalised, and the payload's hash is a
//! header of its own.
//!
//! Google's own form differs in names alone. Its store takes Amazon's as well, but then refuses headers of its own beside them.
//!
//! Source: AWS "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)"; Google Cloud Storage
//! "V4 signing process" and "HMAC keys".

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256};

use super::civil_time::Civil;
use super::digest::{EMPTY_HASH, Hash};
use super::secret::Secret;

/// The payload is not signed. Only over TLS: nothing else would notice a changed byte before our own check.
pub const UNSIGNED_PAYLOAD: &str = "UNSIGNED-PAYLOAD";

/// Whose form of the signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Aws,
    Google,
}

/// What differs between them.
struct Names {
    algorithm: &'static str,
    /// In front of the secret.
    secret: &'static str,
    service: &'static str,
    request: &'static str,
    payload: &'static str,
    date: &'static str,
    token: &'static str,
}

impl Scheme {
    const fn names(self) -> &'static Names {
        match self {
            Self::Aws => &Names {
                algorithm: "AWS4-HMAC-SHA256",
                secret: "AWS4",
                service: "s3",
                request: "aws4_request",
                payload: "x-amz-content-sha256",
                date: "x-amz-date",
                token: "x-amz-security-token",
            },
            Self::Google => &Names {
                algorithm: "GOOG4-HMAC-SHA256",
                secret: "GOOG4",
                service: "storage",
                request: "goog4_request",
                payload: "x-goog-content-sha256",
                date: "x-goog-date",
                token: "x-goog-security-token",
            },
        }
    }
}

/// Who signs.
#[derive(Clone, Debug)]
pub struct Credentials {
    pub access_key_id: Box<str>,
    pub secret_access_key: Secret,
    /// Of temporary credentials.
    pub session_token: Option<Secret>,
}

/// What is signed besides the headers.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    pub method: &'a str,
    /// Percent-encoded, byte for byte as it is sent (see `encode_path`).
    pub path: &'a str,
    /// As it is sent without the `?` (see `encode_query`).
    pub query: &'a str,
}

/// What `x-amz-content-sha256`, or Google's header in its place, says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// The body's SHA-256. For a raw CAS object it is the digest's: nothing is hashed again.
    Known(Hash),
    Empty,
    Unsigned,
}

impl Payload {
    /// The header's value.
    pub fn text(self) -> String {
        match self {
            Self::Known(hash) => hash.to_hex(),
            Self::Empty => EMPTY_HASH.to_hex(),
            Self::Unsigned => UNSIGNED_PAYLOAD.to_owned(),
        }
    }
}

/// Signs the requests of one set of credentials for one region. Keeps the derived key, which changes once a day.
#[derive(Debug)]
pub struct Signer {
    credentials: Credentials,
    region: Box<str>,
    scheme: Scheme,
    /// The day that `key` is for, `20130524`.
    day: String,
    key: Secret32,
}

/// A key that does not print.
struct Secret32([u8; 32]);

impl std::fmt::Debug for Secret32 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

impl Signer {
    pub fn new(credentials: Credentials, region: &str, scheme: Scheme) -> Self {
        Self { credentials, region: region.into(), scheme, day: String::new(), key: Secret32([0; 32]) }
    }

    pub fn region(&self) -> &str {
        &self.region
    }

    /// The headers that a request needs besides `headers`, the last one being `authorization`. `headers` are all that
    /// are signed, lower-case, `host` among them; date, hash of the payload and session token are added.
    pub fn sign(
        &mut self,
        target: Target<'_>,
        headers: &[(&str, &str)],
        payload: Payload,
        now: Civil,
    ) -> Vec<(&'static str, String)> {
        let date = now.basic();
        let payload = payload.text();
        let names_of = self.scheme.names();
        let mut added = vec![(names_of.payload, payload.clone()), (names_of.date, date.clone())];
        if let Some(token) = &self.credentials.session_token {
            added.push((names_of.token, token.reveal().to_owned()));
        }
        let mut all: Vec<(&str, &str)> = headers.to_vec();
        all.extend(added.iter().map(|(name, value)| (*name, value.as_str())));
        let (request, names) = canonical_request(target, &mut all, &payload);
        self.derive_key(&date[..8]);
        let Names { algorithm, service, request: end, .. } = names_of;
        let scope = format!("{}/{}/{service}/{end}", self.day, self.region);
        let to_sign = format!("{algorithm}\n{date}\n{scope}\n{}", sha256(request.as_bytes()).to_hex());
        let signature = Hash(hmac(&self.key.0, to_sign.as_bytes())).to_hex();
        let id = &self.credentials.access_key_id;
        let authorization = format!("{algorithm} Credential={id}/{scope},SignedHeaders={names},Signature={signature}");
        added.push(("authorization", authorization));
        added
    }

    fn derive_key(&mut self, day: &str) {
        if self.day == day {
            return;
        }
        let names = self.scheme.names();
        let secret = format!("{}{}", names.secret, self.credentials.secret_access_key.reveal());
        let parts = [day, &self.region, names.service, names.request];
        let start = hmac(secret.as_bytes(), parts[0].as_bytes());
        self.key = Secret32(parts[1..].iter().fold(start, |key, part| hmac(&key, part.as_bytes())));
        self.day = day.to_owned();
    }
}

/// The canonical request, and the names of the signed headers joined by `;`.
fn canonical_request(target: Target<'_>, headers: &mut [(&str, &str)], payload: &str) -> (String, String) {
    headers.sort_unstable();
    let path = if target.path.is_empty() { "/" } else { target.path };
    let mut request = format!("{}\n{path}\n{}\n", target.method, target.query);
    for (name, value) in headers.iter() {
        request.push_str(name);
        request.push(':');
        for (at, word) in value.split_ascii_whitespace().enumerate() {
            request.push_str(if at > 0 { " " } else { "" });
            request.push_str(word);
        }
        request.push('\n');
    }
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    request.push('\n');
    request.push_str(&names);
    request.push('\n');
    request.push_str(payload);
    (request, names)
}

/// Percent-encodes a path, slashes aside. Send it exactly so.
pub fn encode_path(path: &str) -> String {
    encode(path, true)
}

/// Percent-encodes and sorts a query's pairs. Send it exactly so. A parameter without a value gets an empty one.
pub fn encode_query(pairs: &[(&str, &str)]) -> String {
    let mut encoded: Vec<_> = pairs.iter().map(|(name, value)| (encode(name, false), encode(value, false))).collect();
    encoded.sort_unstable();
    let joined: Vec<String> = encoded.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    joined.join("&")
}

fn encode(text: &str, keeps_slash: bool) -> String {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut out = String::with_capacity(text.len() + 8);
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte as char),
            b'/' if keeps_slash => out.push('/'),
            _ => out.extend(['%', HEX[usize::from(byte >> 4)] as char, HEX[usize::from(byte & 0xf)] as char]),
        }
    }
    out
}

/// The hash of a body that nobody has hashed yet.
pub fn sha256(data: &[u8]) -> Hash {
    Hash(Sha256::digest(data).into())
}

/// The same of a body that comes in pieces.
#[derive(Default)]
pub struct Hasher(Sha256);

impl Hasher {
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    pub fn finish(self) -> Hash {
        Hash(self.0.finalize().into())
    }
}

fn hmac(key: &[u8], data: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(data);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signer() -> Signer {
        let credentials = Credentials {
            access_key_id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret_access_key: Secret::new("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
            session_token: None,
        };
        Signer::new(credentials, "us-east-1", Scheme::Aws)
    }

    const MAY_24_2013: u64 = 1_369_353_600;
    const HOST: (&str, &str) = ("host", "examplebucket.s3.amazonaws.com");

    /// The signature, and the hash of the canonical request, of one of AWS's examples.
    fn signed(target: Target<'_>, headers: &[(&str, &str)], payload: Payload) -> (String, String) {
        let date = Civil::from_unix(MAY_24_2013);
        let added = signer().sign(target, headers, payload, date);
        let authorization = &added.last().expect("there are headers").1;
        let mut all = headers.to_vec();
        let (basic, text) = (date.basic(), payload.text());
        all.extend([("x-amz-content-sha256", text.as_str()), ("x-amz-date", basic.as_str())]);
        let (request, _) = canonical_request(target, &mut all, &text);
        let signature = authorization.rsplit_once("Signature=").expect("a signature").1.to_owned();
        (sha256(request.as_bytes()).to_hex(), signature)
    }

    /// Goal: the signatures are AWS's. Method: its published examples of header authentication for S3 (key, request,
    /// hash of the canonical request, signature), and the two streaming examples, whose seed is such a signature.
    #[test]
    fn published_examples() {
        let get = Target { method: "GET", path: "/test.txt", query: "" };
        assert_eq!(
            signed(get, &[HOST, ("range", "bytes=0-9")], Payload::Empty),
            (
                "7344ae5b7ee6c3e7e6b0fe0640412a37625d1fbfff95c48bbb2dc43964946972".into(),
                "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41".into()
            )
        );
        let path = encode_path("/test$file.text");
        let put = Target { method: "PUT", path: &path, query: "" };
        let headers = [HOST, ("date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")];
        assert_eq!(
            signed(put, &headers, Payload::Known(sha256(b"Welcome to Amazon S3."))),
            (
                "9e0e90d9c76de8fa5b200d8c849cd5b8dc7a3be3951ddb7f6a76b4158342019d".into(),
                "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd".into()
            )
        );
        let lifecycle = encode_query(&[("lifecycle", "")]);
        assert_eq!(
            signed(Target { method: "GET", path: "/", query: &lifecycle }, &[HOST], Payload::Empty),
            (
                "9766c798316ff2757b517bc739a67f6213b4ab36dd5da2f94eaebf79c77395ca".into(),
                "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543".into()
            )
        );
        let list = encode_query(&[("prefix", "J"), ("max-keys", "2")]);
        assert_eq!(
            signed(Target { method: "GET", path: "", query: &list }, &[HOST], Payload::Empty),
            (
                "df57d21db20da04d7fa30298dd4488ba3a2b47ca3a489c74750e0f1e7df1b9b7".into(),
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7".into()
            )
        );
    }

    /// Goal: the seed of AWS's streaming upload examples, whose payload text is a fixed word, comes out as published.
    /// Method: their canonical requests, signed with the derived key.
    #[test]
    fn streaming_seeds() {
        let examples = [
            (
                "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
                vec![("content-length", "66824")],
                "cee3fed04b70f867d036f722359b0b1f2f0e5dc0efadbc082b76c4c60e316455",
                "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
            ),
            (
                "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
                vec![("x-amz-trailer", "x-amz-checksum-crc32c")],
                "44d48b8c2f70eae815a0198cc73d7a546a73a93359c070abbaa5e6c7de112559",
                "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
            ),
        ];
        for (payload, more, request_hash, seed) in examples {
            let mut headers = vec![
                ("host", "s3.amazonaws.com"),
                ("x-amz-date", "20130524T000000Z"),
                ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
                ("x-amz-content-sha256", payload),
                ("content-encoding", "aws-chunked"),
                ("x-amz-decoded-content-length", "66560"),
            ];
            headers.extend(more);
            let target = Target { method: "PUT", path: "/examplebucket/chunkObject.txt", query: "" };
            let (request, _) = canonical_request(target, &mut headers, payload);
            assert_eq!(sha256(request.as_bytes()).to_hex(), request_hash);
            let mut signer = signer();
            signer.derive_key("20130524");
            let scope = "20130524/us-east-1/s3/aws4_request";
            let to_sign = format!("AWS4-HMAC-SHA256\n20130524T000000Z\n{scope}\n{request_hash}");
            assert_eq!(Hash(hmac(&signer.key.0, to_sign.as_bytes())).to_hex(), seed);
        }
    }

    /// Goal: keys are encoded once, blanks in values fold, a session token is signed, no secret shows, and the day's key
    /// is made anew on the next day. Method: one example each.
    #[test]
    fn rules() {
        assert_eq!(encode_path("/a b/%25+/é//x~"), "/a%20b/%2525%2B/%C3%A9//x~");
        assert_eq!(encode_query(&[("b", "/"), ("a", ""), ("a", " ")]), "a=&a=%20&b=%2F");
        let target = Target { method: "GET", path: "/", query: "" };
        let (request, names) = canonical_request(target, &mut [("x-b", "  1   2 "), ("host", "h")], "P");
        assert_eq!((request.as_str(), names.as_str()), ("GET\n/\n\nhost:h\nx-b:1 2\n\nhost;x-b\nP", "host;x-b"));
        let mut signer = signer();
        signer.credentials.session_token = Some(Secret::new("the-token"));
        let added = signer.sign(target, &[HOST], Payload::Unsigned, Civil::from_unix(MAY_24_2013));
        assert_eq!(added[2], ("x-amz-security-token", "the-token".to_owned()));
        assert!(added[3].1.contains("SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token,"));
        let shown = format!("{signer:?}");
        assert!(!shown.contains("wJalr") && !shown.contains("the-token"), "{shown}");
        let before = signer.key.0;
        signer.sign(target, &[HOST], Payload::Empty, Civil::from_unix(MAY_24_2013 + 86_399));
        assert_eq!(signer.key.0, before);
        signer.sign(target, &[HOST], Payload::Empty, Civil::from_unix(MAY_24_2013 + 86_400));
        assert_ne!(signer.key.0, before);
    }
}
