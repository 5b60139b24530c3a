//! Every limit of the server, in one place.

use std::time::Duration;

/// Bytes of raw content in one frame of a large blob: the unit of checksum, of compression at rest and of a read.
pub const FRAME_LEN: usize = 256 << 10;
/// A blob of at most this many raw bytes is one record in a shard's log; a larger one is a list of frames in chunks.
pub const SMALL_BLOB_LEN_MAX: usize = FRAME_LEN;
/// The unit in which large blobs take space in a chunk segment, in bytes.
pub const CHUNK_LEN: usize = 64 << 10;
/// Alignment of every disk read and write: offset, length and memory, in bytes.
pub const DISK_ALIGN: usize = 4096;
/// Spare disk buffers of one length that a core keeps at most, in bytes. Why so many: a core with 64 busy shards fills as many write
/// buffers at a time.
pub const DISK_BUF_SPARE_MAX: usize = 16 << 20;
/// Bytes that one core reads from the drive at a time, at least and at most, as there is memory for it. Reads whose clients
/// went away run on, and are within this. So much is registered with the kernel, which spares it the
/// look-up of each page: a fifth of what a Read of 1 MiB costs.
pub const DISK_READS_LEN_MIN: usize = LARGE_READ_LEN_MAX as usize;
pub const DISK_READS_LEN_MAX: usize = 32 << 20;
/// Memory that each core of the tools that work on a directory registers with the kernel, in bytes.
pub const IO_MEMORY_TOOLS: usize = 1 << 20;
/// The most that one read takes from a socket ahead of what was asked for, in bytes.
pub const READ_AHEAD_LEN: usize = 256 << 10;
/// Read-ahead buffers that the connections of one core hold at a time, at most; further ones read without.
pub const READ_AHEAD_BUFS_MAX: usize = 32;
/// The largest gRPC message that is accepted, in bytes (BuildGrid and BuildStream send 4 MiB and more).
pub const GRPC_MESSAGE_LEN_MAX: usize = 16 << 20;
/// `max_batch_total_size_bytes` as advertised: the gRPC default message limit less room for framing.
pub const BATCH_TOTAL_SIZE_MAX: usize = (4 << 20) - (64 << 10);
/// The largest message that is sent: gRPC clients refuse more than 4 MiB by default.
pub const REPLY_LEN_MAX: usize = (4 << 20) - (4 << 10);
/// The largest ActionResult that is stored, in bytes, so that it can always be returned.
pub const ACTION_RESULT_LEN_MAX: usize = 3 << 20;
/// Bytes of a stored ActionResult that may be read before there is memory for the reply.
pub const ACTION_RESULT_HELD_LEN_MAX: usize = 16 << 10;
/// Bytes held while an ActionResult is read, whose length nobody knows before: most are far shorter, and the longest are
/// a few times as long.
pub const ACTION_READ_HELD_LEN: usize = 1 << 20;
/// Bytes held while a long ActionResult, or one that names Trees or root Directories, is checked and answered.
pub const ACTION_HELD_LEN: usize = 4 << 20;
/// Items of one batch call, or Directories of one walk, that are worked on at a time.
pub const BATCH_CONCURRENCY: usize = 16;
/// Payload of at most this many bytes is copied beside its protobuf header: cheaper than one more piece to send.
pub const REPLY_COPY_LEN_MAX: usize = 1024;
/// Digests that the check of an ActionResult gathers before it asks whether they are present.
pub const CHECK_DIGESTS_MAX: usize = 8192;
/// Bytes of Trees that the check of one ActionResult reads (about 2 million files). With more it is a miss.
pub const TREE_LEN_MAX: u64 = 256 << 20;
/// The longest FileNode or DirectoryNode, in bytes: a scan holds one until it is whole. A name has at most 255 bytes on
/// most file systems; the rest is room for node properties.
pub const TREE_NODE_LEN_MAX: usize = 64 << 10;
/// The longest UUID in a `resource_name`, in bytes; a real one has 36.
pub const UPLOAD_UUID_LEN_MAX: usize = 128;
/// Distinct Directories below one root: what a walk remembers, at about 50 bytes each.
pub const DIRECTORIES_MAX: usize = 1 << 18;
/// Levels of Directories below a root: no path of a file system is deeper (PATH_MAX is 4096).
pub const DIRECTORY_DEPTH_MAX: usize = 2048;
/// Checks of ActionResults that may walk Directories at a time on one core; more wait their turn.
pub const CHECK_WALKS_MAX: usize = 8;
/// Distinct Directories below all root Directories of one ActionResult. With more it is a miss.
pub const ACTION_DIRECTORIES_MAX: usize = 1 << 16;
/// The largest Directory that is walked, in bytes, so that it can be sent in one message.
pub const DIRECTORY_LEN_MAX: u64 = REPLY_LEN_MAX as u64 - (4 << 10);
/// Bytes of Directories in one GetTreeResponse, unless a single one is larger; also what a walk reads ahead.
pub const TREE_PAGE_LEN_MAX: u64 = 1 << 20;
/// How long an interrupted upload is kept for its client to come back.
pub const PARTIAL_UPLOAD_KEEP_MS: u64 = 5 * 60 * 1000;
/// The smallest memory limit that leaves room for peers beside the fixed parts of a small cache, in bytes.
pub const MEMORY_LIMIT_MIN: u64 = 64 << 20;
/// The size of a new cache when none is given, in bytes.
pub const MAX_SIZE_DEFAULT: u64 = 10 << 30;

/// Streams that one HTTP/2 connection may have open at a time (Bazel uses 100).
pub const HTTP2_STREAMS_MAX: u32 = 512;
/// The largest HTTP/2 frame that is accepted, in bytes.
pub const HTTP2_FRAME_LEN_MAX: u32 = 256 << 10;
/// The largest header list that is accepted, in bytes as HTTP/2 counts them. RequestMetadata and an auth token fit
/// several times over.
pub const HTTP2_HEADER_LIST_LEN_MAX: u32 = 32 << 10;
/// The longest frame of another kind than DATA, and the longest header block of several frames, in bytes. Why twice the list:
/// encoding makes no list much longer. Longer ones end their connection (ENHANCE_YOUR_CALM).
pub const HTTP2_OTHER_FRAME_LEN_MAX: usize = 2 * HTTP2_HEADER_LIST_LEN_MAX as usize;
/// The longest trailers of a call, in bytes. Why so few: gRPC has none in requests, nobody reads them, and a field of a byte takes
/// 200 until the call is over. Longer ones end their connection (ENHANCE_YOUR_CALM).
pub const HTTP2_TRAILERS_LEN_MAX: usize = 64;
/// Characters of an unknown method's path that are said back. Why few: the answer is held until its client takes it.
pub const METHOD_SHOWN_LEN_MAX: usize = 128;
/// The window of a stream that is advertised by default, in bytes (`--grpc_initial_window_size`).
pub const HTTP2_STREAM_WINDOW: u32 = 256 << 10;
/// A connection's window until it uploads, and at least, in bytes. Source: RFC 9113, 6.9.2: no setting changes it.
pub const HTTP2_CONNECTION_WINDOW_MIN: u32 = 65_535;
/// One connection's part of the memory for windows: one in this many bytes.
pub const HTTP2_CONNECTION_WINDOW_PART: u64 = 32;
/// How many stream windows a connection window is at most: what the uploads of one connection can make us hold.
pub const HTTP2_CONNECTION_WINDOW_STREAMS: u32 = 16;
/// The shortest DATA frame of a client that uploads, in bytes: gRPC's prefix, one byte of data and the offset with their tags.
pub const HTTP2_DATA_FRAME_LEN_LEAST: usize = 5 + 3 + 2;
/// What DATA frames of a connection that nobody has read yet may fall short of 256 bytes each, in all. A connection with more is
/// ended (ENHANCE_YOUR_CALM). Why so much, 6.4 MB: a stream's window has 26,214 of the shortest frames, each 246 too short. What is
/// unread is taken out of HTTP/2 at each turn, so that a client comes nowhere near it. A small memory limit allows less
/// (`net::http2`), but 8 frames of one byte for each stream in any case.
pub const HTTP2_DATA_FRAME_BUDGET: usize =
    HTTP2_STREAM_WINDOW as usize / HTTP2_DATA_FRAME_LEN_LEAST * (256 - HTTP2_DATA_FRAME_LEN_LEAST);
pub const HTTP2_DATA_FRAME_BUDGET_MIN: usize = 8 * 256 * HTTP2_STREAMS_MAX as usize;
/// Bytes of one stream's reply that HTTP/2 holds unsent before its handler has to wait: a message of as much as one read brings
/// of a long blob, to the byte, since the rest of one would go out alone.
pub const HTTP2_SEND_BUFFER_LEN: usize = READ_AHEAD_FRAMES * FRAME_LEN + READ_MESSAGE_OVERHEAD;
/// How long a new connection may take to send the HTTP/2 preface.
pub const HTTP2_PREFACE_MS: u64 = 10_000;
/// How long a TLS handshake may take, from the first byte to the last.
pub const TLS_HANDSHAKE_MS: u64 = 10_000;
/// Handshakes that one core has under way at a time; more connections are closed at once.
pub const TLS_HANDSHAKES_MAX: u64 = 1024;
/// Memory that TLS is counted with for a connection, in bytes, besides the connection itself: 10 KiB were measured for one that
/// is idle, and there can be a record that comes, one that has been decrypted, and what is to be sent.
pub const TLS_HELD_LEN: u64 = 80 << 10;
/// Encrypted bytes that a connection holds unsent before its writer has to wait.
pub const TLS_SEND_BUFFER_LEN: usize = 32 << 10;
const _: () = assert!((10 << 10) + 2 * (18 << 10) + TLS_SEND_BUFFER_LEN as u64 <= TLS_HELD_LEN);
/// Of a YAML or JSON document: how deep values may lie in one another, and how many there may be, aliases counted as what they
/// stand for.
pub const DOCUMENT_DEPTH_MAX: usize = 64;
pub const DOCUMENT_VALUES_MAX: usize = 100_000;
/// Bytes of a file that a setting names: configuration, passwords, tokens, certificates, credentials; also of standing purges.
pub const GIVEN_FILE_LEN_MAX: u64 = 16 << 20;
/// How often the files of certificates and credentials are looked at for changes.
pub const RELOAD_PERIOD: Duration = Duration::from_secs(3);
/// How long it is remembered that a password was right, or wrong, and of how many by one core, and by the process: at about
/// 100 bytes each.
pub const PASSWORD_KEEP_MS: u64 = 15 * 60 * 1000;
pub const PASSWORDS_KNOWN_MAX: usize = 8192;
/// Threads that compare passwords, at most; one for each four cores.
pub const PASSWORD_THREADS_MAX: usize = 8;
/// Passwords that wait for these threads, and for how long; more are refused.
pub const PASSWORDS_WAITING_MAX: usize = 512;
pub const PASSWORD_WAIT: Duration = Duration::from_secs(20);
/// How long a connection that has no calls may take to answer the PING of a drain's GOAWAY.
pub const HTTP2_FAREWELL_MS: u64 = 1000;
/// Streams that were reset, most because an early answer cut off their body, remembered at a time so that what is in flight
/// for them is dropped quietly, and for how long. Why not more: each keeps a row, which nobody may have memory for; frames of one
/// that is forgotten are errors of their stream (`HTTP2_STREAM_ERRORS_MAX`), and cost a RST_STREAM each.
pub const HTTP2_RESET_STREAMS_MAX: usize = 128;
pub const HTTP2_RESET_STREAM_KEEP_MS: u64 = 10_000;
/// What HTTP/2's tables take, in bytes: a row for each stream that is open or remembered, of which 378 were measured, and for
/// an open one its frames that nobody has read or sent yet, of which 520 to 550 were measured. They double when they are full,
/// and do not shrink while the connection lasts.
pub const HTTP2_ROW_LEN: u64 = 400;
pub const HTTP2_FRAMES_LEN: u64 = 640;
/// The rows that a connection is counted with from its beginning.
pub const HTTP2_ROWS_FIRST: usize = 16;
/// What one turn of a connection brings at most: bytes behind its first DATA frame, and header blocks; where there is no memory for
/// larger tables, only as many of these as there are rows that are charged. Why bounded: HTTP/2 keeps the buffer that a frame came in
/// until somebody has read the frame, and what it is to answer until it has its turn.
pub const HTTP2_TURN_LEN: usize = 16 << 10;
pub const HTTP2_TURN_BLOCKS: usize = 128;
/// DATA frames that come in a turn of a connection which is charged with `SENDING_HELD_LEN` or a larger window; with other ones,
/// and at least, as many as there are rows of its tables that are charged.
pub const HTTP2_TURN_FRAMES: usize = 64;
/// Buffers that HTTP/2's table of header fields may hold on to without memory for them, in bytes, and how many more before the
/// connection is ended (ENHANCE_YOUR_CALM) instead of told to go away when its calls are over. Why: it keeps `:path` and `:authority`
/// as cuts of what was read, 8 KiB and more of it each. A client that calls all methods we have in turn has eight to twelve of them.
pub const HTTP2_HEADERS_FREE_LEN: usize = 128 << 10;
pub const HTTP2_HEADERS_OVER_LEN: usize = 64 << 10;
/// Streams of a connection that are answered and whose short requests may still end; with more, the oldest are reset.
pub const HTTP2_BODIES_LEFT_MAX: usize = 256;
/// Chunks of a request that are shorter than this are copied when they have to wait for their call. Why not longer ones: the
/// buffer that they came in is not much longer.
pub const BODY_COPY_LEN_MAX: usize = 16 << 10;
/// Streams cancelled before they were looked at, which is at the end of the turn that brought them, and errors of single streams,
/// that end their connection. Why so many errors: who is refused many uploads has frames of many in flight.
pub const HTTP2_PENDING_RESETS_MAX: usize = 100;
pub const HTTP2_STREAM_ERRORS_MAX: usize = 1 << 16;
const _: () = assert!(HTTP2_PENDING_RESETS_MAX < HTTP2_TURN_BLOCKS);
/// Answers to PING and SETTINGS with no other frame between them that end their connection (ENHANCE_YOUR_CALM) when they come
/// within this time. Why so many: some clients send a PING for each bit of data that comes.
pub const HTTP2_ANSWERS_MAX: u32 = 1000;
pub const HTTP2_ANSWERS_PERIOD_MS: u64 = 60_000;
/// Bytes that are gathered in a connection's turn before they go to the socket, and in how many parts.
/// Why so many: over loopback a send of 1 MiB costs half of what sends of 64 KiB do.
pub const WRITE_GATHER_LEN: usize = 1 << 20;
pub const WRITE_PARTS_MAX: usize = 256;
/// Of these, bytes that are copied. Why fewer: a connection whose socket takes nothing holds them, and they are accounted to
/// no message.
pub const WRITE_COPIED_LEN: usize = 64 << 10;
/// The same when there is no memory for as many: these are within what a connection is counted with.
pub const WRITE_COPIED_LEN_MIN: usize = 4 << 10;
/// A write of more bytes is not copied when it is cut from a message. Why: the rest of a DATA frame of 16 KiB, the most that
/// many clients take, must not be, and below this a part costs as much as a copy.
pub const WRITE_COPY_LEN_MAX: usize = 4 << 10;
/// Unused buffers of `WRITE_COPIED_LEN` that a core keeps.
pub const WRITE_BUFFERS_SPARE_MAX: usize = 8;
/// Connections that may wait in a core's inbox.
pub const ACCEPT_INBOX_LEN: usize = 256;
/// Messages of at most this many bytes, requests and replies, are within what a call is counted with.
pub const SMALL_MESSAGE_LEN: usize = 4 << 10;
/// Memory that an open connection is counted with, in bytes: 29 KiB, of which one that never calls touches 19; its first
/// rows; what is gathered for it when there is no memory; and one call, so that who is let in can make one.
pub const CONNECTION_HELD_LEN: u64 = (30 << 10)
    + HTTP2_ROWS_FIRST as u64 * (HTTP2_ROW_LEN + HTTP2_FRAMES_LEN)
    + WRITE_COPIED_LEN_MIN as u64
    + CALL_HELD_LEN;
/// Memory that it is counted with besides, in bytes, once it has sent a frame of more than `SMALL_MESSAGE_LEN`, unless there is
/// memory for a larger window of it: what HTTP/2 gathers of a frame, and keeps room for from then on.
pub const SENDING_HELD_LEN: u64 = 64 << 10;
/// Memory that an open call is counted with besides its messages, in bytes: its handler's state, its headers, what HTTP/2
/// knows of its stream, and a small request and reply.
pub const CALL_HELD_LEN: u64 = 16 << 10;
/// What is kept of a call's headers, in bytes: the request's metadata as they stand, and the start of each name in them.
pub const CALLER_METADATA_LEN_MAX: usize = 2 << 10;
pub const CALLER_NAME_LEN_MAX: usize = 256;
/// Calls of a connection that are few, and may take the memory which is kept for these.
pub const CALLS_FEW_MAX: usize = 4;
/// How often whoever waits for memory looks whether another core has given some back.
pub const MEMORY_WATCH_MS: u64 = 20;
/// Requests of one connection that may wait for memory half-sent, at most; then its youngest is refused. Why so few: what
/// they were sent stays in their windows, and all of these together must leave half of the connection's window to others.
pub const REQUESTS_WAITING_MAX: usize = HTTP2_CONNECTION_WINDOW_STREAMS as usize / 2;
/// How long a half-sent request waits for memory before it is refused.
pub const REQUEST_WAIT_MS: u64 = 10_000;
/// How long a client may send nothing of a request message that it has begun: at least this, at most twice as long.
pub const REQUEST_STALL_MS: u64 = 60_000;
/// How long a Write may stand still, in the same way; then it is ended, and its upload kept for the client to resume.
pub const WRITE_IDLE_MS: u64 = 10 * 60 * 1000;
/// Bytes that a Read holds at most while its client does not read: what HTTP/2 was given, what the first of that keeps in
/// memory besides, and one read ahead.
pub const READ_HELD_LEN: usize = HTTP2_SEND_BUFFER_LEN + 2 * READ_AHEAD_FRAMES * FRAME_LEN;
/// Bytes that a Read holds while memory is scarce: one frame as it stands at rest, the same decompressed, and what is cut from
/// it for a small window.
pub const READ_PART_HELD_LEN: usize = 2 * FRAME_LEN + READ_REST_LEN;
/// How long a reader may take nothing while memory for replies is scarce: then what it was to get next is given back, and
/// read again when it goes on.
pub const READ_YIELD_MS: u64 = 250;
/// How long a client may take nothing of a reply that cannot be given back while memory is scarce; then it is cut off.
pub const REPLY_STALL_MS: u64 = 10_000;
/// What HTTP/2 may keep of a reader that has given its memory back, in bytes; who has more can be cut off.
pub const READ_REST_LEN: usize = 64 << 10;
/// Bytes of a ReadResponse, with the gRPC prefix, besides its payload of 16 KiB to 2 MiB: a prefix of 5, a tag, a length.
pub const READ_MESSAGE_OVERHEAD: usize = 5 + 1 + 3;
/// A message to a reader has at least this many bytes, if there are as many, whatever its window.
pub const READ_MESSAGE_LEN_MIN: usize = 16 << 10;
/// Bytes that a GetTree holds at most while its client does not read: a page, and what the walk has read ahead.
pub const GET_TREE_HELD_LEN: usize = 4 << 20;
/// The largest request of the reflection service, in bytes.
pub const REFLECTION_REQUEST_LEN_MAX: usize = 64 << 10;
/// The longest `resource_name` that is accepted, in bytes: it is kept for as long as an upload is.
pub const RESOURCE_NAME_LEN_MAX: usize = 4096;
/// Payload bytes in one ReadResponse at most.
pub const READ_PIECE_LEN_MAX: usize = 1 << 20;

const _: () = assert!(READ_PIECE_LEN_MAX < REPLY_LEN_MAX && FRAME_LEN <= READ_PIECE_LEN_MAX);
const _: () = assert!(
    HTTP2_CONNECTION_WINDOW_MIN as u64 <= SENDING_HELD_LEN && HTTP2_OTHER_FRAME_LEN_MAX as u64 <= SENDING_HELD_LEN
);
const _: () = assert!(3 * SMALL_MESSAGE_LEN as u64 <= CALL_HELD_LEN && CONNECTION_HELD_LEN - CALL_HELD_LEN <= 64 << 10);
const _: () = assert!(ACTION_RESULT_LEN_MAX <= ACTION_HELD_LEN);
/// gRPC connections that the server holds at a time; more are closed at once.
pub const CONNECTIONS_MAX: usize = 60_000;
/// HTTP/1.1 connections, likewise, and of these so many on each core may take the last of the memory for connections. Why counted
/// apart: so that `/metrics` answers however many gRPC clients there are.
pub const HTTP_CONNECTIONS_MAX: usize = 4_096;
pub const HTTP_CONNECTIONS_FIRST_MAX: u64 = 8;
/// The longest head of an HTTP/1.1 request, in bytes.
pub const HTTP_HEAD_LEN_MAX: usize = 32 << 10;
/// Bytes that an HTTP/1.1 connection reads ahead of its handler at most, and that one read brings.
pub const HTTP_BUFFER_LEN: usize = 64 << 10;
/// Memory that an open HTTP/1.1 connection is counted with, in bytes: what it has read ahead, the head of its request, and of its
/// answer.
pub const HTTP_CONNECTION_HELD_LEN: u64 = (HTTP_BUFFER_LEN + HTTP_HEAD_LEN_MAX + (16 << 10)) as u64;
/// How long an HTTP/1.1 connection may be idle between requests. Why above a minute: Prometheus scrapes as often.
pub const HTTP_IDLE_MS: u64 = 150_000;
/// How long the head of a request may take, from its first byte to its last.
pub const HTTP_HEAD_MS: u64 = 10_000;
/// How long a request or its answer may stand still: at least this, at most twice as long.
pub const HTTP_STALL_MS: u64 = 120_000;
/// Bytes per second that a client must bring of a body, and take of its answers, on the average of the time in which we wait for
/// it. Why so few: a bad line at home has some times as many, and the slowest that may be holds a connection, not a core.
pub const HTTP_SPEED_FLOOR: u64 = 1 << 10;
/// How long may be waited for a client besides what its bytes take at that speed.
pub const HTTP_SLOW_MS: u64 = 60_000;
/// The same at most, once it has taken much. Why so long: what it takes is seen when the kernel's buffer has drained by a part,
/// which may be 2 MiB. (That something moves at all is what `HTTP_STALL_MS` asks for.)
pub const HTTP_SLOW_TAKING_MS_MAX: u64 = 3_600_000;
const _: () = assert!(HTTP_SLOW_TAKING_MS_MAX / 1000 * HTTP_SPEED_FLOOR > 2 << 20);
/// How often calls that are refused for one cause are logged (`net::trust`).
pub const TRUST_LOG_MS: u64 = 30_000;
/// The longest body of an HTTP upload whose size no header says, in bytes: it is held until its end.
pub const HTTP_UNSIZED_LEN_MAX: usize = 4 << 20;
/// The longest value of `/ac/` with `--disable_http_ac_validation`, in bytes: it is held until its hash is known.
pub const HTTP_RAW_LEN_MAX: usize = GRPC_MESSAGE_LEN_MAX;
/// Bytes of a refused upload that are read and dropped, so that its client reads the answer and the connection goes on.
pub const HTTP_DRAIN_LEN_MAX: u64 = 1 << 20;
/// For how long, at most.
pub const HTTP_DRAIN_TIME: Duration = Duration::from_secs(5);
/// Epochs of eviction whose beginning a core remembers, to tell the age of what it evicts.
pub const EPOCHS_REMEMBERED: usize = 32;
/// Scrapes that may wait for one core, and how long one waits for all of them.
pub const METRICS_ASKS_MAX: usize = 16;
pub const METRICS_COLLECT_TIME: Duration = Duration::from_millis(40);
/// How long `/status` and `/metrics` take at most, while cores do not answer: one who asks may have to wait for a collection that was
/// begun before, and then for his own; the rest is for writing the answer.
pub const METRICS_ANSWER_TIME: Duration = Duration::from_millis(100);
const _: () = assert!(2 * METRICS_COLLECT_TIME.as_millis() + 20 <= METRICS_ANSWER_TIME.as_millis());

// One core's shard worker.

/// Requests from other cores that wait for a core, besides one for each sender. Why: 1024 deep a message costs 0.3 us, 16
/// deep 4 us, as every one wakes somebody.
pub const ROUTER_QUEUE_LEN: usize = 1024;
/// Requests of all cores that may wait for the segment pool.
pub const POOL_QUEUE_LEN: usize = 256;
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
/// Memory that an upload of a blob of this size holds at most on its owner, in bytes: its open frame, what is staged for the
/// drive or on its way there, what is gathered for the next message, and what names it. A compressed one has its decoder
/// besides; what is on its way to it is within the receive window. What larger stages have beyond this, or one beside a write
/// that is under way, is within the buffers of the memory plan.
pub const fn write_held_len(size: u64) -> u64 {
    let stage = STAGE_CHUNKS_MIN as u64 * CHUNK_LEN as u64;
    let whole = FRAME_LEN as u64 + stage + UPLOAD_MESSAGE_LEN as u64;
    (if size < whole / 3 { 3 * size } else { whole }) + (16 << 10)
}
/// The same for the largest blobs: 464 KiB. The default number of write slots is what has room for as many of these.
pub const WRITE_HELD_LEN: u64 = write_held_len(u64::MAX);
/// Writes that hold at most this many bytes may take the last quarter of the memory for writes.
pub const WRITE_SMALL_HELD_LEN: u64 = 64 << 10;
/// Memory of a decoder besides its output, in bytes: tables and one block of input.
pub const DECODER_BASE_LEN: usize = 300 << 10;
/// The window that a decoder is expected to need, in bytes: that of zstd's levels up to 6, and of Bazel. More is taken when
/// a stream asks for it.
pub const DECODER_WINDOW_LEN: u64 = 2 << 20;
/// New connections of a core that wait for memory at a time, and how long: more are closed at once, and they afterwards.
pub const CONNECTIONS_WAITING_MAX: u64 = 64;
pub const CONNECTION_WAIT_MS: u64 = 1_000;
/// How often a write that waits for memory looks for it.
pub const WRITE_MEMORY_WATCH_MS: u64 = 10;
/// Large writes that may wait for memory on one core, however little there is of it.
pub const WRITE_LINE_LEN_MIN: usize = 4;
/// How long a write waits for a slot when nothing else is said (`--write_queue_wait`), and at most.
pub const WRITE_QUEUE_WAIT: Duration = Duration::from_millis(250);
pub const WRITE_QUEUE_WAIT_MAX: Duration = Duration::from_secs(60);
/// Writes that may wait on one core, for a slot and for memory together. Why so few: each takes one of `ROUTER_REQUESTS_MAX`, and
/// reads must find room beside them.
pub const WRITE_QUEUE_LEN: usize = ROUTER_REQUESTS_MAX / 2;
/// How long an upload may send nothing while another write waits for its slot; then it is parked.
pub const WRITE_SLOT_IDLE_MS: u64 = 5_000;
/// How long a core that is asked for an idle slot may take to answer before the next one is asked.
pub const WRITE_SLOT_ANSWER_MS: u64 = 100;
/// How often a core whose slots are wanted looks for such uploads.
pub const WRITE_GATE_TICK_MS: u64 = 50;
/// Lines about refused writes that are logged in a second; the rest is counted.
pub const SHED_LINES_MAX: u32 = 10;
/// Interrupted uploads that a core keeps.
pub const PARKED_UPLOADS_MAX: usize = 256;
/// Memory that a core's interrupted uploads hold, in bytes, whatever the memory limit.
pub const PARKED_MEMORY_MAX: usize = 16 << 20;
/// Disk space that a core's interrupted uploads hold, in raw bytes.
pub const PARKED_DISK_MAX: u64 = 1 << 30;

const _: () = assert!(PARKED_MEMORY_MAX > 2 * FRAME_LEN && SMALL_BLOB_LEN_MAX == FRAME_LEN);
/// Frames of a large blob that one disk read brings at most.
pub const READ_AHEAD_FRAMES: usize = 2;
/// The same where no more are asked for, and they are sent as they stand. Why: 1 MiB in one read costs less than in two.
pub const READ_AT_ONCE_FRAMES: usize = READ_PIECE_LEN_MAX / FRAME_LEN;
/// How long the start waits for an address that is still in use, and how long between two tries.
pub const BIND_TRY_TIME: Duration = Duration::from_secs(2);
pub const BIND_RETRY_TIME: Duration = Duration::from_millis(20);

/// How long a server that takes over waits for the directory, and how often it looks. Why so long: the other one's end is
/// bounded by its own `--shutdown_timeout`, and a server that gave up would leave none.
pub const TAKE_OVER_TIME: Duration = Duration::from_secs(3600);
pub const TAKE_OVER_LOOK: Duration = Duration::from_millis(2);
/// How long, and how often, it tries to open a directory that is free and cannot be opened.
pub const TAKE_OVER_TRY_TIME: Duration = Duration::from_secs(60);
pub const TAKE_OVER_TRY_PAUSE: Duration = Duration::from_millis(100);

// The disk of one core.

/// How long a record waits in the write buffer.
pub const FLUSH_DELAY: Duration = Duration::from_millis(5);
/// One more `FLUSH_DELAY` for each so many shards that had something to flush the last time, up to `FLUSH_DELAYS_MAX` in
/// all. Why: every shard's flush is a write of its own, so a core with many busy shards would write a record or two at
/// a time, at 15 us of CPU each.
pub const FLUSH_SHARDS: usize = 8;
pub const FLUSH_DELAYS_MAX: usize = 8;
/// The same when somebody waits for it.
pub const FLUSH_DELAY_ACK: Duration = Duration::from_millis(1);
/// How often dirty files are synced.
pub const SYNC_PERIOD: Duration = Duration::from_secs(1);
/// How often the open segments get a footer for what they have so far.
pub const CHECKPOINT_PERIOD: Duration = Duration::from_secs(60);
/// Writes that fail in a row before appends are refused, and for how long.
pub const WRITE_FAILURES_MAX: u32 = 8;
pub const WRITE_FAILURES_PAUSE: Duration = Duration::from_secs(10);
/// The most that one read brings of a large blob, in bytes at rest (one frame may be longer).
pub const LARGE_READ_LEN_MAX: u64 = 1 << 20;
/// Chunks of a staging buffer, by how many large blobs this core is writing: few get big writes, and fill one while another is
/// on its way; more than these have one each, of the least. What is above that is had only while there is memory for it.
pub const STAGE_CHUNKS: [(usize, u32); 3] = [(4, 16), (16, 8), (256, 4)];
pub const STAGE_CHUNKS_MIN: u32 = 2;
/// Free chunks of a shard below which a writer asks for the next segment ahead of need.
pub const CHUNKS_AHEAD: u32 = 32;

// The cache directory.

/// The smallest `--max_size`, in bytes.
pub const MAX_SIZE_MIN: u64 = 64 << 20;
/// The largest `--max_size`, in bytes: what 40 bits can number in units of 64 bytes.
pub const MAX_SIZE_MAX: u64 = 64 << 40;
/// What a segment has, in bytes; within these about a thousandth of the cache.
pub const SEGMENT_LEN_MIN: u64 = 1 << 20;
pub const SEGMENT_LEN_MAX: u64 = 32 << 20;
/// From this size on, in bytes, a cache has all the shards there can be. Why not always: each shard has a write buffer and
/// a log of its own, so more of them make smaller writes; four for each core of a 16-core box spread the work.
pub const LARGE_CACHE_LEN: u64 = 1 << 40;
/// Segments that a volume has at least for each of its shards when it is made, and after it shrank.
pub const SEGMENTS_PER_SHARD: u64 = 8;
pub const SEGMENTS_PER_SHARD_MIN: u64 = 4;
/// Threads that read segment headers at start-up.
pub const HEADER_READERS: usize = 16;

// The index.

/// Memory for an entry of the index, in bytes: 18 to 24.
pub const INDEX_ENTRY_LEN: u64 = 20;
/// Memory for a large blob besides, in bytes: an entry of a table that is half empty at worst, and the list of its chunks.
pub const INDEX_LARGE_LEN: u64 = 192;
/// Bytes at rest of an entry of the cache, on the average, as the start foresees the index.
pub const ENTRY_LEN_EXPECTED: u64 = 32 << 10;
/// How often a core looks how long its part of the index is.
pub const INDEX_LOOK: Duration = Duration::from_millis(500);

// Purges.

/// Headers of records that a purge reads at a time on one core, and keys that it removes with one sync.
pub const PURGE_READS_MAX: usize = 32;
pub const PURGE_BATCH: usize = 256;
/// How often a key is removed again that is stored anew while it is purged.
pub const PURGE_TRIES_MAX: usize = 8;
/// Purges of many that stand, at most. With more, the two oldest become one that covers what both do.
pub const PURGES_STANDING_MAX: usize = 64;
/// How long the purge of a thing waits for its upload to a backend to end.
pub const PURGE_UPLOAD_WAIT: Duration = Duration::from_secs(30);
/// How often a purge that goes on says so in the log.
pub const PURGE_PROGRESS: Duration = Duration::from_secs(10);

// The end.

/// How often a core looks whether it has been asked for anything, where there is an `--idle_timeout`.
pub const IDLE_LOOK: Duration = Duration::from_secs(1);

/// How long connections may take to notice that they have been cut.
pub const CUT_TIME: Duration = Duration::from_secs(2);

// Backends.

/// How long a connection to a backend is kept unused. Why: S3 closes its end after about 20 s.
pub const BACKEND_IDLE_MS: u64 = 15_000;
/// How long the addresses of a backend's name are used before they are looked up again.
pub const BACKEND_ADDRESSES_KEEP_MS: u64 = 30_000;
/// How long an address of a backend's name may take to answer while there is another one to try. Why so short: a probe and a
/// check of existence have seconds in all, and must get to one that is well.
pub const BACKEND_DIAL_MS: u64 = 1_000;
/// The longest wait for a connection and the head of a backend's answer, all tries of a read together.
pub const BACKEND_HEAD_MS: u64 = 10_000;
/// How long of that a read waits for its turn; then it is a miss, which says nothing of the backend. Why half: what begins has
/// the rest to be answered in, so that a backend that is well is not taken for a sick one because much is asked of it.
pub const BACKEND_TURN_MS: u64 = BACKEND_HEAD_MS / 2;
/// Bytes per second below which a body, waited for during 10 s, has stalled.
pub const BACKEND_SPEED_FLOOR: u64 = 64 << 10;
/// The longest error document that is read, in bytes.
pub const BACKEND_ERROR_BODY_MAX: usize = 64 << 10;
/// Notes about backends that may wait for a core, besides one for each sender.
pub const BACKEND_NOTES_LEN: usize = 1024;
/// Existence checks of one backend that run at a time on one core.
pub const BACKEND_HEADS_MAX: usize = 64;
/// Answers about existence that a core keeps of one backend, at about 64 bytes each.
pub const BACKEND_EXISTENCE_LEN: usize = 1 << 16;
/// How long it is believed that a backend has an object, and that it has not. Why so short: others upload to it too.
pub const BACKEND_PRESENT_MS: u64 = 10 * 60 * 1000;
pub const BACKEND_ABSENT_MS: u64 = 5_000;
/// Wrong objects of one bucket that a core remembers: the newest.
pub const BACKEND_WRONG_MAX: usize = 4096;
/// How often the same trouble of a backend is logged.
pub const BACKEND_LOG_MS: u64 = 60_000;
/// How often the ledger of uploads is synced.
pub const BACKEND_LEDGER_SYNC_MS: u64 = 1_000;
/// How long after a failed write it is written anew.
pub const BACKEND_LEDGER_RETRY_MS: u64 = 60_000;
/// Entries of a ledger that may be struck out before it is written anew: half a megabyte.
pub const BACKEND_LEDGER_STRUCK_MIN: usize = 10_000;
/// Bytes of a ledger that a start reads at most: more than any that was written anew in time (`BACKEND_OWED_MAX`).
pub const BACKEND_LEDGER_LEN_MAX: u64 = 2 << 30;
/// Uploads of one backend that are owed at most, at about 100 bytes of memory and 56 of disk each.
pub const BACKEND_OWED_MAX: usize = 1 << 20;
/// How often the records of owed uploads are marked as used, and of how many of them at most: the oldest.
pub const BACKEND_OWED_KEEP_MS: u64 = 60_000;
pub const BACKEND_OWED_KEPT_MAX: usize = 1 << 16;
/// How often owed uploads are tried again while the backend is well, and how seldom at last while it takes none.
pub const BACKEND_OWED_RETRY_MS: u64 = 15_000;
pub const BACKEND_OWED_RETRY_MAX_MS: u64 = 300_000;
/// The breaker of a backend: failures in a row that open it, how long it stays open, how long its probe may take.
pub const BREAKER_FAILURES: u32 = 5;
pub const BREAKER_OPEN_MS: u64 = 15_000;
pub const BREAKER_PROBE_MS: u64 = 5_000;
/// Bytes of an object that a probe reads at most.
pub const BREAKER_PROBE_LEN: u64 = 64 << 10;
/// Objects that a core waits for at a time from one backend, one for each distinct blob or action; with more a read is a miss.
pub const FLIGHTS_MAX: usize = 4096;
/// Of these, how many come in at a time: what one part in so many of the memory limit has room for, within bounds.
pub const FLIGHT_MEMORY_PART: u64 = 8;
pub const FLIGHTS_RUNNING_MIN: usize = 4;
pub const FLIGHTS_RUNNING_MAX: usize = 128;
/// Bytes that one holds: the window below, a frame that is filled, one on its way to the disk, one of the connection.
pub const FLIGHT_HELD_LEN: u64 = FLIGHT_WINDOW_LEN + 3 * FRAME_LEN as u64;
/// Raw bytes of an object on its way that are held for its readers.
pub const FLIGHT_WINDOW_LEN: u64 = 512 << 10;
/// How long an answer keeps its memory while it may be a backend that it waits for; then others have it meanwhile.
pub const BACKEND_HOLD_MS: u64 = 50;
/// How long an object on its way waits for its foremost reader before it goes on without.
pub const READER_WAIT_MS: u64 = 100;
/// Requests on one core that wait for one backend; with more, what is not here is a miss at once.
pub const BACKEND_WAITING_MAX: usize = 16_384;
