//! Tests of what is gathered and read.

use super::super::payload::Payload;
use super::*;

/// A socket that takes at most `take` bytes at a time, none when it is 0. It counts the calls, and knows where the
/// bytes lay that it took.
struct Socket {
    take: usize,
    calls: usize,
    flushes: usize,
    is_shut: bool,
    got: Vec<u8>,
    places: Vec<*const u8>,
}

impl Socket {
    fn new(take: usize) -> Self {
        Self { take, calls: 0, flushes: 0, is_shut: false, got: Vec::new(), places: Vec::new() }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(data)])
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut left = self.take;
        if left == 0 {
            return Poll::Pending;
        }
        self.calls += 1;
        for slice in data {
            let count = slice.len().min(left);
            self.places.push(slice.as_ptr());
            self.got.extend_from_slice(&slice[..count]);
            left -= count;
        }
        Poll::Ready(Ok(self.take - left))
    }
    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.flushes += 1;
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut = true;
        Poll::Ready(Ok(()))
    }
}

fn gathered(take: usize, shown: &Shown) -> Gathered<Socket> {
    Gathered::new(Socket::new(take), Buffers::default(), shown.clone(), Purse::alone(1 << 20))
}

fn holds_nothing(io: &Gathered<Socket>) -> bool {
    let state = io.0.borrow();
    state.len == 0 && state.parts.is_empty() && state.copied.capacity() == 0
}

fn bytes_of(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + len) as u8).collect()
}

/// Goal: bytes keep their order and none is lost, whatever the socket takes, and small writes become one. Method:
/// writes of growing size over sockets that take 1000 bytes, or everything, at a time.
#[test]
fn keeps_the_order() {
    let mut context = Context::from_waker(std::task::Waker::noop());
    for take in [1000, usize::MAX] {
        let mut io = gathered(take, &Shown::default());
        let mut expected = Vec::new();
        for len in [1, 5, 4000, 70_000, 10, 60_000, 6000, 200_000, 1] {
            let piece = bytes_of(len);
            expected.extend_from_slice(&piece);
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let (one, two) = rest.split_at(rest.len() / 2);
                let slices = [IoSlice::new(one), IoSlice::new(two)];
                let Poll::Ready(Ok(count)) = Pin::new(&mut io).poll_write_vectored(&mut context, &slices) else {
                    panic!("the socket takes bytes")
                };
                rest = &rest[count..];
            }
        }
        assert!(io.poll_send(&mut context).is_ready());
        assert_eq!(io.0.borrow().io.got, expected);
        assert!(holds_nothing(&io));
    }
    let io = gathered(usize::MAX, &Shown::default());
    for _ in 0..100 {
        assert!(Pin::new(&mut io.clone()).poll_write(&mut context, &[7; 100]).is_ready());
    }
    assert!(io.poll_send(&mut context).is_ready());
    assert_eq!(io.0.borrow().io.calls, 1);
    io.0.borrow_mut().io.take = 0;
    assert!(Pin::new(&mut io.clone()).poll_write(&mut context, b"kept").is_ready());
    assert!(io.poll_send(&mut context).is_pending());
    assert_eq!(io.0.borrow().copied, b"kept");
}

/// Goal: what is copied is charged before it is held, and without memory for it there is less of it; all goes out in order
/// in the end. Method: a socket that takes nothing, then everything, with a purse that has memory for one and with one that
/// has not; small writes until no more are taken.
#[test]
fn what_is_copied_is_charged() {
    let mut context = Context::from_waker(std::task::Waker::noop());
    let full = limits::WRITE_COPIED_LEN;
    for (peers, most, charge) in [(1 << 20, full, full as u64), (1000, limits::WRITE_COPIED_LEN_MIN, 0)] {
        let purse = Purse::alone(peers);
        let io = Gathered::new(Socket::new(0), Buffers::default(), Shown::default(), purse.clone());
        let piece = bytes_of(1000);
        let mut expected = Vec::new();
        while let Poll::Ready(Ok(count)) = Pin::new(&mut io.clone()).poll_write(&mut context, &piece) {
            expected.extend_from_slice(&piece[..count]);
            assert_eq!(purse.apart(), charge);
            assert!(io.0.borrow().copied.capacity() <= most.max(limits::WRITE_COPIED_LEN_MIN));
        }
        assert_eq!(expected.len(), most);
        assert!(io.poll_send(&mut context).is_pending());
        assert_eq!(purse.apart(), charge);
        io.0.borrow_mut().io.take = usize::MAX;
        assert!(io.poll_send(&mut context).is_ready());
        assert!(io.0.borrow().io.got == expected);
        assert!(holds_nothing(&io) && purse.apart() == 0);
    }
}

/// Goal: of the buffers that nobody uses a few are kept, empty, and those with little room are not. Method: more are given back
/// than that.
#[test]
fn spare_buffers_are_few_and_empty() {
    let buffers = Buffers::default();
    let full = || vec![7; limits::WRITE_COPIED_LEN];
    buffers.give_back(vec![7; limits::WRITE_COPIED_LEN_MIN]);
    assert!(buffers.0.borrow().is_empty());
    (0..=limits::WRITE_BUFFERS_SPARE_MAX).for_each(|_| buffers.give_back(full()));
    assert_eq!(buffers.0.borrow().len(), limits::WRITE_BUFFERS_SPARE_MAX);
    assert!(buffers.take().is_empty());
    assert_eq!(buffers.0.borrow().len(), limits::WRITE_BUFFERS_SPARE_MAX - 1);
}

/// Goal: what waits for a socket that takes nothing is bounded, in bytes and in parts, whether it is copied or not, and all of it
/// goes out in the end. Method: messages of one large piece each, of several lengths, every other one behind a byte.
#[test]
fn what_waits_is_bounded() {
    let mut context = Context::from_waker(std::task::Waker::noop());
    for (len, most) in [(limits::WRITE_COPY_LEN_MAX, 16), (5000, 210), (100_000, 11)] {
        let shown = Shown::default();
        let mut io = gathered(0, &shown);
        let (piece, mut expected) = (Bytes::from(bytes_of(len)), Vec::new());
        let taken = (0..1000).take_while(|number| {
            let mut payload = Payload::message(vec![piece.clone()], Rooms::default(), shown.clone());
            payload.advance(crate::pure::grpc_frame::PREFIX_LEN - number % 2);
            let mut slices = [IoSlice::new(&[]); 2];
            let slices_count = payload.chunks_vectored(&mut slices);
            let written = Pin::new(&mut io).poll_write_vectored(&mut context, &slices[..slices_count]);
            let Poll::Ready(Ok(count)) = written else { return false };
            expected.extend_from_slice(&payload.copy_to_bytes(count));
            true
        });
        let taken = taken.count();
        let state = io.0.borrow();
        assert!(taken <= most && state.parts.len() <= limits::WRITE_PARTS_MAX, "{taken} of {len}");
        assert!(state.len < limits::WRITE_GATHER_LEN + len);
        drop(state);
        io.0.borrow_mut().io.take = usize::MAX;
        assert!(io.poll_send(&mut context).is_ready());
        assert!(io.0.borrow().io.got == expected);
    }
}

/// Goal: where there is no room for all of a copy, nothing behind it is taken before the rest of it. Method: room for one byte more,
/// and two of them before a large piece.
#[test]
fn nothing_overtakes_what_has_no_room() {
    let mut context = Context::from_waker(std::task::Waker::noop());
    let shown = Shown::default();
    let mut io = gathered(0, &shown);
    assert!(Pin::new(&mut io).poll_write(&mut context, &vec![7; limits::WRITE_COPIED_LEN - 1]).is_ready());
    let message = vec![Bytes::from(bytes_of(5000))];
    let mut payload = Payload::message(message, Rooms::default(), shown.clone());
    payload.advance(crate::pure::grpc_frame::PREFIX_LEN - 2);
    let mut slices = [IoSlice::new(&[]); 2];
    let count = payload.chunks_vectored(&mut slices);
    let written = Pin::new(&mut io).poll_write_vectored(&mut context, &slices[..count]);
    assert!(matches!(written, Poll::Ready(Ok(1))));
    assert_eq!((count, io.0.borrow().len), (2, limits::WRITE_COPIED_LEN));
}

/// Goal: what was gathered goes out before the end does, the socket is told to pass it on, and one that takes nothing more is an
/// error. Method: each with a few bytes.
#[test]
fn the_end() {
    let mut context = Context::from_waker(std::task::Waker::noop());
    let mut io = gathered(usize::MAX, &Shown::default());
    assert!(Pin::new(&mut io).poll_write(&mut context, b"last").is_ready());
    assert!(Pin::new(&mut io).poll_shutdown(&mut context).is_ready());
    let state = io.0.borrow();
    assert_eq!((&state.io.got[..], state.io.flushes, state.io.is_shut), (&b"last"[..], 1, true));
    let io = gathered(0, &Shown::default());
    let error = io.0.borrow_mut().sent(0).expect_err("it takes nothing");
    assert_eq!(error.kind(), io::ErrorKind::WriteZero);
}

/// Writes the next frame of at most 16 KiB as h2 does: a head, and behind it what the payload shows.
fn write_frame(io: &mut Gathered<Socket>, context: &mut Context<'_>, payload: &mut Payload) {
    let mut frame = (&b"nine byte"[..]).chain(payload.take(16 << 10));
    while frame.has_remaining() {
        let mut slices = [IoSlice::new(&[]); 8];
        let count = frame.chunks_vectored(&mut slices);
        let written = Pin::new(&mut *io).poll_write_vectored(context, &slices[..count]);
        let Poll::Ready(Ok(count)) = written else { panic!("the socket takes bytes") };
        frame.advance(count);
    }
}

/// Goal: the large pieces of messages go to the socket from where they are, in order between what is copied, and
/// are let go of when they are sent. Method: messages of large and small pieces, over sockets that take a few bytes
/// at a time, or everything.
#[test]
fn sends_messages_from_where_they_are() {
    let mut context = Context::from_waker(std::task::Waker::noop());
    for take in [777, 100_000, usize::MAX] {
        let shown = Shown::default();
        let mut io = gathered(take, &shown);
        let pieces = [50_000, 10, 100_000, 600].map(|len| Bytes::from(bytes_of(len)));
        let mut expected = Vec::new();
        for _ in 0..3 {
            let message = || Payload::message(pieces.to_vec(), Rooms::default(), shown.clone());
            let mut whole = message();
            for frame in whole.copy_to_bytes(whole.remaining()).chunks(16 << 10) {
                expected.extend_from_slice(b"nine byte");
                expected.extend_from_slice(frame);
            }
            let mut payload = message();
            while payload.has_remaining() {
                write_frame(&mut io, &mut context, &mut payload);
            }
        }
        assert!(io.poll_send(&mut context).is_ready());
        assert!(holds_nothing(&io) && shown.take().is_none());
        let state = io.0.borrow();
        assert_eq!(state.io.got, expected);
        let from_pieces =
            state.io.places.iter().filter(|place| pieces.iter().any(|p| p.as_ptr_range().contains(place)));
        assert!(from_pieces.count() >= 3 * 150_000 / (16 << 10));
        assert!(pieces.iter().all(Bytes::is_unique));
    }
}

/// A socket that brings `data`, at most `step` bytes at a time, and takes nothing.
struct Source {
    data: Bytes,
    step: usize,
}

impl AsyncRead for Source {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let count = self.step.min(self.data.len()).min(buf.remaining());
        buf.put_slice(&self.data.split_to(count));
        if count == 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}

impl AsyncWrite for Source {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Pending
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

/// A frame, and what an HTTP/2 client sends first.
fn frame_of(kind: u8, payload: usize) -> Vec<u8> {
    [&(payload as u32).to_be_bytes()[1..], &[kind, 4, 0, 0, 0, 1], &vec![7; payload][..]].concat()
}
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What one turn brings, with a buffer of 8 KiB as HTTP/2 has it.
fn read_turn(io: &mut Gathered<Source>, rows: usize) -> Vec<u8> {
    let mut context = Context::from_waker(std::task::Waker::noop());
    io.begin_turn(rows, false);
    let mut all = Vec::new();
    loop {
        let mut buf = [0; 8 << 10];
        let mut buf = ReadBuf::new(&mut buf);
        match Pin::new(&mut *io).poll_read(&mut context, &mut buf) {
            Poll::Ready(read) => read.expect("bytes come"),
            Poll::Pending => return all,
        }
        assert!(!buf.filled().is_empty());
        all.extend_from_slice(buf.filled());
    }
}

/// Goal: a turn brings no more frames, and no more bytes beside them, than it may, says when there is more, and nothing is lost or
/// overtaken. Method: many short DATA frames, few with much between them, and long ones, read in steps of several lengths, with
/// memory for larger turns and without.
#[test]
fn reads_a_turn_at_a_time() {
    let short = frame_of(0, 1).repeat(3000);
    let sparse = [frame_of(0, 1), frame_of(0xee, 3000)].concat().repeat(40);
    let long = frame_of(0, 16 << 10).repeat(20);
    let rows = limits::HTTP2_ROWS_FIRST;
    for (what, sent, memory, frames_max, len_max) in [
        ("short", &short, 0, rows, 200),
        ("sparse", &sparse, 0, rows, limits::HTTP2_TURN_LEN + (8 << 10)),
        ("long", &long, 1 << 20, limits::HTTP2_TURN_FRAMES, 100 << 10),
    ] {
        for step in [1, 1000, 1 << 20] {
            let purse = Purse::alone(memory);
            let source = Source { data: [PREFACE, sent].concat().into(), step };
            let mut io = Gathered::new(source, Buffers::default(), Shown::default(), purse);
            let (mut all, mut seen) = (Vec::new(), PartialFrame::default());
            loop {
                let read = read_turn(&mut io, rows);
                let mut turn = Turn::default();
                seen.pass(&read, &mut turn, &Most { frames: usize::MAX, blocks: usize::MAX, len: usize::MAX });
                assert!(turn.frames() <= frames_max && read.len() <= len_max, "{what}: {} in {turn:?}", read.len());
                all.extend(read);
                if !io.is_cut() {
                    break;
                }
            }
            assert!(all[..] == [PREFACE, sent].concat()[..], "{what}: {} in steps of {step}", all.len());
        }
    }
}

/// Goal: who is held up is not read, and then goes on where it was. Method: a turn in between.
#[test]
fn who_is_held_up_is_not_read() {
    let sent = [PREFACE, &frame_of(0, 1).repeat(40)].concat();
    let source = Source { data: sent.clone().into(), step: 1000 };
    let mut io = Gathered::new(source, Buffers::default(), Shown::default(), Purse::alone(0));
    let mut all = read_turn(&mut io, 16);
    assert!(io.is_cut() && !io.hold_up(true));
    assert!(read_turn(&mut io, 16).is_empty() && !io.is_cut());
    assert!(io.hold_up(false));
    while all.len() < sent.len() {
        let read = read_turn(&mut io, 16);
        assert!(!read.is_empty());
        all.extend(read);
    }
    assert_eq!(all, sent);
}
