//! S3's documents: errors, listings, multipart uploads, and the answers of its token service; and what an answer means.

use std::time::Duration;

use quick_xml::Reader;
use quick_xml::events::Event;

use super::civil_time::{parse_http_date, parse_rfc3339};
use super::secret::Secret;
use super::sigv4::Credentials;

/// The document of a failed request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ErrorBody {
    pub code: String,
    pub message: String,
    /// Where the bucket is, when the answer says so.
    pub region: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedObject {
    pub key: String,
    /// Bytes.
    pub size: u64,
}

/// Which operation an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// GET, HEAD, list, delete.
    Read,
    /// PUT, and the parts of a multipart upload.
    Write,
}

/// What an answer means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    /// There is no such object.
    Miss,
    /// A conditional PUT found the object there.
    Exists,
    /// Two conditional PUTs met: ask whether the object is there.
    Conflict,
    Throttled,
    /// Worth another try.
    Transient,
    /// The credentials have expired.
    Expired,
    /// Our clock and the backend's differ.
    Skewed,
    /// The bucket is in another region.
    Region(String),
    Denied,
    /// The backend does not know this kind of request.
    NotImplemented,
    /// Will fail again.
    Permanent,
}

/// Judges an answer by its status and, where there is one, its error document.
///
/// Source: AWS "Error responses" (list of error codes); botocore's retry lists.
pub fn judge(operation: Operation, status: u16, error: &ErrorBody) -> Verdict {
    match error.code.as_str() {
        "SlowDown"
        | "SlowDownRead"
        | "SlowDownWrite"
        | "Throttling"
        | "ThrottlingException"
        | "TooManyRequests"
        | "RequestLimitExceeded"
        | "BandwidthLimitExceeded"
        | "RequestThrottled" => return Verdict::Throttled,
        "RequestTimeout" | "RequestTimeoutException" | "InternalError" => return Verdict::Transient,
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "InvalidToken" => return Verdict::Expired,
        "RequestTimeTooSkewed" => return Verdict::Skewed,
        "AuthorizationHeaderMalformed" | "PermanentRedirect" | "IllegalLocationConstraintException"
            if is_region(&error.region) =>
        {
            return Verdict::Region(error.region.clone());
        }
        "NotImplemented" => return Verdict::NotImplemented,
        "ConditionalRequestConflict" => return Verdict::Conflict,
        _ => {}
    }
    match status {
        200..=299 => Verdict::Ok,
        304 | 412 if operation == Operation::Write => Verdict::Exists,
        409 if operation == Operation::Write => Verdict::Conflict,
        404 if operation == Operation::Read => Verdict::Miss,
        401 | 403 => Verdict::Denied,
        429 | 503 => Verdict::Throttled,
        501 => Verdict::NotImplemented,
        // Why all: those in front of a store have numbers of their own, such as Cloudflare's 520 to 527.
        408 | 500..=599 => Verdict::Transient,
        _ => Verdict::Permanent,
    }
}

/// Whether it can be the name of a region, which goes into signatures and headers.
fn is_region(name: &str) -> bool {
    (1..=REGION_LEN_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// The longest region's name that is believed; AWS' longest has 14 bytes.
const REGION_LEN_MAX: usize = 64;

/// `Retry-After`, seconds or a date, as a wait from `now` on: seconds since 1970 by the clock of who answered.
///
/// Source: RFC 9110, 10.2.3.
pub fn parse_retry_after(value: &str, now: u64) -> Option<Duration> {
    let value = value.trim();
    let seconds = value.parse().ok().or_else(|| Some(parse_http_date(value)?.saturating_sub(now)));
    seconds.map(Duration::from_secs)
}

/// Calls `visit` with the path of element names and the text of each element that has text.
fn walk(xml: &[u8], mut visit: impl FnMut(&[String], &str)) -> Option<()> {
    let mut reader = Reader::from_reader(xml);
    let (mut path, mut text): (Vec<String>, String) = (Vec::new(), String::new());
    loop {
        match reader.read_event().ok()? {
            Event::Start(start) => {
                if path.len() >= DEPTH_MAX {
                    return None;
                }
                path.push(std::str::from_utf8(start.local_name().as_ref()).ok()?.to_owned());
                text.clear();
            }
            Event::End(_) => {
                if !text.is_empty() {
                    visit(&path, &text);
                    text.clear();
                }
                path.pop()?;
            }
            Event::Text(piece) => text.push_str(&piece.decode().ok()?),
            Event::CData(piece) => text.push_str(&piece.decode().ok()?),
            Event::GeneralRef(name) => match name.resolve_char_ref().ok()? {
                Some(character) => text.push(character),
                None => text.push_str(quick_xml::escape::resolve_predefined_entity(&name.decode().ok()?)?),
            },
            Event::Eof => return path.is_empty().then_some(()),
            Event::Empty(_) | Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
        }
    }
}

/// Levels of elements that are read; S3's documents have four.
const DEPTH_MAX: usize = 16;

/// An error document; all empty when it is none.
pub fn parse_error(xml: &[u8]) -> ErrorBody {
    let mut error = ErrorBody::default();
    let walked = walk(xml, |path, text| {
        let Some(inner) = path.iter().position(|name| name == "Error") else { return };
        match path[inner + 1..].first().map(String::as_str) {
            Some("Code") => error.code = text.to_owned(),
            Some("Message") => error.message = text.to_owned(),
            Some("Region") => error.region = text.to_owned(),
            _ => {}
        }
    });
    walked.map_or_else(ErrorBody::default, |()| error)
}

/// The objects of a page of ListObjectsV2. `None` when it is no such document.
pub fn parse_listing(xml: &[u8]) -> Option<Vec<ListedObject>> {
    let mut seen = false;
    let mut keys = Vec::new();
    let mut sizes = Vec::new();
    walk(xml, |path, text| {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        seen |= names[0] == "ListBucketResult";
        match names[1..] {
            ["Contents", "Key"] => keys.push(text.to_owned()),
            ["Contents", "Size"] => sizes.push(text.parse().unwrap_or(0)),
            _ => {}
        }
    })?;
    if !seen || keys.len() != sizes.len() {
        return None;
    }
    Some(keys.into_iter().zip(sizes).map(|(key, size)| ListedObject { key, size }).collect())
}

/// The id of a multipart upload that was begun.
pub fn parse_upload_id(xml: &[u8]) -> Option<String> {
    let mut id = None;
    walk(xml, |path, text| {
        if path.len() == 2 && path[0] == "InitiateMultipartUploadResult" && path[1] == "UploadId" {
            id = Some(text.to_owned());
        }
    })?;
    id
}

/// The body that completes a multipart upload: the ETag of each part, from number 1 on.
pub fn complete_multipart(etags: &[String]) -> String {
    let mut body = String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for (number, etag) in (1..).zip(etags) {
        let etag = quick_xml::escape::escape(etag.as_str());
        body.push_str(&format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"));
    }
    body.push_str("</CompleteMultipartUpload>");
    body
}

/// The answer to `complete_multipart`, which may say 200 and still be an error.
pub fn judge_completed(xml: &[u8]) -> Verdict {
    let mut completed = false;
    let walked = walk(xml, |path, _| completed |= path[0] == "CompleteMultipartUploadResult");
    match (walked, completed) {
        (Some(()), true) => Verdict::Ok,
        _ => match judge(Operation::Write, 200, &parse_error(xml)) {
            Verdict::Ok => Verdict::Transient,
            verdict => verdict,
        },
    }
}

/// Temporary credentials, and when they expire, in seconds since 1970.
#[derive(Debug, Clone)]
pub struct Temporary {
    pub credentials: Credentials,
    pub expires: u64,
}

/// The answer to AssumeRoleWithWebIdentity.
pub fn parse_assumed_role(xml: &[u8]) -> Option<Temporary> {
    let (mut id, mut secret, mut token, mut expires) = (None, None, None, None);
    walk(xml, |path, text| match path.last().map(String::as_str) {
        Some("AccessKeyId") => id = Some(text.into()),
        Some("SecretAccessKey") => secret = Some(Secret::new(text)),
        Some("SessionToken") => token = Some(Secret::new(text)),
        Some("Expiration") => expires = parse_rfc3339(text),
        _ => {}
    })?;
    let credentials = Credentials { access_key_id: id?, secret_access_key: secret?, session_token: Some(token?) };
    Some(Temporary { credentials, expires: expires? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each answer gets the verdict that its row in the table of reasons asks for. Method: one example a row.
    #[test]
    fn verdicts() {
        let code = |code: &str| ErrorBody { code: code.into(), ..ErrorBody::default() };
        let none = ErrorBody::default();
        use Operation::{Read, Write};
        for (operation, status, error, verdict) in [
            (Read, 200, &none, Verdict::Ok),
            (Read, 206, &none, Verdict::Ok),
            (Read, 404, &none, Verdict::Miss),
            (Write, 404, &code("NoSuchBucket"), Verdict::Permanent),
            (Read, 403, &code("AccessDenied"), Verdict::Denied),
            (Read, 403, &code("RequestTimeTooSkewed"), Verdict::Skewed),
            (Read, 400, &code("ExpiredToken"), Verdict::Expired),
            (Write, 400, &code("InvalidToken"), Verdict::Expired),
            (Write, 412, &code("PreconditionFailed"), Verdict::Exists),
            (Write, 304, &none, Verdict::Exists),
            (Write, 409, &code("ConditionalRequestConflict"), Verdict::Conflict),
            (Write, 501, &code("NotImplemented"), Verdict::NotImplemented),
            (Write, 429, &none, Verdict::Throttled),
            (Write, 503, &code("SlowDown"), Verdict::Throttled),
            (Read, 503, &code("ServiceUnavailable"), Verdict::Throttled),
            (Read, 400, &code("RequestTimeout"), Verdict::Transient),
            (Read, 500, &none, Verdict::Transient),
            (Read, 504, &none, Verdict::Transient),
            (Write, 522, &none, Verdict::Transient),
            (Read, 307, &none, Verdict::Permanent),
            (Read, 416, &code("InvalidRange"), Verdict::Permanent),
        ] {
            assert_eq!(judge(operation, status, error), verdict, "{operation:?} {status} {error:?}");
        }
        let moved = ErrorBody { region: "eu-west-1".into(), ..code("AuthorizationHeaderMalformed") };
        assert_eq!(judge(Read, 400, &moved), Verdict::Region("eu-west-1".into()));
        for region in ["a\r\nb", "\u{e9}", "a b", &"r".repeat(65)] {
            let moved = ErrorBody { region: region.into(), ..code("AuthorizationHeaderMalformed") };
            assert_eq!(judge(Read, 400, &moved), Verdict::Permanent, "{region}");
        }
    }

    /// Goal: both forms of `Retry-After` are waits, a date that has passed none at all, and nonsense says nothing. Method: examples
    /// of each, dates around a moment.
    #[test]
    fn retry_after() {
        let moment = 784_111_777;
        let wait = |value: &str| parse_retry_after(value, moment).map(|wait| wait.as_secs());
        assert_eq!((wait(" 7 "), wait("0"), wait("99999999999")), (Some(7), Some(0), Some(99_999_999_999)));
        assert_eq!(wait("Sun, 06 Nov 1994 08:49:37 GMT"), Some(0));
        assert_eq!(wait("Sun, 06 Nov 1994 08:50:00 GMT "), Some(23));
        assert_eq!(wait("Sun, 06 Nov 1994 08:49:36 GMT"), Some(0));
        assert_eq!(wait("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        for nonsense in
            ["", "soon", "-1", "1.5", "18446744073709551616", "Sun, 06 Nov 1994 08:50:00", "1994-11-06T08:50:00Z"]
        {
            assert_eq!(wait(nonsense), None, "{nonsense}");
        }
    }

    /// Goal: documents are read as S3 writes them. Method: one of each kind, with entities, namespaces and blanks.
    #[test]
    fn documents() {
        let error = parse_error(
            b"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>NoSuchKey</Code>\
              <Message>a &lt;b&gt; &#38; c</Message><Region>us-east-2</Region><Key>x</Key></Error>",
        );
        let expected = ErrorBody { code: "NoSuchKey".into(), message: "a <b> & c".into(), region: "us-east-2".into() };
        assert_eq!(error, expected);
        let listing = parse_listing(
            b"<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>\
              <IsTruncated>true</IsTruncated><NextContinuationToken>t/1=</NextContinuationToken>\
              <Contents><Key>ac/aa/x</Key><Size>12</Size><ETag>&quot;e&quot;</ETag></Contents>\n\
              <Contents><Size>0</Size><Key>y&amp;z</Key></Contents></ListBucketResult>",
        )
        .expect("a listing");
        assert_eq!(listing[0], ListedObject { key: "ac/aa/x".into(), size: 12 });
        assert_eq!(listing[1], ListedObject { key: "y&z".into(), size: 0 });
        let begun = b"<InitiateMultipartUploadResult><Bucket>b</Bucket><UploadId>id-1</UploadId>\
                      </InitiateMultipartUploadResult>";
        assert_eq!(parse_upload_id(begun).as_deref(), Some("id-1"));
        let body = complete_multipart(&["\"a\"".into(), "b".into()]);
        assert!(body.contains("<Part><PartNumber>1</PartNumber><ETag>&quot;a&quot;</ETag></Part>"), "{body}");
        assert!(body.ends_with("<Part><PartNumber>2</PartNumber><ETag>b</ETag></Part></CompleteMultipartUpload>"));
        let completed = b"<CompleteMultipartUploadResult><Key>k</Key></CompleteMultipartUploadResult>";
        assert_eq!(judge_completed(completed), Verdict::Ok);
        assert_eq!(judge_completed(b"<Error><Code>InternalError</Code></Error>"), Verdict::Transient);
        assert_eq!(judge_completed(b"<Error><Code>NoSuchUpload</Code></Error>"), Verdict::Transient);
        let role = parse_assumed_role(
            b"<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>id\
              </AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>\
              <Expiration>1994-11-06T08:49:37Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>\
              </AssumeRoleWithWebIdentityResponse>",
        )
        .expect("credentials");
        assert_eq!((role.expires, role.credentials.secret_access_key.is("s")), (784_111_777, true));
    }

    /// Goal: what is no document is no answer, and never a panic. Method: every prefix of a document, and junk.
    #[test]
    fn junk() {
        let whole = b"<Error><Code>A&amp;B</Code><Message>m</Message></Error>";
        for end in 0..whole.len() {
            assert_eq!(parse_error(&whole[..end]), ErrorBody::default(), "{end}");
        }
        let deep = "<a>".repeat(10_000);
        for junk in [&b"\xff\xfe"[..], b"<html><body>502</body></html>", b"</a>", b"<a>&#xd800;</a>", deep.as_bytes()] {
            assert_eq!(parse_error(junk), ErrorBody::default());
            assert_eq!(parse_listing(junk), None);
            assert_eq!(parse_upload_id(junk), None);
            assert!(parse_assumed_role(junk).is_none());
        }
    }
}
