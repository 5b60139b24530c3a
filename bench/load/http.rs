//! One GET on a connection of its own, as a health checker or a scraper makes it.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::CallError;

/// The largest answer that is taken, in bytes.
const ANSWER_LEN_MAX: u64 = 16 << 20;

/// GETs `path` at `address` (host:port). `Ok` is the body of a 200.
pub async fn get(address: &str, path: &str) -> Result<String, CallError> {
    let failed = |error: std::io::Error| CallError::new("CONNECTION", format!("GET {path} of {address}: {error}"));
    let mut tcp = TcpStream::connect(address).await.map_err(failed)?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    tcp.write_all(request.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    tcp.take(ANSWER_LEN_MAX).read_to_end(&mut answer).await.map_err(failed)?;
    body(&answer).map_err(|text| CallError::new("HTTP", format!("GET {path}: {text}")))
}

/// The body of a whole answer: until the end, or in chunks.
fn body(answer: &[u8]) -> Result<String, String> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n").ok_or("no end of the header")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(status.to_owned());
    }
    let is_chunked = lines.any(|line| line.to_ascii_lowercase().replace(' ', "") == "transfer-encoding:chunked");
    if !is_chunked {
        return Ok(body.to_owned());
    }
    let (mut whole, mut rest) = (String::new(), body);
    loop {
        let (len, after) = rest.split_once("\r\n").ok_or("a chunk without a length")?;
        let len =
            usize::from_str_radix(len.split(';').next().unwrap_or_default().trim(), 16).map_err(|e| e.to_string())?;
        if len == 0 {
            return Ok(whole);
        }
        whole += after.get(..len).ok_or("a chunk that ends early")?;
        rest = after.get(len..).and_then(|rest| rest.strip_prefix("\r\n")).ok_or("a chunk without an end")?;
    }
}

/// The sum of all series of the gauge whose name ends with `suffix`, in Prometheus' text format; `None` without one.
pub fn gauge(metrics: &str, suffix: &str) -> Option<f64> {
    let values = metrics.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let name = series.split('{').next().unwrap_or_default();
        (!line.starts_with('#') && name.ends_with(suffix)).then(|| value.parse::<f64>().ok()).flatten()
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: answers are read as HTTP/1.1 frames them. Method: one of each kind, and broken ones.
    #[test]
    fn answers_are_read() {
        assert_eq!(body(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"), Ok("hi".to_owned()));
        let chunked =
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nA;x=y\r\n, all of y\r\n0\r\n\r\n";
        assert_eq!(body(chunked), Ok("hi, all of y".to_owned()));
        assert_eq!(body(b"HTTP/1.1 503 Busy\r\n\r\n"), Err("HTTP/1.1 503 Busy".to_owned()));
        for cut in 0..chunked.len() - 5 {
            assert!(body(&chunked[..cut]).is_err(), "{cut}");
        }
    }

    /// Goal: a gauge is found whatever its prefix and labels. Method: a page with lookalikes.
    #[test]
    fn gauges_are_found() {
        let page = "# HELP x_slots_inflight a\n# TYPE x_slots_inflight gauge\nx_slots_inflight{core=\"0\"} 3\n\
                    x_slots_inflight{core=\"1\"} 4\nx_slots_inflight_max 9\ny 1\n";
        assert_eq!(gauge(page, "slots_inflight"), Some(7.0));
        assert_eq!(gauge(page, "_inflight_min"), None);
        assert_eq!(gauge("z_slots_inflight 12\n", "slots_inflight"), Some(12.0));
    }
}
