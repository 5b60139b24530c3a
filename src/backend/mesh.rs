//! What the cores tell each other of backends: owned notes, none of which is waited for by who handles it.
//!
//! Invariant: handling a note sends nothing; tasks that it starts may. So there is no cycle to wait in.

use crate::limits::BACKEND_NOTES_LEN;
use crate::pure::breaker::{Announcement, Evidence};
use crate::pure::upload_queue::Upload;
use crate::rt::channel::{self, Receiver, ReplyTo, Sender};

use super::UploadEnd;
use super::credentials::Issue;

/// Which backend: its place in the settings.
pub type BackendIndex = usize;

/// What an operator should know; each is logged once in a while, whatever the number of cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    Denied,
    Wrong,
}

/// A note.
pub enum Note {
    // To the core that owns the backend.
    Evidence {
        backend: BackendIndex,
        evidence: Evidence,
    },
    /// The backend asked for less.
    Throttled {
        backend: BackendIndex,
    },
    /// A record is being stored that the backend should have. Answered when this is noted on disk, or cannot be.
    Upload {
        backend: BackendIndex,
        upload: Upload,
        noted: ReplyTo<()>,
    },
    /// Whether the backend is still to get a record.
    IsOwed {
        backend: BackendIndex,
        upload: Upload,
        reply: ReplyTo<bool>,
    },
    /// The backend says that this generation of credentials has expired.
    Expired {
        backend: BackendIndex,
        generation: u64,
    },
    /// Something that an operator should know.
    Trouble {
        backend: BackendIndex,
        trouble: Trouble,
        text: String,
    },
    // From it.
    Announce {
        backend: BackendIndex,
        announcement: Announcement,
    },
    Issue {
        backend: BackendIndex,
        issue: Issue,
    },
    /// These records of yours are still to be uploaded: keep them.
    Keep {
        uploads: Vec<Upload>,
    },
    /// Upload this record of yours.
    Order {
        backend: BackendIndex,
        upload: Upload,
        reply: ReplyTo<UploadEnd>,
    },
}

/// One core's end of the mesh, made before the cores start and handed to its core.
pub struct MeshPort {
    pub(super) core: usize,
    /// By core, this one included.
    pub(super) peers: Vec<Sender<Note>>,
    pub(super) inbox: Receiver<Note>,
}

/// Connects `core_count` cores. In the order of the cores.
pub fn wire(core_count: usize) -> Vec<MeshPort> {
    let (senders, inboxes): (Vec<_>, Vec<_>) = (0..core_count).map(|_| channel::bounded(BACKEND_NOTES_LEN)).unzip();
    let ports = inboxes.into_iter().enumerate();
    ports.map(|(core, inbox)| MeshPort { core, peers: senders.clone(), inbox }).collect()
}
