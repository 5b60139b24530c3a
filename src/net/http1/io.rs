//! A transport as hyper wants it, and a watch over what moves on it.

use std::cell::{Cell, Ref, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hyper::rt::ReadBufCursor;
use tokio::io::ReadBuf;

use super::super::transport::Carrier;
use super::waiting::Waiting;
use crate::limits::HTTP_BUFFER_LEN;

/// What a connection is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stage {
    /// Nothing of a request has come.
    #[default]
    Idle,
    /// A request's head has begun.
    Head,
    /// A request is being read or answered.
    Request,
}

/// Where a connection stands.
pub struct Watch {
    stage: Cell<Stage>,
    /// Stages so far: tells one apart from the next of the same kind.
    number: Cell<u64>,
    /// A byte has moved since somebody looked.
    moved: Cell<bool>,
    /// The body of the request has come to its end.
    received: Cell<bool>,
    /// What has come of the request has been acknowledged, to have the rest.
    acknowledged: Cell<bool>,
    /// Requests that have not ended: two, for a moment, when one drains behind its answer.
    requests: Cell<u32>,
    /// How the client takes its answers.
    taking: RefCell<Waiting>,
}

/// A request that is being read or answered. Dropping it ends that.
pub struct InRequest(Rc<Watch>);

impl Watch {
    pub fn new(taking: Waiting) -> Self {
        Self {
            stage: Cell::default(),
            number: Cell::default(),
            moved: Cell::default(),
            received: Cell::default(),
            acknowledged: Cell::default(),
            requests: Cell::default(),
            taking: RefCell::new(taking),
        }
    }

    /// A request's head is complete.
    pub fn request(this: &Rc<Self>) -> InRequest {
        this.requests.set(this.requests.get() + 1);
        this.received.set(false);
        this.acknowledged.set(false);
        this.enter(Stage::Request);
        InRequest(this.clone())
    }

    /// The stage and its number.
    pub fn now(&self) -> (u64, Stage) {
        (self.number.get(), self.stage.get())
    }

    /// Whether a byte has moved since the last call.
    pub fn take_moved(&self) -> bool {
        self.moved.replace(false)
    }

    /// How the client takes its answers.
    pub fn taking(&self) -> Ref<'_, Waiting> {
        self.taking.borrow()
    }

    /// Whether the request has come in as a whole.
    pub fn is_received(&self) -> bool {
        self.received.get()
    }

    /// True the first time that a request waits for its body.
    fn take_first_wait(&self) -> bool {
        self.stage.get() == Stage::Request && !self.received.get() && !self.acknowledged.replace(true)
    }

    fn enter(&self, stage: Stage) {
        self.stage.set(stage);
        self.number.set(self.number.get() + 1);
    }
}

impl InRequest {
    /// It is being worked on: the connection does not stand still, though nothing moves on it.
    pub fn goes_on(&self) {
        self.0.moved.set(true);
    }

    /// Its body has come to its end.
    pub fn received(&self) {
        self.0.received.set(true);
    }
}

impl Drop for InRequest {
    fn drop(&mut self) {
        self.0.requests.set(self.0.requests.get() - 1);
        if self.0.requests.get() == 0 {
            self.0.enter(Stage::Idle);
        }
    }
}

/// A tokio transport for hyper.
pub struct Io<T> {
    io: T,
    watch: Rc<Watch>,
    /// The last read brought nothing.
    is_dry: bool,
}

thread_local! {
    /// What one read brings, on its way into hyper's buffer.
    ///
    /// Why a copy: hyper's buffer is not initialized, and reading into it directly would take `unsafe`. The copy costs
    /// 0.05 s of CPU for each GB.
    static READ: RefCell<Box<[u8]>> = RefCell::new(vec![0; HTTP_BUFFER_LEN].into());
}

impl<T> Io<T> {
    pub fn new(io: T, watch: Rc<Watch>) -> Self {
        Self { io, watch, is_dry: false }
    }

    /// Keeps account of what the client takes, in bytes; of a flush there are none.
    fn note_sent(&self, sent: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let watch = &self.watch;
        match sent {
            Poll::Pending => watch.taking.borrow_mut().begin(),
            Poll::Ready(Ok(len)) => {
                let mut taking = watch.taking.borrow_mut();
                let was_waiting = taking.is_waiting();
                taking.end(len);
                if len > 0 || was_waiting {
                    watch.moved.set(true);
                }
                // The end of an answer goes out when its request is over already: only then does the client have time to ask
                // for something else.
                if was_waiting && watch.stage.get() == Stage::Idle {
                    watch.enter(Stage::Idle);
                }
            }
            Poll::Ready(Err(_)) => {}
        }
        sent
    }
}

impl<T: Carrier> hyper::rt::Read for Io<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        READ.with_borrow_mut(|bytes| {
            let room = buf.remaining().min(bytes.len());
            let mut read = ReadBuf::new(&mut bytes[..room]);
            let polled = Pin::new(&mut self.io).poll_read(context, &mut read);
            self.is_dry = polled.is_pending();
            ready!(polled)?;
            let got = read.filled();
            if !got.is_empty() {
                self.watch.moved.set(true);
                if self.watch.stage.get() == Stage::Idle {
                    self.watch.enter(Stage::Head);
                }
            }
            buf.put_slice(got);
            Poll::Ready(Ok(()))
        })
    }
}

impl<T: Carrier> hyper::rt::Write for Io<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.io).poll_write(context, data);
        self.note_sent(sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.io).poll_write_vectored(context, data);
        self.note_sent(sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Why here: hyper flushes when the request has been given all that has come, and only then is it known to want more.
        if self.is_dry && self.watch.take_first_wait() {
            self.io.acknowledge();
        }
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.note_sent(flushed.map_ok(|()| 0)).map_ok(|_| ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
