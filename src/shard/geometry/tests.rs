//! Cache directories are made, grown, shrunk, opened again and refused.

use super::*;

fn config(dir: &Path, mib: u64) -> DiskConfig {
    DiskConfig { dir: dir.into(), max_size_bytes: mib << 20, ack: Ack::Buffered }
}

fn total_len(dir: &Path) -> u64 {
    fs::read_dir(dir).expect("list").map(|entry| entry.expect("entry").metadata().expect("metadata").len()).sum()
}

/// Goal: geometry suits the size: at least 8 segments for each shard, many shards for big caches. Method: sizes by hand.
#[test]
fn geometry_follows_the_size() {
    assert_eq!(plan(64 << 20), (1 << 20, 63, 4));
    assert_eq!(plan(1 << 30), (1 << 20, 1023, 64));
    assert_eq!(plan(3 << 30), (2 << 20, 1535, 64));
    assert_eq!(plan(1 << 40), (32 << 20, 32767, 256));
    for mib in 64..5000u64 {
        let (segment_len, segments, shards) = plan(mib << 20);
        assert!(segments * segment_len + SUPER_LEN <= mib << 20 && segments >= 7 * shards, "{mib} MiB");
        assert!(mib < 1024 || shards >= 64, "{mib} MiB");
    }
}

/// Goal: creation, reopening, growing and shrinking keep to `--max_size` and keep the directory's key; the lock holds.
/// Method: one directory through all of them.
#[test]
fn a_directory_is_made_reopened_and_resized() {
    let dir = tempfile::tempdir().expect("a directory");
    let volume = open(&config(dir.path(), 64)).expect("made");
    assert!(matches!(open(&config(dir.path(), 64)), Err(OpenError::InUse { .. })));
    let (key, shards) = (volume.checksums(), volume.shards());
    assert_eq!((volume.segment_count(), volume.allocated_bytes()), (63, total_len(dir.path())));
    drop(volume);
    for (mib, segments) in [(100, 99), (64, 63), (80, 79), (80, 79)] {
        let volume = open(&config(dir.path(), mib)).expect("opened");
        assert_eq!((volume.segment_count(), volume.checksums(), volume.shards()), (segments, key, shards));
        assert!(volume.headers().iter().all(Option::is_none));
        assert_eq!(volume.allocated_bytes(), total_len(dir.path()));
        assert!(total_len(dir.path()) <= mib << 20);
    }
    let error = open(&config(dir.path(), 63)).err().expect("too small");
    assert!(error.to_string().contains("--max_size"), "{error}");
}

/// Goal: tools find a directory as it is, and change nothing by opening it; a damaged superblock is mended. Method: one
/// directory opened as it is: missing, in use, whole, with each copy damaged in turn, cut short.
#[test]
fn tools_open_a_directory_as_it_is() {
    let dir = tempfile::tempdir().expect("a directory");
    assert!(matches!(open_as_is(dir.path()), Err(OpenError::NoCache { .. })));
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 0, "nothing was created");
    let volume = open(&config(dir.path(), 64)).expect("made");
    assert!(matches!(open_as_is(dir.path()), Err(OpenError::InUse { .. })));
    let key = volume.checksums();
    drop(volume);
    let path = dir.path().join("super");
    for copy in 0..2 {
        let mut bytes = fs::read(&path).expect("read");
        bytes[copy * DISK_ALIGN + 25] ^= 1;
        fs::write(&path, &bytes).expect("written");
        let volume = open_as_is(dir.path()).expect("one copy is enough");
        assert_eq!((volume.checksums(), volume.allocated_bytes()), (key, total_len(dir.path())));
        assert_eq!(volume.whole_supers().expect("read"), [copy != 0, copy != 1]);
        volume.mend_supers().expect("written");
        assert_eq!(volume.whole_supers().expect("read"), [true, true]);
    }
    let data = OpenOptions::new().write(true).open(dir.path().join("data.0")).expect("opened");
    data.set_len(1 << 20).expect("cut");
    let error = open_as_is(dir.path()).err().expect("too short");
    assert!(matches!(error, OpenError::Resizing { .. }), "{error}");
}

/// Goal: what is not ours is left alone, and every refusal names the setting. Method: a foreign file, a superblock
/// damaged in one copy (fine), in both, of another version; an interrupted creation; no room.
#[test]
fn what_is_not_ours_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let foreign = dir.path().join("cas.v2");
    fs::write(&foreign, "x").expect("written");
    let error = open(&config(dir.path(), 64)).err().expect("foreign");
    assert!(error.to_string().contains("--dir") && error.to_string().contains("cas.v2"), "{error}");
    assert!(!dir.path().join("lock").exists());
    fs::remove_file(&foreign).expect("removed");

    // A cache that has lost its superblock, or what another program calls so.
    fs::write(dir.path().join("data.7"), "not ours").expect("written");
    let error = open(&config(dir.path(), 64)).err().expect("no super");
    assert!(matches!(error, OpenError::NoSuper { .. }) && error.to_string().contains("data.7"), "{error}");
    assert!(dir.path().join("data.7").exists() && !dir.path().join("lock").exists());
    fs::remove_file(dir.path().join("data.7")).expect("removed");

    fs::write(dir.path().join("data.0"), "left by a crash").expect("written");
    fs::write(dir.path().join("super.new"), "left by a crash").expect("written");
    drop(open(&config(dir.path(), 64)).expect("made anew"));
    assert!(!dir.path().join("super.new").exists());

    let path = dir.path().join("super");
    let good = fs::read(&path).expect("read");
    let mut bytes = good.clone();
    bytes[20] ^= 1;
    fs::write(&path, &bytes).expect("written");
    drop(open(&config(dir.path(), 64)).expect("one copy is enough"));
    bytes[DISK_ALIGN + 20] ^= 1;
    fs::write(&path, &bytes).expect("written");
    assert!(matches!(open(&config(dir.path(), 64)), Err(OpenError::SuperDamaged { .. })));
    let bytes = superblock::tests::with_version(&good, superblock::VERSION + 1);
    fs::write(&path, &bytes).expect("written");
    assert!(matches!(open(&config(dir.path(), 64)), Err(OpenError::OtherVersion { .. })));

    let empty = tempfile::tempdir().expect("a directory");
    let error = open(&DiskConfig { max_size_bytes: 60 << 40, ..config(empty.path(), 0) }).err().expect("no room");
    assert!(matches!(error, OpenError::NoSpace { .. }) && error.to_string().contains("--max_size"), "{error}");
    assert!(!empty.path().join("data.0").exists(), "cleaned up");
    let there_yet = empty.path().join("not/there/yet");
    assert!(matches!(look_closely(&there_yet, 60 << 40), Err(OpenError::NoSpace { .. })));
    assert_eq!(look_closely(&there_yet, 1 << 30).expect("room"), 64);
}

/// Goal: an existing cache tells its size, whatever else stands in its directory. Method: none, one with a stranger's file,
/// grown, its superblock damaged, and a directory in its place.
#[test]
fn a_cache_keeps_its_size() {
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(kept_size(dir.path()).expect("looked"), None);
    for mib in [64, 80] {
        let volume = open(&config(dir.path(), mib)).expect("opened");
        fs::write(dir.path().join("notes.txt"), [0; 5000]).expect("written");
        let kept = kept_size(dir.path()).expect("looked").expect("a cache");
        assert_eq!(kept, volume.allocated_bytes().max(MAX_SIZE_MIN));
        let segments = volume.segment_count();
        drop(volume);
        let again = DiskConfig { max_size_bytes: kept, ..config(dir.path(), 0) };
        assert_eq!(open(&again).expect("opened").segment_count(), segments);
    }
    fs::write(dir.path().join("super"), "damaged").expect("written");
    assert_eq!(kept_size(dir.path()).expect("looked"), None);
    fs::remove_file(dir.path().join("super")).expect("removed");
    fs::create_dir(dir.path().join("super")).expect("made");
    assert_eq!(kept_size(dir.path()).expect("looked"), None);
    assert!(matches!(open(&config(dir.path(), 64)), Err(OpenError::NoFile { .. })));
}

/// Goal: what is lost is counted, so that an operator hears of it. Method: segments written over, by hand; a missing data file.
#[test]
fn lost_segments_are_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    drop(open(&config(dir.path(), 64)).expect("made"));
    let path = dir.path().join("data.0");
    let data = OpenOptions::new().write(true).open(&path).expect("opened");
    data.write_all_at(b"of another cache", 3 << 20).expect("written");
    data.write_all_at(b"blank but for its content", (5 << 20) + u64::from(HEAD_LEN)).expect("written");
    assert_eq!(open(&config(dir.path(), 64)).expect("opened").lost_segments(), 1);
    fs::remove_file(&path).expect("removed");
    assert!(matches!(open_as_is(dir.path()), Err(OpenError::NoData { .. })));
    assert_eq!(open(&config(dir.path(), 64)).expect("made anew").lost_segments(), 0);
    fs::remove_file(&path).expect("removed");
    fs::create_dir(&path).expect("made");
    assert!(matches!(open(&config(dir.path(), 64)), Err(OpenError::NoFile { .. })));
    assert!(matches!(open_as_is(dir.path()), Err(OpenError::NoFile { .. })));
}
