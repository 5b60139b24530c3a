//! The ledger of one backend's unfinished uploads on disk. Who notes something can wait until it stands in the file, and so
//! survives the end of the process; about once a second the file is synced, so most survives a power cut.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits::{
    BACKEND_LEDGER_LEN_MAX, BACKEND_LEDGER_RETRY_MS, BACKEND_LEDGER_STRUCK_MIN, BACKEND_LEDGER_SYNC_MS,
};
use crate::pure::ledger::{ENTRY_LEN, Entry, Owed, replay};
use crate::rt;
use crate::rt::aside::Aside;
use crate::rt::channel::ReplyTo;
use crate::rt::local::{Event, Local};

/// A ledger, open for notes. Clones share it.
#[derive(Clone)]
pub struct Ledger(Rc<Inner>);

struct Inner {
    path: PathBuf,
    state: Local<State>,
    changed: Event,
    flushed: Event,
}

#[derive(Default)]
struct State {
    /// Not written yet.
    pending: Vec<u8>,
    /// Who waits for that.
    waiting: Vec<ReplyTo<()>>,
    /// Entries in the file, or on their way there.
    entries: usize,
    /// The writer has taken what was pending and is not done.
    writing: bool,
    /// The file is being synced. Why beside the writes: they would wait for the drive, and who stores a blob for them.
    syncing: bool,
    stopping: bool,
    /// The writer has ended.
    ended: bool,
    /// When the file could not be written. From then on nothing is noted, until it is written anew.
    broken: Option<Instant>,
}

/// The ledger of a backend, below the cache directory. The name is made safe for a file, and unique by its hash.
pub fn path(dir: &Path, backend: &str) -> PathBuf {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' };
    let name: String = backend.chars().take(64).map(safe).collect();
    let hash = crate::pure::sigv4::sha256(backend.as_bytes()).to_hex();
    dir.join("uploads").join(format!("{name}-{}.v1", &hash[..8]))
}

/// What stands in the ledgers below `dir` of backends that are not configured: their files' names, and how many uploads each
/// is owed. They are left as they are, for the day when the backend comes back.
pub async fn orphans(dir: &Path, backends: &[String]) -> io::Result<Vec<(String, usize)>> {
    let ours: Vec<PathBuf> = backends.iter().map(|name| path(dir, name)).collect();
    let directory = dir.join("uploads");
    let listed = rt::blocking(move || -> io::Result<_> {
        let mut found = Vec::new();
        let entries = match std::fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            entries => entries?,
        };
        for entry in entries {
            let at = entry?.path();
            if at.extension().is_none_or(|version| version != "v1") || ours.contains(&at) {
                continue;
            }
            let owed = replay(&content(&at)?).0.len();
            let name = at.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if owed > 0 {
                found.push((name, owed));
            }
        }
        found.sort_unstable();
        Ok(found)
    });
    listed.await.map_err(io::Error::other)?
}

/// What stands in a ledger. Why the look before: whoever opens a FIFO waits for ever.
fn content(path: &Path) -> io::Result<Vec<u8>> {
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::other(format!("{} is no regular file: remove it", path.display())));
    }
    if found.len() > BACKEND_LEDGER_LEN_MAX {
        let (path, most) = (path.display(), BACKEND_LEDGER_LEN_MAX >> 30);
        let problem = format!("{path} is larger than {most} GiB, which no list of unfinished uploads is: move it away");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    rt::whole::bytes(path, BACKEND_LEDGER_LEN_MAX)
}

impl Ledger {
    /// Opens the ledger, and says what is unfinished. Rewrites the file: a torn last entry goes.
    pub async fn open(path: PathBuf) -> io::Result<(Self, Vec<Owed>)> {
        let at = path.clone();
        let opened = rt::blocking(move || -> io::Result<_> {
            if let Some(parent) = at.parent() {
                std::fs::create_dir_all(parent)?;
            }
            let content = match content(&at) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
                read => read?,
            };
            let (unfinished, damaged) = replay(&content);
            let file = rewrite(&at, &unfinished)?;
            Ok((file, unfinished, damaged))
        });
        let (file, unfinished, damaged) = opened.await.map_err(io::Error::other)??;
        if damaged > 0 {
            tracing::warn!(path = %path.display(), damaged, "entries of the ledger of uploads could not be read");
        }
        let state = State { entries: unfinished.len(), ..State::default() };
        let ledger = Self(Rc::new(Inner {
            path,
            state: Local::new(state),
            changed: Event::default(),
            flushed: Event::default(),
        }));
        rt::spawn(ledger.clone().write(file, Aside::start("ledger", 1, 1)?));
        Ok((ledger, unfinished))
    }

    /// Notes an upload.
    pub fn note(&self, owed: Owed) {
        self.append(&Entry::Noted(owed));
    }

    /// Strikes an upload out.
    pub fn strike(&self, owed: Owed) {
        self.append(&Entry::Struck(owed));
    }

    /// Answers as soon as all that was noted stands in the file, or cannot.
    pub fn tell_when_written(&self, waiting: ReplyTo<()>) {
        let waits = self.0.state.with(|state| {
            let waits = (!state.pending.is_empty() || state.writing) && state.broken.is_none() && !state.ended;
            if waits {
                state.waiting.push(waiting);
                return None;
            }
            Some(waiting)
        });
        match waits {
            Some(waiting) => waiting.send(()),
            // Why: the writer took note of who waits before its last write.
            None => self.0.changed.notify(),
        }
    }

    fn append(&self, entry: &Entry) {
        self.0.state.with(|state| {
            if state.broken.is_none() {
                entry.encode(&mut state.pending);
                state.entries += 1;
            }
        });
        self.0.changed.notify();
    }

    /// Whether it is time to write the file anew, when so many uploads are unfinished: most of it is struck out, or it
    /// could not be written a while ago.
    pub fn is_worn(&self, unfinished: usize) -> bool {
        self.0.state.with(|state| match state.broken {
            Some(since) => since.elapsed() >= RETRY,
            None => state.entries > 2 * unfinished + BACKEND_LEDGER_STRUCK_MIN,
        })
    }

    /// Writes the file anew with what is unfinished: the caller changes nothing meanwhile but through `note` and `strike`.
    pub fn renew(&self, unfinished: Vec<Owed>) {
        self.0.state.with(|state| {
            state.broken = None;
            state.entries = unfinished.len();
            // Whatever was pending is contained.
            state.pending.clear();
            state.pending.extend_from_slice(&RENEW);
            unfinished.into_iter().for_each(|owed| Entry::Noted(owed).encode(&mut state.pending));
        });
        self.0.changed.notify();
    }

    /// Waits until all is written and synced, and ends the writer.
    pub async fn close(&self) {
        self.0.state.with(|state| state.stopping = true);
        self.0.changed.notify();
        loop {
            let flushed = self.0.flushed.wait();
            if self.0.state.with(|state| state.ended) {
                return;
            }
            flushed.await;
        }
    }

    async fn write(self, file: File, syncer: Aside) {
        let mut file = Some(Arc::new(file));
        let mut synced = rt::time::now();
        let mut dirty = false;
        loop {
            let changed = self.0.changed.wait();
            let (pending, waiting, syncing, stopping) = self.0.state.with(|state| {
                state.writing = !state.pending.is_empty();
                let (pending, waiting) = (std::mem::take(&mut state.pending), std::mem::take(&mut state.waiting));
                (pending, waiting, state.syncing, state.stopping)
            });
            if !pending.is_empty() {
                let (path, last) = (self.0.path.clone(), file.take());
                let written = rt::blocking(move || store(last, &path, &pending)).await;
                self.0.state.with(|state| state.writing = false);
                match written {
                    Ok(Ok(same)) => (file, dirty) = (Some(same), true),
                    Ok(Err(error)) => {
                        self.give_up(&error);
                        dirty = false;
                    }
                    Err(error) => unreachable!("writing does not panic: {error}"),
                }
            }
            waiting.into_iter().for_each(|waiting| waiting.send(()));
            let due = dirty && !syncing && (stopping || synced.elapsed() >= SYNC);
            if let Some(file) = file.clone().filter(|_| due) {
                (dirty, synced) = (false, rt::time::now());
                self.0.state.with(|state| state.syncing = true);
                rt::spawn(self.clone().sync(file, syncer.clone()));
                continue;
            }
            self.0.flushed.notify();
            if self.0.state.with(|state| !state.pending.is_empty()) {
                continue;
            }
            if stopping && !dirty && !syncing {
                self.0.state.with(|state| state.ended = true);
                self.0.flushed.notify();
                return;
            }
            let wait = if dirty && !syncing { SYNC.saturating_sub(synced.elapsed()) } else { Duration::MAX };
            let _ = rt::time::timeout(wait, changed).await;
        }
    }

    async fn sync(self, file: Arc<File>, syncer: Aside) {
        // There is one of these at a time, so that there is room for it.
        match syncer.run(Duration::MAX, move || file.sync_data()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.give_up(&error),
            Err(error) => unreachable!("syncing does not panic: {error}"),
        }
        self.0.state.with(|state| state.syncing = false);
        self.0.changed.notify();
    }

    /// The file takes nothing.
    fn give_up(&self, error: &io::Error) {
        tracing::error!(
            path = %self.0.path.display(),
            "cannot write the ledger of uploads: {error}. Until it can be written again, a restart forgets what is unfinished"
        );
        let waiting = self.0.state.with(|state| {
            state.broken = Some(rt::time::now());
            state.pending = Vec::new();
            std::mem::take(&mut state.waiting)
        });
        waiting.into_iter().for_each(|waiting| waiting.send(()));
    }
}

/// How long after a failure the file is written anew.
const RETRY: Duration = Duration::from_millis(BACKEND_LEDGER_RETRY_MS);
const SYNC: Duration = Duration::from_millis(BACKEND_LEDGER_SYNC_MS);
/// In front of pending entries: what follows is the whole file. Longer than no entry, and starts like none.
const RENEW: [u8; ENTRY_LEN] = [0xff; ENTRY_LEN];

/// `file` is none where the last write failed: then `pending` begins with `RENEW`.
fn store(file: Option<Arc<File>>, path: &Path, pending: &[u8]) -> io::Result<Arc<File>> {
    if let Some(whole) = pending.strip_prefix(&RENEW) {
        return replace(path, whole).map(Arc::new);
    }
    let file = file.ok_or_else(|| io::Error::other("there is no file"))?;
    (&*file).write_all(pending)?;
    Ok(file)
}

fn rewrite(path: &Path, unfinished: &[Owed]) -> io::Result<File> {
    let mut whole = Vec::new();
    unfinished.iter().cloned().for_each(|owed| Entry::Noted(owed).encode(&mut whole));
    replace(path, &whole)
}

/// Puts a file of this content in the place of the old one, or of none.
fn replace(path: &Path, whole: &[u8]) -> io::Result<File> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&new)?;
    file.write_all(whole)?;
    file.sync_data()?;
    std::fs::rename(&new, path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::digest::{Digest, Hash};
    use crate::pure::upload_queue::ObjectKind;
    use crate::rt::cores::block_on;

    fn upload(number: u8) -> Owed {
        let digest = Digest { hash: Hash([number; 32]), size: 1 };
        Owed { kind: ObjectKind::Cas, digest, prefix: "t/".into(), bucket: "".into() }
    }

    /// Goal: what is noted and not struck out is there when the file is opened again, also after it was written anew.
    /// Method: some rounds of notes on a real file, opened again after each.
    #[test]
    fn survives_reopening() {
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let path = path(dir.path(), "https://host:1/a b");
            for round in 0..4u8 {
                let (ledger, unfinished) = Ledger::open(path.clone()).await.expect("it opens");
                assert_eq!(unfinished, (0..round).map(|number| upload(2 * number)).collect::<Vec<_>>());
                ledger.note(upload(2 * round));
                ledger.note(upload(2 * round + 1));
                if round == 2 {
                    ledger.renew((0..=round).map(|number| upload(2 * number)).chain([upload(5)]).collect());
                }
                ledger.strike(upload(2 * round + 1));
                ledger.close().await;
            }
            assert!(path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("https___host_1_a_b-")));
        });
    }

    /// Goal: a file that cannot be written costs its notes, but neither memory nor the end of the process, and nothing once
    /// it is written anew. Method: a file that takes nothing; notes before and after that is found out; a new file.
    #[test]
    fn a_full_disk() {
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("ledger");
            let full = OpenOptions::new().write(true).open("/dev/full").expect("a device that is always full");
            let ledger = Ledger(Rc::new(Inner {
                path: path.clone(),
                state: Local::new(State::default()),
                changed: Event::default(),
                flushed: Event::default(),
            }));
            rt::spawn(ledger.clone().write(full, Aside::start("ledger", 1, 1).expect("a thread")));
            ledger.note(upload(1));
            loop {
                let flushed = ledger.0.flushed.wait();
                if ledger.0.state.with(|state| state.broken.is_some()) {
                    break;
                }
                flushed.await;
            }
            (0..200).for_each(|number| ledger.note(upload(number)));
            assert!(ledger.0.state.with(|state| state.pending.is_empty()) && !ledger.is_worn(0));
            ledger.renew(vec![upload(7)]);
            ledger.note(upload(8));
            ledger.close().await;
            let content = std::fs::read(&path).expect("the file");
            assert_eq!(replay(&content), (vec![upload(7), upload(8)], 0));
        });
    }

    /// Goal: ledgers of backends that are not there are found, counted, and left alone. Method: two ledgers, one of which is
    /// configured.
    #[test]
    fn orphans_are_counted() {
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            assert_eq!(orphans(dir.path(), &[]).await.expect("an answer"), []);
            for (name, count) in [("kept", 2), ("http://gone", 3), ("done", 0)] {
                let (ledger, _) = Ledger::open(path(dir.path(), name)).await.expect("it opens");
                (0..count).for_each(|number| ledger.note(upload(number)));
                ledger.close().await;
            }
            for _ in 0..2 {
                let found = orphans(dir.path(), &["kept".into()]).await.expect("an answer");
                let [(name, 3)] = &found[..] else { panic!("{found:?}") };
                assert!(name.starts_with("http___gone-"), "{name}");
            }
        });
    }

    /// Goal: what is no file does not hold the start up. Method: a FIFO in the place of a ledger, ours and another.
    #[test]
    fn a_fifo_is_no_ledger() {
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let path = path(dir.path(), "b");
            std::fs::create_dir(path.parent().expect("uploads")).expect("made");
            let made = std::process::Command::new("mkfifo").arg(&path).status();
            assert!(made.is_ok_and(|made| made.success()));
            let error = Ledger::open(path.clone()).await.err().expect("no ledger");
            assert!(error.to_string().contains("no regular file"), "{error}");
            assert!(orphans(dir.path(), &[]).await.is_err());
            assert!(path.exists(), "it is not ours to remove");
        });
    }

    /// Goal: a huge file is named, not read. Method: sparse files in the place of a ledger, ours and another.
    #[test]
    fn a_huge_file_is_no_ledger() {
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let path = path(dir.path(), "b");
            std::fs::create_dir(path.parent().expect("uploads")).expect("made");
            File::create(&path).and_then(|file| file.set_len(BACKEND_LEDGER_LEN_MAX + 1)).expect("a sparse file");
            let error = Ledger::open(path.clone()).await.err().expect("no ledger").to_string();
            assert!(error.contains("larger than 2 GiB") && error.contains(&*path.to_string_lossy()), "{error}");
            assert!(orphans(dir.path(), &[]).await.is_err());
        });
    }

    /// Goal: who asks in the middle of a write is answered at its end, not at the next sync. Method: rounds of a note and a question
    /// while the note is being written; all of them have a third of the time that as many syncs would take.
    #[test]
    fn who_asks_during_a_write_is_answered_at_its_end() {
        const ROUNDS: u32 = 30;
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let (ledger, _) = Ledger::open(path(dir.path(), "b")).await.expect("it opens");
            let all = async {
                for _ in 0..ROUNDS {
                    while !ledger.0.state.with(|state| state.writing && state.pending.is_empty()) {
                        ledger.note(upload(1));
                        rt::time::yield_once().await;
                    }
                    let (waiting, written) = crate::rt::channel::reply();
                    ledger.tell_when_written(waiting);
                    written.recv().await.expect("an answer");
                }
            };
            assert!(rt::time::timeout(ROUNDS / 3 * SYNC, all).await.is_ok());
        });
    }

    /// Goal: who is told that all is written finds all that was noted in the file, without a close, as a kill needs.
    /// Method: notes in groups while the writer runs, the file read at each answer; then an answer where nothing is due.
    #[test]
    fn notes_are_written_at_once() {
        block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let path = path(dir.path(), "b");
            let (ledger, _) = Ledger::open(path.clone()).await.expect("it opens");
            for group in 0..20u8 {
                let noted: Vec<_> = (0..3).map(|number| upload(3 * group + number)).collect();
                noted.iter().for_each(|noted| ledger.note(noted.clone()));
                let (waiting, written) = crate::rt::channel::reply();
                ledger.tell_when_written(waiting);
                if group % 2 == 0 {
                    written.recv().await.expect("an answer");
                    let (unfinished, damaged) = replay(&std::fs::read(&path).expect("the file"));
                    assert!(damaged == 0 && noted.iter().all(|noted| unfinished.contains(noted)), "group {group}");
                }
            }
            for _ in 0..2 {
                let (waiting, written) = crate::rt::channel::reply();
                ledger.tell_when_written(waiting);
                written.recv().await.expect("an answer");
                ledger.close().await;
            }
        });
    }
}
