//! Counts the answers to PING and SETTINGS that an HTTP/2 peer makes us send, to tell when it does nothing else.
//!
//! Why by what is sent: HTTP/2 answers these by itself, and shows nobody what came.

use crate::limits;

/// Length of a frame's head. Source: RFC 9113, 4.1: a length of 24 bits, type, flags, a stream of 32 bits.
const HEAD_LEN: usize = 9;
/// Type and flags of the answers. Source: RFC 9113, 6.5 and 6.7.
const SETTINGS_ACK: [u8; 2] = [4, 1];
const PING_ACK: [u8; 2] = [6, 1];

/// What one connection has been answered.
#[derive(Debug, Default)]
pub struct Answers {
    head: [u8; HEAD_LEN],
    head_len: usize,
    /// Bytes of the running frame that are still to come.
    payload_left: usize,
    /// Answers with no other frame between them, and when the first of them was.
    count: u32,
    since_ms: u64,
    is_flood: bool,
}

impl Answers {
    /// The next bytes that are sent, cut anywhere. `now_ms` is asked for seldom.
    pub fn pass(&mut self, mut sent: &[u8], now_ms: impl Fn() -> u64) {
        while !sent.is_empty() {
            let of_payload = self.payload_left.min(sent.len());
            self.payload_left -= of_payload;
            sent = &sent[of_payload..];
            let of_head = (HEAD_LEN - self.head_len).min(sent.len());
            self.head[self.head_len..self.head_len + of_head].copy_from_slice(&sent[..of_head]);
            self.head_len += of_head;
            sent = &sent[of_head..];
            if self.head_len == HEAD_LEN {
                let [a, b, c, kind, flags, ..] = self.head;
                self.payload_left = u32::from_be_bytes([0, a, b, c]) as usize;
                self.head_len = 0;
                self.count([kind, flags], &now_ms);
            }
        }
    }

    /// The peer has sent too many, which hold no place for anything else.
    pub fn is_flood(&self) -> bool {
        self.is_flood
    }

    fn count(&mut self, kind: [u8; 2], now_ms: impl Fn() -> u64) {
        if kind != SETTINGS_ACK && kind != PING_ACK {
            self.count = 0;
            return;
        }
        if self.count == 0 {
            self.since_ms = now_ms();
        }
        self.count += 1;
        if self.count > limits::HTTP2_ANSWERS_MAX {
            self.is_flood |= now_ms().saturating_sub(self.since_ms) < limits::HTTP2_ANSWERS_PERIOD_MS;
            self.count = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, len: usize) -> Vec<u8> {
        let mut frame = (len as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, 0]);
        // Looks like the heads of answers.
        frame.extend([0, 0, 0, 6, 1].iter().cycle().take(len));
        frame
    }

    /// Goal: only many answers with nothing between them, in a short time, are a flood, however the bytes are cut. Method:
    /// streams of frames in pieces of several lengths, with a clock that goes on by a fixed step at each look.
    #[test]
    fn floods_are_told_from_pings() {
        let most = limits::HTTP2_ANSWERS_MAX as usize;
        let pings = |count: usize| frame(6, 1, 8).repeat(count);
        let settings = |count: usize| frame(4, 1, 0).repeat(count);
        let (fast, slow) = (1, limits::HTTP2_ANSWERS_PERIOD_MS);
        let other = [frame(0, 1, 20_000), frame(1, 4, 30), frame(8, 0, 4), frame(6, 0, 8), frame(4, 0, 12)];
        let mixed = other.iter().flat_map(|other| [pings(most), other.clone()].concat()).collect::<Vec<_>>();
        for (what, sent, step, is_flood) in [
            ("few", pings(most), fast, false),
            ("pings", pings(most + 1), fast, true),
            ("settings", settings(most + 1), fast, true),
            ("both", [pings(most / 2), settings(most)].concat(), fast, true),
            ("other frames between", mixed, fast, false),
            ("one now and then", pings(10 * most), slow, false),
        ] {
            for piece in [1, 7, 9, 16, 1000, usize::MAX] {
                let looks = std::cell::Cell::new(0);
                let now_ms = || step * looks.replace(looks.get() + 1);
                let mut answers = Answers::default();
                sent.chunks(piece.min(sent.len())).for_each(|piece| answers.pass(piece, now_ms));
                assert_eq!(answers.is_flood(), is_flood, "{what} in pieces of {piece}");
            }
        }
    }
}
