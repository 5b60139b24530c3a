//! Every limit of the server, in one place.

/// Bytes of raw content in one frame of a large blob: the unit of checksum, of compression at rest and of a read.
pub const FRAME_LEN: usize = 256 << 10;
/// A blob of at most this many raw bytes is one record in a shard's log; a larger one is a list of frames in chunks.
pub const SMALL_BLOB_LEN_MAX: usize = FRAME_LEN;
/// The unit in which large blobs take space in a chunk segment, in bytes.
pub const CHUNK_LEN: usize = 64 << 10;
/// Alignment of every disk read and write: offset, length and memory, in bytes.
pub const DISK_ALIGN: usize = 4096;
/// The largest gRPC message that is accepted, in bytes (BuildGrid and BuildStream send 4 MiB and more).
pub const GRPC_MESSAGE_LEN_MAX: usize = 16 << 20;
/// `max_batch_total_size_bytes` as advertised: the gRPC default message limit less room for framing.
pub const BATCH_TOTAL_SIZE_MAX: usize = (4 << 20) - (64 << 10);
/// The largest message that is sent: gRPC clients refuse more than 4 MiB by default.
pub const REPLY_LEN_MAX: usize = (4 << 20) - (4 << 10);
/// The largest ActionResult that is stored, in bytes, so that it can always be returned.
pub const ACTION_RESULT_LEN_MAX: usize = 3 << 20;
/// How long an interrupted upload is kept for its client to come back.
pub const PARTIAL_UPLOAD_KEEP_MS: u64 = 5 * 60 * 1000;

// One core's shard worker.

/// Requests from other cores that wait for a core, besides one for each sender. Why: 1024 deep a message costs 0.3 us, 16
/// deep 4 us, as every one wakes somebody.
pub const ROUTER_QUEUE_LEN: usize = 1024;
/// Requests from other cores that a core works on at once; more wait in its queue.
pub const ROUTER_REQUESTS_MAX: usize = 1024;
/// Bytes hashed (or their worth of other work) between two turns of the reactor: about 190 us of SHA-256.
pub const WORK_SLICE_LEN: usize = 256 << 10;
/// Digests looked up between two turns of the reactor: about 250 us.
pub const FIND_MISSING_SLICE: usize = 2048;
/// Payload of the largest record that the RAM tier holds, in bytes. Why: a hit saves one disk read, 7 us whatever the size,
/// so that RAM is best spent on many small records.
pub const RAM_RECORD_LEN_MAX: usize = 64 << 10;
/// Blobs below this many raw bytes are not compressed at rest. Why: a try costs 10 us, and records take space in steps of
/// 64 bytes.
pub const COMPRESS_LEN_MIN: usize = 512;
/// Largest window of a zstd upload, as a power of two: 8 MiB. Why: RFC 8878 (3.1.1.1.2) asks every decoder for 8 MiB and
/// tells encoders not to need more; each open decoder may hold that much.
pub const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// Idle streaming decoders that a core keeps for the next upload.
pub const DECODERS_POOLED_MAX: usize = 8;
/// A streaming decoder that holds more than this many bytes is not kept.
pub const DECODER_POOLED_LEN_MAX: usize = 3 << 20;
/// Above this queueing delay of a core, in microseconds, compression falls to its lowest effort.
pub const PRESSURE_LIGHT_US: u32 = 5_000;
/// Above this queueing delay of a core, in microseconds, blobs are stored raw.
pub const PRESSURE_HEAVY_US: u32 = 20_000;
/// Body bytes of an upload that travel together to its owner. At most three times as much may be on its way or gathered
/// when a write returns, and so beyond the stream's window.
pub const UPLOAD_MESSAGE_LEN: usize = 64 << 10;
/// Interrupted uploads that a core keeps.
pub const PARKED_UPLOADS_MAX: usize = 256;
/// Memory that a core's interrupted uploads hold, in bytes.
pub const PARKED_MEMORY_MAX: usize = 16 << 20;
/// Disk space that a core's interrupted uploads hold, in raw bytes.
pub const PARKED_DISK_MAX: u64 = 1 << 30;

const _: () = assert!(PARKED_MEMORY_MAX > 2 * FRAME_LEN && SMALL_BLOB_LEN_MAX == FRAME_LEN);
/// Frames of a large blob that one disk read brings at most: a stream holds these and one piece besides.
pub const READ_AHEAD_FRAMES: usize = 2;
