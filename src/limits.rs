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
/// Items of one batch call, or Directories of one walk, that are worked on at a time.
pub const BATCH_CONCURRENCY: usize = 16;
/// Payload of at most this many bytes is copied beside its protobuf header: cheaper than one more piece to send.
pub const REPLY_COPY_LEN_MAX: usize = 1024;
/// Digests that the check of an ActionResult gathers before it asks whether they are present.
pub const CHECK_DIGESTS_MAX: usize = 8192;
/// The largest Tree that the check of an ActionResult reads, in bytes (about 2 million files). A larger one is a miss.
pub const TREE_LEN_MAX: u64 = 256 << 20;
/// Distinct Directories below one root: what a walk remembers, at about 50 bytes each.
pub const DIRECTORIES_MAX: usize = 1 << 18;
/// The largest Directory that is walked, in bytes, so that it can be sent in one message.
pub const DIRECTORY_LEN_MAX: u64 = REPLY_LEN_MAX as u64 - (4 << 10);
/// Bytes of Directories in one GetTreeResponse, unless a single one is larger; also what a walk reads ahead.
pub const TREE_PAGE_LEN_MAX: u64 = 1 << 20;
/// How long an interrupted upload is kept for its client to come back.
pub const PARTIAL_UPLOAD_KEEP_MS: u64 = 5 * 60 * 1000;
/// HTTP/2 window of one stream by default, in bytes.
pub const STREAM_WINDOW_DEFAULT: u32 = 256 << 10;
/// A connection's HTTP/2 window in stream windows.
pub const CONNECTION_WINDOW_FACTOR: u32 = 16;
/// The smallest memory limit that leaves room for one connection window on each of a few cores, in bytes.
pub const MEMORY_LIMIT_MIN: u64 = 64 << 20;
/// The size of a new cache when none is given, in bytes.
pub const MAX_SIZE_DEFAULT: u64 = 10 << 30;
