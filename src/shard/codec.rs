//! zstd: the form of blobs at rest and on the wire, with one context for each direction and core.
//!
//! Source: RFC 8878 (zstd); levels and thresholds from the figures of the storage study (A2).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use zstd_safe::{CCtx, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective};

use crate::budget::{Claim, Grant, Purse};
use crate::limits::{
    COMPRESS_LEN_MIN, DECODER_BASE_LEN, DECODER_POOLED_LEN_MAX, DECODER_WINDOW_LEN, DECODERS_POOLED_MAX, FRAME_LEN,
    PRESSURE_HEAVY_US, PRESSURE_LIGHT_US, ZSTD_WINDOW_LOG_MAX,
};
use crate::pure::memory_plan::Use;

/// How blobs are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageMode {
    /// Compressed where that pays.
    Zstd,
    /// As raw bytes, always.
    Uncompressed,
}

/// Why bytes could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeError {
    /// More bytes came out than declared.
    TooLong,
    /// Not zstd, with zstd's own reason.
    Bad(&'static str),
    /// The core's decoders hold all the memory they may.
    Memory { limit: u64 },
}

/// One core's zstd contexts. Clones share them.
#[derive(Clone)]
pub struct Codecs(Rc<Inner>);

struct Inner {
    mode: StorageMode,
    pressure: Pressure,
    /// Never borrowed across an await: every use is one call.
    encoder: RefCell<CCtx<'static>>,
    decoder: RefCell<DCtx<'static>>,
    /// Where `encoder` writes before the result's length is known.
    scratch: RefCell<Vec<u8>>,
    idle_decoders: RefCell<Vec<DCtx<'static>>>,
    purse: Purse,
}

impl Codecs {
    /// `purse` has the memory of streaming decoders.
    pub fn new(mode: StorageMode, purse: Purse) -> Self {
        Self(Rc::new(Inner {
            mode,
            pressure: Pressure::default(),
            encoder: RefCell::new(CCtx::create()),
            decoder: RefCell::new(DCtx::create()),
            scratch: RefCell::default(),
            idle_decoders: RefCell::default(),
            purse,
        }))
    }

    pub fn mode(&self) -> StorageMode {
        self.0.mode
    }

    /// The core's load, as compression sees it.
    pub fn pressure(&self) -> &Pressure {
        &self.0.pressure
    }

    /// True when `at_rest` would try a blob or frame of this many raw bytes.
    pub fn tries(&self, raw_len: usize) -> bool {
        self.0.mode == StorageMode::Zstd && raw_len >= COMPRESS_LEN_MIN && self.0.pressure.level(raw_len).is_some()
    }

    /// One zstd frame with its content size, if storing that saves at least a tenth; else `raw` is to be kept as it is.
    pub fn at_rest(&self, raw: &[u8]) -> Option<Vec<u8>> {
        if !self.tries(raw.len()) {
            return None;
        }
        // Why the smaller room: zstd gives up as soon as the saving is out of reach.
        self.compress(raw, self.0.pressure.level(raw.len())?, worth_it(raw.len()))
    }

    /// True when a client's body may be stored as it came: it is one frame that tells its content size, and it saves
    /// enough. The body must have been decoded to `raw_len` bytes before.
    pub fn keeps(&self, body: &[u8], raw_len: usize) -> bool {
        self.0.mode == StorageMode::Zstd
            && body.len() <= worth_it(raw_len)
            && zstd_safe::find_frame_compressed_size(body) == Ok(body.len())
            && zstd_safe::get_frame_content_size(body).is_ok_and(|size| size == Some(raw_len as u64))
    }

    /// A frame of `raw` for the wire: compressed if that makes it shorter, else raw blocks.
    pub fn frame_of(&self, raw: &[u8]) -> Vec<u8> {
        self.compress(raw, LEVEL_LOW, raw.len()).unwrap_or_else(|| wrap_raw(raw))
    }

    /// The content of `frames` (any number of frames), which must be exactly `raw_len` bytes.
    pub fn decode(&self, frames: &[u8], raw_len: usize) -> Result<Vec<u8>, DecodeError> {
        use zstd_safe::zstd_sys::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall;
        // Why not the Vec itself: its capacity may be more than was asked for, and is the decoder's only bound.
        let mut raw = vec![0; raw_len];
        match self.0.decoder.borrow_mut().decompress(&mut raw[..], frames) {
            Ok(len) => {
                raw.truncate(len);
                Ok(raw)
            }
            Err(code) if zstd_safe::is_error_kind(code, ZSTD_error_dstSize_tooSmall) => Err(DecodeError::TooLong),
            Err(code) => Err(DecodeError::Bad(zstd_safe::get_error_name(code))),
        }
    }

    /// A decoder for a stream of unknown framing whose content has `raw_len` bytes. `None` when there is no memory for it.
    pub fn stream_decoder(&self, raw_len: u64) -> Option<StreamDecoder> {
        let expected = DECODER_BASE_LEN as u64 + raw_len.min(DECODER_WINDOW_LEN);
        let grant = self.0.purse.grant(Use::Decoders, expected, Claim::First { held: 0 })?;
        let context = self.0.idle_decoders.borrow_mut().pop();
        Some(StreamDecoder { context, codecs: self.clone(), produced: 0, grant, in_frame: false, pending: false })
    }

    fn compress(&self, raw: &[u8], level: i32, room: usize) -> Option<Vec<u8>> {
        let mut scratch = self.0.scratch.borrow_mut();
        if scratch.len() < room {
            scratch.resize(room.max(FRAME_LEN), 0);
        }
        // An error can only mean that the frame does not fit the room.
        let len = self.0.encoder.borrow_mut().compress(&mut scratch[..room], raw, level).ok()?;
        Some(scratch[..len].to_vec())
    }
}

/// Decodes a stream of frames, whatever their number, sizes and claims: memory follows the window, which is bounded, and
/// the bytes that came out, never what a header says.
pub struct StreamDecoder {
    context: Option<DCtx<'static>>,
    codecs: Codecs,
    produced: usize,
    grant: Grant,
    in_frame: bool,
    /// The last call filled the output: zstd may hold more.
    pending: bool,
}

impl StreamDecoder {
    /// Decodes from the front of `input`, which it shortens, to the end of `out`, up to its capacity. When `out` is full
    /// afterwards there may be more to come, even from no input.
    pub fn decode(&mut self, input: &mut &[u8], out: &mut Vec<u8>) -> Result<(), DecodeError> {
        let context = match &mut self.context {
            Some(context) => context,
            empty => empty.insert(new_stream_context()?),
        };
        let before = out.len();
        while (!input.is_empty() || self.pending) && out.len() < out.capacity() {
            let mut source = InBuffer::around(input);
            let at = out.len();
            let mut target = OutBuffer::around_pos(out, at);
            let hint = context
                .decompress_stream(&mut target, &mut source)
                .map_err(|code| DecodeError::Bad(zstd_safe::get_error_name(code)))?;
            let read = source.pos();
            *input = &input[read..];
            self.in_frame = hint != 0;
            self.pending = self.in_frame && out.len() == out.capacity();
        }
        self.produced += out.len() - before;
        self.charge()
    }

    /// True between the first byte of a frame and its last.
    pub fn in_frame(&self) -> bool {
        self.in_frame
    }

    /// Counts what the context has touched beyond what was expected: at most its buffers, of which only as much as came
    /// out has been written.
    fn charge(&mut self) -> Result<(), DecodeError> {
        let held = self.context.as_ref().map_or(0, DCtx::sizeof).min(DECODER_BASE_LEN + self.produced) as u64;
        match held <= self.grant.len() || self.grant.resize(held) {
            true => Ok(()),
            false => Err(DecodeError::Memory { limit: self.codecs.0.purse.share(Use::Decoders) }),
        }
    }
}

impl Drop for StreamDecoder {
    fn drop(&mut self) {
        let Some(mut context) = self.context.take() else { return };
        let mut idle = self.codecs.0.idle_decoders.borrow_mut();
        if idle.len() < DECODERS_POOLED_MAX
            && context.sizeof() <= DECODER_POOLED_LEN_MAX
            && context.reset(ResetDirective::SessionOnly).is_ok()
        {
            idle.push(context);
        }
    }
}

/// How long work waits on this core before it runs: a decaying mean over the turns that were given up.
#[derive(Default)]
pub struct Pressure {
    delay_us: Cell<u32>,
}

impl Pressure {
    /// A task gave up its turn and came back after `delay`.
    pub fn observe(&self, delay: Duration) {
        let (mean, seen) = (self.delay_us.get(), delay.as_micros().min(10_000_000) as u32);
        self.delay_us.set(mean - mean / 8 + seen / 8);
    }

    /// Microseconds.
    pub fn delay_us(&self) -> u32 {
        self.delay_us.get()
    }

    /// The zstd level for a blob of this many raw bytes; `None` when the core has no time to compress.
    ///
    /// Why: level 1 costs 1.1 to 1.5 times level -1 on 4 KiB, but only 1.03 to 1.17 times on large blobs, and saves 9 to
    /// 15 % of their space.
    fn level(&self, raw_len: usize) -> Option<i32> {
        match self.delay_us.get() {
            PRESSURE_HEAVY_US.. => None,
            PRESSURE_LIGHT_US.. => Some(LEVEL_LOW),
            _ if raw_len < LEVEL_HIGH_FROM => Some(LEVEL_LOW),
            _ => Some(LEVEL_HIGH),
        }
    }
}

/// Whether the next frame of a large blob is worth a try: after n failures in a row 2^n - 1 frames are not tried.
#[derive(Default)]
pub struct Probe {
    failures: u32,
    skip: u32,
}

impl Probe {
    /// Asked once for each frame.
    pub fn is_due(&mut self) -> bool {
        let tries = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        tries
    }

    /// How a try ended.
    pub fn note(&mut self, saved: bool) {
        self.failures = if saved { 0 } else { (self.failures + 1).min(PROBE_FAILURES_MAX) };
        self.skip = (1 << self.failures) - 1;
    }
}

/// `raw` as a zstd frame of raw blocks. At most 4 GiB.
///
/// | bytes | content |
/// |---|---|
/// | 4 | magic 28 b5 2f fd |
/// | 1 | a0: single segment, content size in 4 bytes |
/// | 4 | content size, little-endian |
/// | 3 + n, repeated | little-endian `last + (0 << 1) + (n << 3)`, then n <= 128 KiB bytes as they are |
///
/// Source: RFC 8878, 3.1.1.
pub fn wrap_raw(raw: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(wrapped_len(raw.len()));
    frame.extend_from_slice(&[0x28, 0xb5, 0x2f, 0xfd, 0xa0]);
    frame.extend_from_slice(&(raw.len() as u32).to_le_bytes());
    let mut rest = raw;
    loop {
        let (block, after) = rest.split_at(rest.len().min(BLOCK_LEN_MAX));
        let header = (block.len() as u32) << 3 | u32::from(after.is_empty());
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.extend_from_slice(block);
        if after.is_empty() {
            return frame;
        }
        rest = after;
    }
}

/// Bytes of `wrap_raw`'s frame around `raw_len` bytes.
pub fn wrapped_len(raw_len: usize) -> usize {
    9 + raw_len + 3 * raw_len.div_ceil(BLOCK_LEN_MAX).max(1)
}

const LEVEL_LOW: i32 = -1;
const LEVEL_HIGH: i32 = 1;
/// Raw bytes from which `LEVEL_HIGH` is used.
const LEVEL_HIGH_FROM: usize = 64 << 10;
/// RFC 8878: the largest block.
const BLOCK_LEN_MAX: usize = 128 << 10;
/// At most 2^5 - 1 frames (8 MiB) pass without a try.
const PROBE_FAILURES_MAX: u32 = 5;

/// The longest form at rest that is worth decoding at each read.
fn worth_it(raw_len: usize) -> usize {
    raw_len - raw_len.div_ceil(10)
}

fn new_stream_context() -> Result<DCtx<'static>, DecodeError> {
    let mut context = DCtx::try_create().ok_or(DecodeError::Bad("no memory for a decoder"))?;
    let bounded = context.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX));
    bounded.map_err(|code| DecodeError::Bad(zstd_safe::get_error_name(code)))?;
    Ok(context)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zstd_safe::{CParameter, zstd_sys::ZSTD_EndDirective};

    use super::*;

    fn codecs() -> Codecs {
        Codecs::new(StorageMode::Zstd, Purse::alone(1 << 30))
    }

    /// Bytes from a small alphabet: they compress, but not to nothing.
    fn text() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(0u8..12, 0..40_000)
    }

    /// As Bazel sends it: one frame, no content size, flushed every 491 bytes.
    fn flushed_frame(raw: &[u8]) -> Vec<u8> {
        let mut context = CCtx::create();
        context.set_parameter(CParameter::CompressionLevel(3)).expect("a valid level");
        let mut frame = vec![0; 2 * raw.len() + 1000];
        let mut out = OutBuffer::around(&mut frame[..]);
        for piece in raw.chunks(491) {
            let mut input = InBuffer::around(piece);
            context.compress_stream2(&mut out, &mut input, ZSTD_EndDirective::ZSTD_e_flush).expect("room");
        }
        context.compress_stream2(&mut out, &mut InBuffer::around(&[]), ZSTD_EndDirective::ZSTD_e_end).expect("room");
        let len = out.pos();
        frame.truncate(len);
        frame
    }

    /// Decodes `stream`, cut at `cuts`, into outputs of `room` bytes; at most `most` bytes.
    fn decode_stream(
        codecs: &Codecs,
        stream: &[u8],
        cut: usize,
        room: usize,
        most: usize,
    ) -> Result<Vec<u8>, DecodeError> {
        let mut decoder = codecs.stream_decoder(most as u64).expect("memory");
        let mut all = Vec::new();
        for mut piece in stream.chunks(cut) {
            loop {
                let mut out = Vec::with_capacity(room);
                decoder.decode(&mut piece, &mut out)?;
                assert!(out.len() <= out.capacity());
                all.extend_from_slice(&out);
                if all.len() > most {
                    return Err(DecodeError::TooLong);
                }
                if piece.is_empty() && out.len() < out.capacity() {
                    break;
                }
            }
        }
        if decoder.in_frame() { Err(DecodeError::Bad("cut")) } else { Ok(all) }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Goal: every form of a content decodes to it, in one go and as a stream cut anywhere, frames in a row included.
        /// Method: random contents, cuts and output sizes.
        #[test]
        fn every_form_decodes(a in text(), b in text(), cut in 1usize..5000, room in 1usize..70_000) {
            let codecs = codecs();
            let room = room.max(a.len() / 50 + 1);
            let cut = cut.max(a.len() / 100 + 1);
            for frame in [codecs.frame_of(&a), wrap_raw(&a), flushed_frame(&a)] {
                prop_assert_eq!(codecs.decode(&frame, a.len()), Ok(a.clone()));
                let both = [&frame[..], &wrap_raw(&b)].concat();
                let expected = [&a[..], &b].concat();
                prop_assert_eq!(decode_stream(&codecs, &both, cut, room, expected.len()), Ok(expected));
            }
            if let Some(frame) = codecs.at_rest(&a) {
                prop_assert!(frame.len() <= worth_it(a.len()));
                prop_assert!(codecs.keeps(&frame, a.len()));
                prop_assert_eq!(codecs.decode(&frame, a.len()), Ok(a));
            }
        }

        /// Goal: garbage ends in an error or in bytes within the bound, never in a panic. Method: random bytes, alone and
        /// behind a valid frame header, and valid frames with one byte changed.
        #[test]
        fn garbage_is_survived(
            garbage in proptest::collection::vec(any::<u8>(), 0..3000),
            raw in text(),
            at in any::<proptest::sample::Index>(),
            flip in 1u8..,
        ) {
            let codecs = codecs();
            let mut headed = vec![0x28, 0xb5, 0x2f, 0xfd];
            headed.extend_from_slice(&garbage);
            let mut flipped = codecs.frame_of(&raw);
            let position = at.index(flipped.len());
            flipped[position] ^= flip;
            for input in [&garbage, &headed, &flipped] {
                if let Ok(decoded) = codecs.decode(input, 10_000) {
                    prop_assert!(decoded.len() <= 10_000);
                }
                let _ = decode_stream(&codecs, input, 700, 5000, 100_000);
                codecs.keeps(input, 10_000);
            }
        }
    }

    /// Goal: the largest blocks and their borders are right. Method: lengths around 128 KiB and its double.
    #[test]
    fn raw_blocks_have_their_borders_right() {
        for len in [0, 1, BLOCK_LEN_MAX - 1, BLOCK_LEN_MAX, BLOCK_LEN_MAX + 1, 2 * BLOCK_LEN_MAX, FRAME_LEN + 1] {
            let raw: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
            let frame = wrap_raw(&raw);
            assert_eq!(frame.len(), frame.capacity());
            assert_eq!(zstd_safe::get_frame_content_size(&frame).ok().flatten(), Some(len as u64));
            assert_eq!(codecs().decode(&frame, len), Ok(raw));
        }
    }

    /// Goal: Bazel's frames are not kept as they came. Method: `keeps` on each kind.
    #[test]
    fn only_a_good_frame_is_kept() {
        let raw = vec![7; 10_000];
        let codecs = codecs();
        let good = codecs.frame_of(&raw);
        assert!(codecs.keeps(&good, raw.len()));
        assert!(!codecs.keeps(&good, raw.len() + 1));
        assert!(!codecs.keeps(&flushed_frame(&raw), raw.len()));
        assert!(!codecs.keeps(&[&good[..], &good].concat(), 2 * raw.len()));
        assert!(!codecs.keeps(&wrap_raw(&raw), raw.len()));
        assert!(!Codecs::new(StorageMode::Uncompressed, Purse::alone(0)).keeps(&good, raw.len()));
    }

    /// Goal: decoders cost what the limit says: no window above it, no more memory than the budget, and what is given back
    /// can be used again. Method: a frame that claims 128 MiB; a small budget; the pool.
    #[test]
    fn decoders_are_bounded() {
        // Window descriptor 0x88: 2^(10 + 17) bytes; no content size.
        let greedy = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x88, 0x09, 0x00, 0x00, 0x00];
        assert!(matches!(decode_stream(&codecs(), &greedy, 100, 100, 100), Err(DecodeError::Bad(_))));

        let raw: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(n) >> 9) as u8).collect();
        let frame = flushed_frame(&raw);
        // 3 of 16 parts are 1 MiB.
        let purse = Purse::alone((16 << 20) / 3 + 16);
        let codecs = Codecs::new(StorageMode::Zstd, purse.clone());
        let first = codecs.stream_decoder(1).expect("there is memory");
        assert!(codecs.stream_decoder(raw.len() as u64).is_none(), "none is begun that has no room");
        let mut second = codecs.stream_decoder(1).expect("there is memory");
        let (mut input, mut out) = (&frame[..], Vec::with_capacity(raw.len()));
        let refused = second.decode(&mut input, &mut out).expect_err("it wants a window of 2 MiB");
        assert!(matches!(refused, DecodeError::Memory { limit } if limit >> 20 == 1));
        drop((first, second));
        assert_eq!(purse.held(Use::Decoders), 0);
        assert_eq!(decode_stream(&codecs, &frame, 10_000, 100_000, raw.len()), Ok(raw.clone()), "alone it may");
        assert_eq!(decode_stream(&codecs, &frame[..100], 10_000, 100_000, raw.len()), Err(DecodeError::Bad("cut")));
        let codecs = self::codecs();
        let decoders: Vec<_> = (0..2 * DECODERS_POOLED_MAX)
            .map(|_| {
                let mut decoder = codecs.stream_decoder(1).expect("memory");
                decoder.decode(&mut &wrap_raw(b"x")[..], &mut Vec::with_capacity(10)).expect("valid");
                decoder
            })
            .collect();
        drop(decoders);
        assert!(codecs.0.idle_decoders.borrow().len() <= DECODERS_POOLED_MAX);
        assert_eq!(codecs.0.purse.held(Use::Decoders), 0);
        assert_eq!(decode_stream(&codecs, &wrap_raw(b"again"), 3, 3, 5), Ok(b"again".to_vec()));
    }

    /// Goal: content that does not compress costs few tries, and content that begins to is noticed. Method: count tries.
    #[test]
    fn probing_backs_off_and_returns() {
        let mut probe = Probe::default();
        let tries = (0..1000)
            .filter(|_| {
                probe.is_due() && {
                    probe.note(false);
                    true
                }
            })
            .count();
        assert!((20..60).contains(&tries), "{tries} tries of 1000");
        let waited = (0..100).position(|_| probe.is_due()).expect("a try comes");
        assert!(waited < 32);
        probe.note(true);
        assert!((0..100).all(|_| {
            let is_due = probe.is_due();
            probe.note(true);
            is_due
        }));
    }

    /// Goal: compression gives way to load and comes back. Method: delays, and the level for both sizes.
    #[test]
    fn compression_gives_way() {
        let pressure = Pressure::default();
        let levels = |pressure: &Pressure| (pressure.level(4096), pressure.level(FRAME_LEN));
        assert_eq!(levels(&pressure), (Some(-1), Some(1)));
        (0..100).for_each(|_| pressure.observe(Duration::from_millis(10)));
        assert_eq!(levels(&pressure), (Some(-1), Some(-1)));
        (0..100).for_each(|_| pressure.observe(Duration::from_millis(50)));
        assert_eq!(levels(&pressure), (None, None));
        (0..100).for_each(|_| pressure.observe(Duration::from_micros(50)));
        assert_eq!(levels(&pressure), (Some(-1), Some(1)));
    }
}
