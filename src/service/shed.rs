//! How a write that was not let in is answered and logged.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{CallContext, Code, Status};
use crate::limits;
use crate::rt;
use crate::store::StoreError;

/// The code of a refused write.
///
/// Why not one for all: Bazel walks its whole retry ladder for each blob on UNAVAILABLE and RESOURCE_EXHAUSTED (24 s
/// against 4 s for 50 outputs), and takes FAILED_PRECONDITION for a warning. BuildStream fails its build on
/// FAILED_PRECONDITION, and skips the push on RESOURCE_EXHAUSTED.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShedStatus {
    /// What suits the client; FAILED_PRECONDITION when it is not known.
    Auto,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
}

impl ShedStatus {
    fn code(self, caller: &CallContext) -> Code {
        match self {
            Self::Auto if is_build_stream(caller) => Code::ResourceExhausted,
            Self::Auto | Self::FailedPrecondition => Code::FailedPrecondition,
            Self::ResourceExhausted => Code::ResourceExhausted,
            Self::Unavailable => Code::Unavailable,
        }
    }

    /// An error of the store as the status for this caller.
    pub fn status(self, error: StoreError, caller: impl FnOnce() -> CallContext) -> Status {
        match error {
            StoreError::Shed { .. } => Status::new(self.code(&caller()), error.to_string()),
            other => other.into(),
        }
    }
}

/// BuildStream, and its buildbox-casd, which speaks for it. casd is the only client of note that is made with gRPC for
/// C++; one that names itself otherwise is somebody else.
fn is_build_stream(caller: &CallContext) -> bool {
    let tool = caller.tool_name.as_str();
    let is_named = tool.contains("buildstream") || tool.contains("buildbox");
    is_named || (tool.is_empty() && caller.user_agent.contains("grpc-c++"))
}

/// Logs refused writes: some lines a second one by one, and then how many more there were. Clones are the same log, also
/// on other cores.
#[derive(Debug, Clone)]
pub struct ShedLog(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    epoch: Instant,
    /// The second of the last line (high half), and the lines in it so far.
    window: AtomicU64,
    /// Writes that got no line since the last count was logged.
    rest: AtomicU64,
}

impl Default for ShedLog {
    fn default() -> Self {
        Self(Arc::new(Inner { epoch: rt::time::now(), window: AtomicU64::new(0), rest: AtomicU64::new(0) }))
    }
}

impl ShedLog {
    /// `what` was not let in.
    pub fn note(&self, what: impl Display) {
        if self.takes_line(self.0.epoch.elapsed().as_secs()) {
            tracing::warn!("{what}");
        } else if self.0.rest.fetch_add(1, Ordering::Relaxed) == 0 {
            let log = self.clone();
            rt::spawn(async move {
                rt::time::sleep(Duration::from_secs(1)).await;
                let rest = log.0.rest.swap(0, Ordering::Relaxed);
                tracing::warn!("GRPC BYTESTREAM WRITE SHED: {rest} more in the last second");
            });
        }
    }

    /// Whether one more line fits into this second.
    fn takes_line(&self, second: u64) -> bool {
        let next = |window: u64| if window >> 32 == second { window + 1 } else { second << 32 | 1 };
        let before = self.0.window.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |window| Some(next(window)));
        let (Ok(before) | Err(before)) = before;
        next(before) as u32 <= limits::SHED_LINES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each client gets the code that it takes best, an operator may choose another, and other errors keep theirs.
    /// Method: the clients that are known, and the flag's values.
    #[test]
    fn the_code_suits_the_client() {
        let caller = |tool: &str, agent: &str| CallContext {
            tool_name: tool.into(),
            user_agent: agent.into(),
            ..CallContext::default()
        };
        let shed = StoreError::Shed { slots: 1, wait_ms: 0 };
        let auto = |tool, agent| ShedStatus::Auto.status(shed.clone(), || caller(tool, agent)).code;
        assert_eq!(auto("bazel", "bazel/7.4.1 grpc-java-netty/1.60"), Code::FailedPrecondition);
        assert_eq!(auto("", ""), Code::FailedPrecondition);
        assert_eq!(auto("recc", "grpc-c++/1.60 grpc-c/37 (linux; chttp2)"), Code::FailedPrecondition);
        assert_eq!(auto("buildstream", ""), Code::ResourceExhausted);
        assert_eq!(auto("buildbox-casd", "grpc-c++/1.60"), Code::ResourceExhausted);
        assert_eq!(auto("", "grpc-c++/1.60 grpc-c/37 (linux; chttp2)"), Code::ResourceExhausted);
        let bazel = || caller("bazel", "");
        assert_eq!(ShedStatus::Unavailable.status(shed.clone(), bazel).code, Code::Unavailable);
        assert_eq!(ShedStatus::ResourceExhausted.status(shed, bazel).code, Code::ResourceExhausted);
        let stopping = ShedStatus::FailedPrecondition.status(StoreError::Stopping, || unreachable!("not asked"));
        assert_eq!(stopping.code, Code::Unavailable);
    }

    /// Goal: so many lines in each second, whatever came before. Method: seconds as arguments.
    #[test]
    fn lines_are_bounded_by_the_second() {
        let log = ShedLog::default();
        for second in [0, 1, 7] {
            let lines = (0..100).filter(|_| log.takes_line(second)).count();
            assert_eq!(lines, limits::SHED_LINES_MAX as usize, "second {second}");
        }
    }
}
