//! One row for each metric: what it is called, what it counts, and what an operator does about it.
//!
//! Names are bazel-remote's where it has them, so that its dashboards and alerts go on to work. The names of
//! `Scope::Ours` get a prefix (`--metrics_prefix`); those of `Scope::Fixed` are conventions of their own (`grpc_server_`
//! is go-grpc-prometheus, `http_` and `process_` are what Prometheus' own clients say) and never change.

/// How a metric behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from the start of the process.
    Counter,
    Gauge,
    Histogram,
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Seconds,
    /// Things.
    Count,
}

/// Whether `--metrics_prefix` stands in front of the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Ours,
    Fixed,
}

/// One metric.
#[derive(Debug)]
pub struct Row {
    pub metric: Metric,
    /// Without the prefix.
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    pub scope: Scope,
    pub labels: &'static [&'static str],
    /// What it says, and what to do about it.
    pub help: &'static str,
}

macro_rules! table {
    ($($metric:ident: $scope:ident $kind:ident $unit:ident $name:literal $labels:tt $help:literal)*) => {
        /// Names a metric.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Metric {
            $(#[doc = $help] $metric,)*
        }

        /// All metrics, in the order in which they are shown.
        pub const TABLE: &[Row] = &[$(Row {
            metric: Metric::$metric,
            name: $name,
            kind: Kind::$kind,
            unit: Unit::$unit,
            scope: Scope::$scope,
            labels: &$labels,
            help: $help,
        },)*];
    };
}

/// The row of a metric.
pub fn row(metric: Metric) -> &'static Row {
    &TABLE[metric as usize]
}

table! {
    DiskCacheSize: Ours Gauge Bytes "disk_cache_size_bytes" []
        "Disk space that holds blobs or is reserved for them. Near the limit is normal: the cache is full and evicts."
    DiskCacheSizeLimit: Ours Gauge Bytes "disk_cache_size_bytes_limit" ["type"]
        "Disk space that the cache may take: it evicts to stay below (evict), and never passes the limit (reject). \
         Set by --max_size."
    DiskCacheLogical: Ours Gauge Bytes "disk_cache_logical_bytes" []
        "What the cache would take uncompressed: an estimate, from the space in use and the compression of what was \
         stored since the start. Close to the size: what you build does not compress, try --storage_mode uncompressed."
    DiskCacheReserved: Ours Gauge Bytes "disk_cache_reserved_bytes" []
        "Declared bytes of the large uploads that are being written; they are part of the space in use as they come."
    DiskCacheEntries: Ours Gauge Count "disk_cache_entries" []
        "Blobs and action results in the cache. A drop without evictions or restarts means damaged records."
    DiskCacheLargeBlobs: Ours Gauge Count "disk_cache_large_blobs" []
        "Those of the entries that are kept in chunks, as they are larger than 256 KiB."
    DiskCacheIndex: Ours Gauge Bytes "disk_cache_index_bytes" []
        "Memory that the index of the disk cache takes, with the lists of large blobs. It grows out of what --memory_limit has \
         for clients: plan for about 20 bytes for each entry, and 192 for each large blob."
    DiskCacheRecoveringShards: Ours Gauge Count "disk_cache_recovering_shards" []
        "Shards that are still being read in after a start; requests for them wait. If it stays above 0 for minutes, \
         the drive is slow."
    DiskCacheEntrySize: Ours Histogram Bytes "disk_cache_entry_bytes" []
        "Raw bytes of each entry that was stored since the start."
    DiskCacheEvictedEntries: Ours Counter Count "disk_cache_evicted_entries_total" []
        "Entries that were evicted for space. If what goes is younger than your builds' period, raise --max_size."
    DiskCacheEvicted: Ours Counter Bytes "disk_cache_evicted_bytes_total" []
        "Their bytes as they stood on disk."
    DiskCacheEvictedAge: Ours Histogram Seconds "disk_cache_evicted_age_seconds" []
        "For how long evicted entries had not been used, at least; time before the start of the process is not counted. \
         Less than the time between two builds of the same thing: raise --max_size."
    DiskCacheAppendedEntries: Ours Counter Count "disk_cache_appended_entries_total" []
        "Records written to the logs, copies that eviction makes included."
    DiskCacheAppended: Ours Counter Bytes "disk_cache_appended_bytes_total" []
        "Bytes of records written to the logs, copies that eviction makes included: compare with the drive's \
         endurance."
    DiskCacheReinsertedEntries: Ours Counter Count "disk_cache_reinserted_entries_total" []
        "Records copied forward by eviction because they had been used. If they are most of what is appended, raise \
         --max_size."
    DiskCacheReinserted: Ours Counter Bytes "disk_cache_reinserted_bytes_total" []
        "Bytes of records copied forward by eviction: write amplification."
    DiskCacheDamaged: Ours Counter Count "disk_cache_damaged_records_total" []
        "Records dropped because their bytes were not what was written. Anything above 0 without a power cut: check \
         the drive (smartctl)."
    DiskCacheReadErrors: Ours Counter Count "disk_cache_read_errors_total" []
        "Reads that the drive refused. Above 0: check the kernel log and replace the drive."
    DiskCacheWriteErrors: Ours Counter Count "disk_cache_write_errors_total" []
        "Writes and syncs that the drive refused. Above 0: check the kernel log and replace the drive."
    DiskFlushTime: Ours Histogram Seconds "disk_flush_seconds" []
        "How long writes to the drive took. Above 10 ms for most: the drive is overloaded or shared."
    DiskSyncTime: Ours Histogram Seconds "disk_sync_seconds" []
        "How long fdatasync of the data files took, about once a second and core. With --ack durable every upload \
         waits for one."
    IncomingRequests: Ours Counter Count "incoming_requests_total" ["kind", "method", "status"]
        "What clients asked for (get, contains) of cas and ac, and whether it was there. A fall of the hit ratio \
         after a deployment usually means changed action keys."
    WriteSlotsInflight: Ours Gauge Count "cas_write_slots_inflight" []
        "Writes of blobs that are let in now, and places on their way from core to core. At the limit for long: more is uploaded than the drive or the CPU takes, see \
         cas_write_shed_total."
    WriteSlotsLimit: Ours Gauge Count "cas_write_slots_limit" []
        "Writes that may be in at a time: --max_inflight_cas_writes, or what the memory limit allows."
    WritesWaiting: Ours Gauge Count "cas_writes_waiting" []
        "Writes that wait for a slot now, for --write_queue_wait at most."
    WritesAdmitted: Ours Counter Count "cas_writes_admitted_total" []
        "Writes that were let in."
    WritesAdmittedLate: Ours Counter Count "cas_writes_admitted_late_total" []
        "Those of them that had to wait. Growing: the next burst is refused in part; add cores or a server."
    WritesShed: Ours Counter Count "cas_write_shed_total" ["reason"]
        "Writes that were refused because no slot came free in time (timeout), too many waited (queue_full), or the memory \
         limit had no room for them (memory). Each costs a miss later. Growing in every build: raise --memory_limit, with \
         --max_inflight_cas_writes unless it is for memory, or add a server."
    WriteSlotsBorrowed: Ours Counter Count "cas_write_slots_borrowed_total" []
        "Slots that one core took from another. Large against the writes: uploads are not spread over the cores."
    WritesYielded: Ours Counter Count "cas_writes_yielded_total" []
        "Uploads that stood still and gave their slot to one that waited; their clients may resume them. Growing: clients or \
         their network stall in the middle of uploads."
    StoredBlobs: Ours Counter Count "stored_blobs_total" []
        "Blobs that were verified and stored."
    Stored: Ours Counter Bytes "stored_bytes_total" []
        "Their bytes before compression."
    PresentBlobs: Ours Counter Count "present_blobs_total" []
        "Uploads answered without taking the bytes, because the blob was here. Many: clients do not ask \
         FindMissingBlobs first."
    ParkedUploads: Ours Gauge Count "parked_uploads" []
        "Uploads that were cut off and are kept for their clients to resume. Many: look for a network or proxy that \
         cuts connections."
    RamCacheHits: Ours Counter Count "ram_cache_hits_total" []
        "Reads answered from memory."
    RamCacheMisses: Ours Counter Count "ram_cache_misses_total" []
        "Reads that were not in memory. If most are, and memory is free, raise --ram_cache."
    RamCacheEvicted: Ours Counter Count "ram_cache_evicted_entries_total" []
        "Records pushed out of memory by others."
    RamCacheEntries: Ours Gauge Count "ram_cache_entries" []
        "Records in memory."
    MemoryHeld: Ours Gauge Bytes "memory_held_bytes" ["use"]
        "Memory held for what clients do, by use: the index, connections with their calls, TLS, requests, replies until they have gone \
         out, writes with their open frames, decoders, windows, parked uploads, and hot records. At its share of the limit each makes clients wait: raise \
         --memory_limit, or lower their concurrency."
    MemoryLimit: Ours Gauge Bytes "memory_limit_bytes" []
        "What --memory_limit allows."
    Received: Ours Counter Bytes "received_bytes_total" ["protocol"]
        "Bytes of request bodies."
    Sent: Ours Counter Bytes "sent_bytes_total" ["protocol"]
        "Bytes of response bodies."
    Connections: Ours Gauge Count "connections" ["core", "protocol"]
        "Open connections. One core with far more than others for long: restart the clients that hold many."
    ConnectionsRefused: Ours Counter Count "connections_refused_total" ["protocol"]
        "Connections closed at once because too many were open. Above 0: find the client that opens them, or add a \
         server."
    ConnectionsFailed: Ours Counter Count "connections_failed_total" ["protocol"]
        "Connections ended for breaking the protocol or its limits. Growing: a broken client or a scanner; the debug \
         log names the rule."
    CallsInflight: Ours Gauge Count "calls_inflight" []
        "gRPC calls (HTTP/2 streams) that run now."
    CallsCut: Ours Counter Count "calls_cut_total" []
        "gRPC calls that ended because their client cancelled, vanished, or its deadline passed. Growing with \
         latency: the server is too slow for its clients."
    HandlerPanics: Ours Counter Count "handler_panics_total" []
        "Panics that ended a call, a request, an upload or a connection. Above 0 is a bug: report it with the log's line."
    Tasks: Ours Gauge Count "tasks" []
        "Uploads and streams that the owners of blobs work on."
    CoreBusyTime: Ours Counter Seconds "core_busy_seconds_total" ["core"]
        "Time that each core's executor was not asleep. A rate of 1 is a full core: add cores, or spread the load."
    CoreCpuTime: Ours Counter Seconds "core_cpu_seconds_total" ["core"]
        "CPU time of each core's thread. Much less than core_busy_seconds_total: other processes take its CPU."
    CoreTasksRun: Ours Counter Count "core_tasks_run_total" ["core"]
        "Turns that tasks of each core had."
    CoreStalls: Ours Counter Count "core_stalls_total" ["core"]
        "How often a core's executor came to its timer more than 20 ms late. Growing: other processes take its CPU, \
         or a task runs too long."
    CoreStallTime: Ours Counter Seconds "core_stall_seconds_total" ["core"]
        "By how much those were late."
    CoreQueueDelay: Ours Gauge Seconds "core_queue_delay_seconds" ["core"]
        "How long work waits for its turn on each core. Above 5 ms compression gives way; above 20 ms blobs are \
         stored raw: add cores."
    CoreMessages: Ours Counter Count "core_messages_total" ["core"]
        "Requests that each core sent to others that own the blob."
    CoreMessagesWaiting: Ours Gauge Count "core_messages_waiting" ["core"]
        "Requests from other cores that wait for this one. At 1024 the senders wait: that core is overloaded or \
         stuck."
    CoresSilent: Ours Gauge Count "cores_silent" []
        "Cores that did not report in time for this scrape; their last values are shown. Above 0 again and again: a \
         core is stuck, see core_stalls_total."
    BuildInfo: Ours Gauge Count "build_info" ["revision", "version"]
        "Always 1; the labels say what runs."
    GrpcStarted: Fixed Counter Count "grpc_server_started_total" ["grpc_method", "grpc_service", "grpc_type"]
        "Calls that were started."
    GrpcHandled: Fixed Counter Count "grpc_server_handled_total" ["grpc_code", "grpc_method", "grpc_service", "grpc_type"]
        "Calls that ended, by their status. Look at Internal, Unavailable and ResourceExhausted first."
    GrpcReceived: Fixed Counter Count "grpc_server_msg_received_total" ["grpc_method", "grpc_service", "grpc_type"]
        "Messages received."
    GrpcSent: Fixed Counter Count "grpc_server_msg_sent_total" ["grpc_method", "grpc_service", "grpc_type"]
        "Messages sent."
    GrpcTime: Fixed Histogram Seconds "grpc_server_handling_seconds" ["grpc_method", "grpc_service", "grpc_type"]
        "From a call's headers to its status, transfer included."
    HttpTime: Fixed Histogram Seconds "http_request_duration_seconds" ["code", "handler", "method", "service"]
        "From a request's head to the last byte of its answer."
    HttpSize: Fixed Histogram Bytes "http_response_size_bytes" ["code", "handler", "method", "service"]
        "Bytes of answers' bodies."
    HttpInflight: Fixed Gauge Count "http_requests_inflight" ["handler", "service"]
        "HTTP requests that are being answered now."
    S3CacheHits: Ours Counter Count "s3_cache_hits" ["backend"]
        "Objects that a backend had when the cache did not."
    S3CacheMisses: Ours Counter Count "s3_cache_misses" ["backend"]
        "Objects that a backend was asked for in vain, its failures included. See s3_failures_total for those."
    S3ShortCircuits: Ours Counter Count "s3_short_circuits_total" ["backend"]
        "Reads that missed without asking, as the backend's breaker is open."
    S3Failures: Ours Counter Count "s3_failures_total" ["backend"]
        "Operations that failed after all their tries. Clients see misses; look at the backend, and at the log for its \
         answers."
    S3Throttles: Ours Counter Count "s3_throttled_total" ["backend"]
        "Answers 429 and 503. Each halves s3_upload_pace. Growing all day: ask for a higher limit."
    S3WrongObjects: Ours Counter Count "s3_wrong_objects_total" ["backend"]
        "Objects whose bytes are not what their name says, or are more or fewer than a client asked for. They are never \
         served so, and replaced by the next upload. Look for who else writes to the bucket."
    S3RequestTime: Ours Histogram Seconds "s3_request_duration_seconds" ["backend", "operation"]
        "Time of backend operations that got an answer, their bodies included."
    S3BreakerState: Ours Gauge Count "s3_breaker_state" ["backend"]
        "The backend's breaker: 0 closed, 1 half-open, 2 open. Open: reads miss at once and uploads are owed. Mend the \
         backend; it closes by itself within 15 s."
    S3BreakerTransitions: Ours Counter Count "s3_breaker_transitions_total" ["backend", "to"]
        "Changes of the breaker's state. Many: the backend flaps."
    S3UploadOutcomes: Ours Counter Count "s3_upload_outcomes_total" ["backend", "reason", "status"]
        "How uploads ended. What ends as an error for a passing reason is owed and tried again; access_denied and \
         evicted are not."
    S3UploadQueueDepth: Ours Gauge Count "s3_upload_queue_depth" ["backend"]
        "Uploads that wait or run. Growing for hours: more --num_uploaders, or a faster backend."
    S3UploadQueueCoalesced: Ours Counter Count "s3_upload_queue_coalesced_total" ["backend"]
        "Uploads that were asked for while they waited already."
    S3UploadPace: Ours Gauge Count "s3_upload_pace" ["backend"]
        "Uploads that may run at a time: --num_uploaders, less when the backend throttles."
    S3OwedUploads: Ours Gauge Count "s3_owed_uploads" ["backend"]
        "Uploads that failed or did not fit the queue and are kept on disk for later. Not falling while the breaker is \
         closed: look at s3_upload_outcomes_total."
    S3OwedRejected: Ours Counter Count "s3_owed_rejected_total" ["backend"]
        "Uploads that are lost, as too many are owed already. The blobs stay in this cache only."
    PurgedEntries: Ours Counter Count "purged_entries_total" ["kind"]
        "Blobs (cas) and action results (ac) that administrators have purged. What was purged is built again: expect misses."
    PurgesFailed: Ours Counter Count "purges_failed_total" []
        "Purges that ended with an error, as the drive or a backend refused, or as what was to go was stored again as fast as \
         it went. What they were to take may come back: the log says why; ask again."
    AccessDenied: Ours Counter Count "access_denied_total" ["reason"]
        "Requests that were refused for want of a credential that may (no_credential, role), because one was wrong \
         (malformed, wrong_password, wrong_token), or because too many passwords waited to be compared (busy). Many wrong \
         ones: somebody guesses, or a client was not told of a change."
    PasswordsCompared: Ours Counter Count "passwords_compared_total" []
        "Passwords that were not known from shortly before and went to the threads that hash. Each user a few times an \
         hour is normal; thousands: somebody guesses."
    TlsHandshakes: Ours Counter Count "tls_handshakes_total" ["result"]
        "TLS handshakes that ended: done, failed (a client without TLS, or that does not trust the certificate, or whose \
         own is not trusted), late, refused (too many at a time)."
    TlsNotAfter: Ours Gauge Seconds "tls_certificate_not_after_seconds" []
        "When the server's certificate ends to be valid, in seconds since 1970. A new one in its place is taken without a \
         restart."
    Reloads: Ours Counter Count "reloads_total" ["result", "what"]
        "Changed files that were read again: certificates, and what says who may do what. Failed: the log says why; what \
         was read before stays until they are mended."
    S3OrphanedUploads: Ours Gauge Count "s3_orphaned_uploads" ["ledger"]
        "Uploads owed to a backend that is not configured any more, by the name of its ledger below --dir. They wait \
         for it to come back; delete the file in uploads/ if it never will."
    S3DefaultBackendFallback: Ours Counter Count "s3_default_backend_fallback_total" ["operation"]
        "Operations on the default backend for requests that named none: those of HTTP. Growing without HTTP clients \
         is a bug."
    S3PrefixMissing: Ours Counter Count "s3_prefix_missing_total" ["operation"]
        "Operations below the backend's own prefix where every gRPC call must have one: those of HTTP. Keep its port \
         from whoever must not see them."
    S3SelectorRejected: Ours Counter Count "s3_backend_selector_rejected_total" ["reason"]
        "Calls refused for the backend or the bucket that they named, or did not name. After a change of the map: the \
         callers are configured otherwise."
    StoragePrefixRejected: Ours Counter Count "storage_prefix_rejected_total" ["reason"]
        "Calls refused for their storage prefix. Callers make it themselves, so this is theirs to mend."
    AuthSecretRejected: Ours Counter Count "auth_secret_rejected_total" ["reason"]
        "Calls refused for the shared secret. A mismatch: callers and this server have different ones."
    ProcessCpu: Fixed Counter Seconds "process_cpu_seconds_total" []
        "CPU time of the process."
    ProcessOpenFds: Fixed Gauge Count "process_open_fds" []
        "Open file descriptors. Near process_max_fds: raise LimitNOFILE, or look for clients that open connections \
         without end."
    ProcessMaxFds: Fixed Gauge Count "process_max_fds" []
        "The most that the process may have open."
    ProcessResident: Fixed Gauge Bytes "process_resident_memory_bytes" []
        "Resident memory. Far above the memory limit plus the index: report it."
    ProcessVirtual: Fixed Gauge Bytes "process_virtual_memory_bytes" []
        "Address space; says little."
    ProcessStart: Fixed Gauge Seconds "process_start_time_seconds" []
        "When the process started, in seconds since 1970. A jump is a restart."
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a row stands where its metric says, and names follow Prometheus' rules: base units, `_total` for counters
    /// and for nothing else, labels in order. Method: every row.
    #[test]
    fn rows_follow_the_rules() {
        for (at, row) in TABLE.iter().enumerate() {
            let name = row.name;
            assert_eq!(row.metric as usize, at);
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{name}");
            // bazel-remote's names are what they are.
            let is_theirs = matches!(row.metric, Metric::S3CacheHits | Metric::S3CacheMisses);
            assert_eq!(row.kind == Kind::Counter && !is_theirs, name.ends_with("_total"), "{name}");
            assert_eq!(row.unit == Unit::Bytes, name.contains("_bytes"), "{name}");
            assert_eq!(row.unit == Unit::Seconds, name.contains("_seconds"), "{name}");
            assert!(row.labels.is_sorted(), "{name}");
            assert!(row.help.ends_with('.') && row.help.len() > 8, "{name}");
        }
    }

    /// Goal: dashboards and alerts name these, so that a change of a name, a kind or a label is seen and wanted.
    /// Method: a snapshot of the whole table; when it is to change, the test prints what to put there.
    #[test]
    fn names_are_what_dashboards_know() {
        let line = |row: &Row| {
            let prefix = if row.scope == Scope::Ours { "*_" } else { "" };
            format!("{prefix}{}{{{}}} {:?}\n", row.name, row.labels.join(","), row.kind)
        };
        let now: String = TABLE.iter().map(line).collect();
        let known = include_str!("names.txt");
        assert!(now == known, "src/metrics/names.txt is not current; it should be:\n{now}");
    }
}
