//! The request bodies of one connection: takes what came of them out of HTTP/2, if their calls have not.
//!
//! Why: HTTP/2 keeps each DATA frame that nobody has read in a row of its own, and with it the whole buffer that it came in. Of
//! one byte each, or with little between much else, these take some hundred times what the window counts. Taken out, what is
//! short is copied, and takes what it says.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use h2::RecvStream;

use crate::limits;

/// The bodies of one connection. Clones are the same; core-local.
#[derive(Clone, Default)]
pub struct Bodies(Rc<Open>);

#[derive(Default)]
struct Open {
    inlets: RefCell<Inlets>,
    /// Bytes that were taken out and no call has read.
    unread: Cell<usize>,
    /// How many are open though their calls are over.
    left: Cell<usize>,
}

/// By the numbers of their streams, which grow.
#[derive(Default)]
struct Inlets(VecDeque<(u32, Rc<RefCell<Inlet>>)>);

impl Inlets {
    fn insert(&mut self, stream: u32, inlet: Rc<RefCell<Inlet>>) {
        debug_assert!(
            self.0.back().is_none_or(|(last, _)| *last < stream),
            "streams are accepted in the order of their numbers"
        );
        self.0.push_back((stream, inlet));
    }

    fn place(&self, stream: u32) -> Option<usize> {
        self.0.binary_search_by_key(&stream, |(number, _)| *number).ok()
    }

    fn get(&self, stream: u32) -> Option<Rc<RefCell<Inlet>>> {
        Some(self.0[self.place(stream)?].1.clone())
    }

    fn remove(&mut self, stream: u32) {
        self.place(stream).map(|place| self.0.remove(place));
    }
}

/// One body, for its call. Dropping it drops what has come, and ends the stream if more is to come: a short one that may yet end by
/// itself not before some more of its connection are over.
///
/// Why: who is refused has mostly sent all. A stream that is ended before it is over is remembered for some time, and is an error when
/// more of it comes after that.
pub struct Inbound {
    bodies: Bodies,
    stream: u32,
    inlet: Rc<RefCell<Inlet>>,
}

struct Inlet {
    stream: RecvStream,
    is_short: bool,
    /// Bytes that may still come, now that its call is over.
    left: Option<usize>,
    /// What was taken out, in order: chunks as they came, and behind them what was copied.
    chunks: VecDeque<Bytes>,
    copied: Vec<u8>,
    /// Behind that stands the end, or an error.
    is_whole: bool,
    /// Who waits for more.
    waker: Waker,
}

impl Bodies {
    /// `is_short`: little is to be expected.
    pub fn open(&self, stream: RecvStream, is_short: bool) -> Inbound {
        let number = stream.stream_id().as_u32();
        let inlet = Inlet {
            stream,
            is_short,
            left: None,
            chunks: VecDeque::new(),
            copied: Vec::new(),
            is_whole: false,
            waker: Waker::noop().clone(),
        };
        let inlet = Rc::new(RefCell::new(inlet));
        self.0.inlets.borrow_mut().insert(number, inlet.clone());
        Inbound { bodies: self.clone(), stream: number, inlet }
    }

    /// Takes out what has come for that stream.
    pub fn take_out(&self, stream: u32) {
        let Open { inlets, unread, left } = &*self.0;
        let Some(inlet) = inlets.borrow().get(stream) else { return };
        let inlet = &mut *inlet.borrow_mut();
        if inlet.left.is_none() {
            let held = inlet.held();
            inlet.take_out();
            unread.set(unread.get() + inlet.held() - held);
        } else if inlet.drop_data() {
            inlets.borrow_mut().remove(stream);
            left.set(left.get() - 1);
        }
    }

    /// Ends the streams of those that are open though their calls are over, but for the last `most` of them.
    pub fn end_left(&self, most: usize) {
        let Open { inlets, left, .. } = &*self.0;
        let over = left.get().saturating_sub(most);
        if over > 0 {
            left.set(left.get() - over);
            let mut oldest = over;
            inlets.borrow_mut().0.retain(|(_, inlet)| {
                let ends = oldest > 0 && inlet.borrow().left.is_some();
                oldest -= usize::from(ends);
                !ends
            });
        }
    }

    /// Bytes that were taken out and no call has read.
    pub fn unread(&self) -> usize {
        self.0.unread.get()
    }
}

impl Inbound {
    /// The next bytes; `None` at the end.
    pub fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let inlet = &mut *self.inlet.borrow_mut();
        let held = inlet.held();
        if held > 0 {
            let chunk = inlet.next();
            let unread = &self.bodies.0.unread;
            unread.set(unread.get() + inlet.held() - held);
            return Poll::Ready(Some(Ok(chunk)));
        }
        // An end, or an error, that stood behind what was taken out is told again.
        let data = inlet.stream.poll_data(context);
        if data.is_pending() {
            inlet.waker.clone_from(context.waker());
        }
        data
    }

    /// Lets the client send so many bytes more.
    pub fn release(&mut self, len: usize) {
        // An error means that the stream is over, and its credit with it.
        let _ = self.inlet.borrow_mut().stream.flow_control().release_capacity(len);
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        let Open { inlets, unread, left } = &*self.bodies.0;
        {
            let inlet = &mut *self.inlet.borrow_mut();
            unread.set(unread.get() - inlet.held());
            (inlet.chunks, inlet.copied) = (VecDeque::new(), Vec::new());
            inlet.left = Some(limits::SMALL_MESSAGE_LEN);
            if !inlet.is_short || inlet.is_whole || inlet.drop_data() {
                return inlets.borrow_mut().remove(self.stream);
            }
        }
        left.set(left.get() + 1);
        self.bodies.end_left(limits::HTTP2_BODIES_LEFT_MAX);
    }
}

impl Inlet {
    fn take_out(&mut self) {
        let waker = self.waker.clone();
        let mut context = Context::from_waker(&waker);
        while !self.is_whole {
            match self.stream.poll_data(&mut context) {
                Poll::Ready(Some(Ok(chunk))) => self.keep(chunk),
                Poll::Ready(Some(Err(_)) | None) => self.is_whole = true,
                Poll::Pending => return,
            }
        }
    }

    /// Drops what has come and gives its credit back. True when nothing more is to come, or too much came.
    fn drop_data(&mut self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        loop {
            let flow = self.stream.flow_control();
            // An error means that the stream is over, and its credit with it.
            let _ = flow.release_capacity(flow.used_capacity());
            match self.stream.poll_data(&mut context) {
                Poll::Ready(Some(Ok(chunk))) => match self.left.unwrap_or_default().checked_sub(chunk.len()) {
                    Some(left) => self.left = Some(left),
                    None => return true,
                },
                Poll::Ready(Some(Err(_)) | None) => return true,
                Poll::Pending => return false,
            }
        }
    }

    fn keep(&mut self, chunk: Bytes) {
        if chunk.len() < limits::BODY_COPY_LEN_MAX {
            self.copied.extend_from_slice(&chunk);
            return;
        }
        if !self.copied.is_empty() {
            self.chunks.push_back(std::mem::take(&mut self.copied).into());
        }
        self.chunks.push_back(chunk);
    }

    /// What is first of what was taken out.
    fn next(&mut self) -> Bytes {
        self.chunks.pop_front().unwrap_or_else(|| std::mem::take(&mut self.copied).into())
    }

    /// Bytes that it takes.
    fn held(&self) -> usize {
        self.chunks.iter().map(Bytes::len).sum::<usize>() + self.copied.capacity()
    }
}
