//! Costs of the hot path's pure parts, in nanoseconds: `cargo bench --bench hot [part of a name]`.
//!
//! Method: each row runs in rounds of about 20 ms; the figure is the fastest of 15 rounds, because noise only adds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use ringcas::limits;
use ringcas::pure::digest::{Digest, Hash};
use ringcas::pure::find_missing::{self, Question};
use ringcas::pure::grpc_frame::{Deframer, Part, prefix};
use ringcas::pure::index::{Index, Word, tag};
use ringcas::pure::purge::Origin;
use ringcas::pure::record::{Checksums, Codec, Header, Key, Kind, Place, RecordKind};
use ringcas::pure::resource_name::WriteName;
use ringcas::pure::write_request::{Field, Scanner};
use sha2::Digest as _;

const ROUNDS: u32 = 15;
const ROUND: Duration = Duration::from_millis(20);
/// Entries of the index: 16 MiB of slots, far more than the caches hold.
const ENTRIES: u64 = 1 << 20;
const SEED: u64 = 0x5eed;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let row = |name: &str, work: &mut dyn FnMut()| {
        if wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str())) {
            println!("{name:<44} {:>12.1} ns", measure(work));
        }
    };
    index(&row);
    record(&row);
    hash(&row);
    wire(&row);
}

type Row<'a> = &'a dyn Fn(&str, &mut dyn FnMut());

/// Nanoseconds of one `work`.
fn measure(work: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    let mut warm = 0u32;
    while start.elapsed() < ROUND || warm == 0 {
        work();
        warm += 1;
    }
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..warm {
            work();
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(warm));
    }
    best
}

/// The key of entry `serial`: as random as a SHA-256 value.
fn key(serial: u64) -> Key {
    let hash = Hash(sha2::Sha256::digest(serial.to_le_bytes()).into());
    Key { kind: Kind::Cas, hash, size: 4096 }
}

fn index(row: Row<'_>) {
    let mut index = Index::default();
    let keys: Vec<Key> = (0..1 << 16).map(key).collect();
    for (serial, key) in (0..ENTRIES).map(|serial| (serial, key(serial))) {
        let word = Word::small(serial * 64, &key, 4184).expect("a location in range");
        index.insert(tag(SEED, Kind::Cas, &key.hash), word);
    }
    let absent: Vec<Key> = (ENTRIES..ENTRIES + (1 << 16)).map(key).collect();
    let mut at = 0;
    row("index: tag of a hash", &mut || {
        at = (at + 1) % keys.len();
        black_box(tag(SEED, Kind::Cas, &keys[at].hash));
    });
    row("index: tag and probe, present, 1 Mi entries", &mut || {
        at = (at + 1) % keys.len();
        black_box(index.get(tag(SEED, Kind::Cas, &keys[at].hash)));
    });
    row("index: tag and probe, absent, 1 Mi entries", &mut || {
        at = (at + 1) % absent.len();
        black_box(index.get(tag(SEED, Kind::Cas, &absent[at].hash)));
    });
    row("index: insert and remove, 1 Mi entries", &mut || {
        at = (at + 1) % absent.len();
        let tag = tag(SEED, Kind::Cas, &absent[at].hash);
        index.insert(tag, Word::large(64, &absent[at]));
        black_box(index.remove(tag));
    });
}

fn record(row: Row<'_>) {
    let sums = Checksums { key: SEED };
    let payload = vec![7u8; 4096];
    let mut log = vec![0u8; 1 << 20];
    let mut at = 0;
    row("record: append 4 KiB to a log buffer", &mut || {
        at = if at + 8192 > log.len() { 0 } else { at };
        let place = Place { position: at as u64, generation: 9 };
        let header = Header {
            kind: RecordKind::Small,
            key: Key { kind: Kind::Cas, hash: Hash([3; 32]), size: 4096 },
            codec: Codec::Raw,
            pieces: false,
            raw_len: 4096,
            origin: Origin::default(),
            stored_len: 4096,
            payload_sum: sums.payload(&payload),
        };
        let head = header.encode(&sums, place);
        log[at..at + head.len()].copy_from_slice(&head);
        log[at + head.len()..][..payload.len()].copy_from_slice(&payload);
        at += header.log_len();
    });
    at = 0;
    row("record: read back and check 4 KiB", &mut || {
        let header = Header::decode(&log[at..], &sums, Place { position: at as u64, generation: 9 });
        let header = header.expect("it was appended");
        black_box(header.payload(&log[at..], &sums).expect("it is whole"));
        at = if at + 3 * 8192 > log.len() { 0 } else { at + header.log_len() };
    });
}

fn hash(row: Row<'_>) {
    for (name, len) in [("4 KiB", 4 << 10), ("256 KiB", 256 << 10)] {
        let data = vec![5u8; len];
        row(&format!("sha-256: {name}"), &mut || _ = black_box(sha2::Sha256::digest(black_box(&data))));
        let sums = Checksums { key: SEED };
        row(&format!("xxh3-64: {name}"), &mut || _ = black_box(sums.payload(black_box(&data))));
    }
}

fn wire(row: Row<'_>) {
    let digest = Digest { hash: key(1).hash, size: 4096 };
    let name = format!("uploads/0b0d9a5e-6e0c-4a4f-8a4e-2d3c4b5a6978/blobs/{digest}");
    row("resource name: parse", &mut || _ = black_box(WriteName::parse(black_box(&name))));

    // WriteRequest {resource_name = 1, finish_write = 3, data = 10}, 4 KiB of data, behind a gRPC prefix.
    let mut message = BytesMut::new();
    message.extend_from_slice(&[0x0a, u8::try_from(name.len()).expect("short")]);
    message.extend_from_slice(name.as_bytes());
    message.extend_from_slice(&[0x18, 1, 0x52, 0x80, 0x20]);
    message.extend_from_slice(&[1; 4096]);
    let framed = Bytes::from([&prefix(message.len())[..], &message].concat());
    row("write request: deframe and scan 4 KiB", &mut || {
        let mut deframer = Deframer::new(limits::GRPC_MESSAGE_LEN_MAX, false);
        let mut scanner = Scanner::new(4096);
        deframer.feed(framed.clone());
        while let Ok(Some(part)) = deframer.next_part() {
            if let Part::Piece(piece) = part {
                scanner.feed(piece);
                while let Ok(Some(field)) = scanner.next_field() {
                    if let Field::Data(data) = field {
                        black_box(data);
                    }
                }
            }
        }
    });

    // FindMissingBlobsRequest {blob_digests = 2 {hash = 1, size_bytes = 2}}.
    let mut question = Vec::new();
    for serial in 0..1000 {
        question.extend_from_slice(&[0x12, 69, 0x0a, 64]);
        question.extend_from_slice(key(serial).hash.to_hex().as_bytes());
        question.extend_from_slice(&[0x10, 0x80, 0x20]);
    }
    row("find missing: parse 1000 digests", &mut || _ = black_box(Question::parse(black_box(&question))));
    let parsed = Question::parse(&question).expect("well formed");
    let missing: Vec<bool> = (0..1000).map(|i| i % 2 == 0).collect();
    row("find missing: answer, half are missing", &mut || {
        black_box(find_missing::answer(&parsed.fields, black_box(&missing)));
    });
}
