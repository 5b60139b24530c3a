//! Counts what an HTTP/2 peer makes us send: answers to PING and SETTINGS, to tell when it does nothing else, and resets of
//! streams, which HTTP/2 remembers for a while.
//!
//! Why by what is sent: HTTP/2 does these by itself, and shows nobody what came.

use crate::limits;

/// Length of a frame's head. Source: RFC 9113, 4.1: a length of 24 bits, type, flags, a stream of 32 bits.
const HEAD_LEN: usize = 9;
/// Type and flags of the answers. Source: RFC 9113, 6.5 and 6.7.
const SETTINGS_ACK: [u8; 2] = [4, 1];
const PING_ACK: [u8; 2] = [6, 1];

/// The type of a reset. Source: RFC 9113, 6.4.
const RST_STREAM: u8 = 3;
/// How long resets that are counted together may lie apart, and so how much too long they are counted at most.
const RESETS_STEP_MS: u64 = limits::HTTP2_RESET_STREAM_KEEP_MS / 8;

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
    resets: Resets,
}

/// How many streams were reset in each of the last steps.
#[derive(Debug, Default)]
struct Resets {
    counts: [u32; 9],
    /// The step that counts now.
    step: u64,
    /// Since the beginning.
    all: u64,
}

impl Resets {
    fn now(&mut self, now_ms: u64) -> &mut u32 {
        let step = now_ms / RESETS_STEP_MS;
        let len = self.counts.len() as u64;
        (self.step + 1..=step).take(self.counts.len()).for_each(|gone| self.counts[(gone % len) as usize] = 0);
        self.step = self.step.max(step);
        &mut self.counts[(self.step % len) as usize]
    }
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

    /// Streams that were reset since the beginning.
    pub fn resets(&self) -> u64 {
        self.resets.all
    }

    /// Of these, what HTTP/2 may still remember; never fewer than it does.
    pub fn resets_remembered(&mut self, now_ms: u64) -> usize {
        self.resets.now(now_ms);
        let lately: u32 = self.resets.counts.iter().sum();
        (lately as usize).min(limits::HTTP2_RESET_STREAMS_MAX)
    }

    fn count(&mut self, kind: [u8; 2], now_ms: impl Fn() -> u64) {
        if kind != SETTINGS_ACK && kind != PING_ACK {
            if kind[0] == RST_STREAM {
                *self.resets.now(now_ms()) += 1;
                self.resets.all += 1;
            }
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

    /// Goal: no reset is forgotten before HTTP/2 forgets it, and it is not counted much longer. Method: resets at many
    /// distances, against a list of when each of them was; then more than HTTP/2 remembers.
    #[test]
    fn resets_are_counted_as_long_as_they_are_remembered() {
        let keep_ms = limits::HTTP2_RESET_STREAM_KEEP_MS;
        for distance_ms in [0, 1, 7, 400, 1250, 3000, keep_ms, 5 * keep_ms] {
            let mut answers = Answers::default();
            let mut times = Vec::new();
            for i in 0..100 {
                let now_ms = 5 + i * distance_ms;
                answers.pass(&frame(RST_STREAM, 0, 4), || now_ms);
                answers.pass(&frame(0, 0, 40), || panic!("other frames need no clock"));
                times.push(now_ms);
                let younger = |than_ms: u64| times.iter().filter(|&&time| time + than_ms >= now_ms).count();
                let counted = answers.resets_remembered(now_ms);
                assert!(
                    counted >= younger(keep_ms) && counted <= younger(keep_ms + RESETS_STEP_MS),
                    "{distance_ms}, {i}"
                );
            }
            assert_eq!(answers.resets(), 100);
            assert_eq!(answers.resets_remembered(5 + 100 * distance_ms + 2 * keep_ms), 0);
        }
        let mut answers = Answers::default();
        answers.pass(&frame(RST_STREAM, 0, 4).repeat(5000), || 7);
        assert_eq!((answers.resets(), answers.resets_remembered(8)), (5000, limits::HTTP2_RESET_STREAMS_MAX));
    }
}
