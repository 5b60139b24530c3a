//! `build.bazel.remote.execution.v2.Capabilities`.

use bytes::Bytes;

use super::{CallContext, Reply, Services, Status, decode, reply};
use crate::limits;
use crate::store::Store;
use crate::wire::reapi::{
    ActionCacheUpdateCapabilities, CacheCapabilities, GetCapabilitiesRequest, PriorityCapabilities, ServerCapabilities,
    compressor, digest_function, priority_capabilities::PriorityRange, symlink_absolute_path_strategy,
};
use crate::wire::semver::SemVer;

/// `GetCapabilities`. The same for every instance.
pub async fn get_capabilities<S: Store>(
    services: &Services<S>,
    context: &CallContext,
    request: Bytes,
) -> Result<Reply, Status> {
    decode::<GetCapabilitiesRequest>(request)?;
    let zstd = vec![compressor::Value::Zstd as i32];
    let cache = CacheCapabilities {
        digest_functions: vec![digest_function::Value::Sha256 as i32],
        action_cache_update_capabilities: Some(ActionCacheUpdateCapabilities { update_enabled: !context.read_only }),
        // Why: Bazel refuses to start when --remote_result_cache_priority is outside; priorities change nothing here.
        cache_priority_capabilities: Some(PriorityCapabilities {
            priorities: vec![PriorityRange { min_priority: i32::MIN, max_priority: i32::MAX }],
        }),
        max_batch_total_size_bytes: limits::BATCH_TOTAL_SIZE_MAX as i64,
        // Why: with anything less Bazel refuses outputs that are absolute symlinks.
        symlink_absolute_path_strategy: symlink_absolute_path_strategy::Value::Allowed as i32,
        supported_compressors: zstd.clone(),
        supported_batch_update_compressors: zstd,
        max_cas_blob_size_bytes: i64::try_from(services.options.max_blob_size.get()).unwrap_or(i64::MAX),
        ..CacheCapabilities::default()
    };
    // Why: old Bazel needs an overlap with 2.0. Newer Bazel chooses the Command's encoding, and so the action's key, by
    // the high version, so it must not change while a cache is in use.
    let version = |minor| Some(SemVer { major: 2, minor, ..SemVer::default() });
    Ok(reply::encode(&ServerCapabilities {
        cache_capabilities: Some(cache),
        low_api_version: version(0),
        high_api_version: version(12),
        ..ServerCapabilities::default()
    }))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use prost::Message;

    use super::*;
    use crate::service::testing;

    fn ask(context: &CallContext, max_blob_size: u64) -> ServerCapabilities {
        let (_, services) = testing::services();
        services.options.max_blob_size.set(max_blob_size);
        let reply = get_capabilities(&services, context, Bytes::new()).now_or_never().expect("ready").expect("served");
        ServerCapabilities::decode(&reply.concat()[..]).expect("a message")
    }

    /// Goal: what is announced is what REAPI asks of a cache-only server, and what is served. Method: the whole answer.
    #[test]
    fn announces_a_cache() {
        let answer = ask(&CallContext::default(), 1 << 40);
        let version = |v: Option<SemVer>| v.map(|v| (v.major, v.minor, v.patch));
        assert_eq!(version(answer.low_api_version), Some((2, 0, 0)));
        assert_eq!(version(answer.high_api_version), Some((2, 12, 0)));
        assert_eq!(answer.execution_capabilities, None);
        let cache = answer.cache_capabilities.expect("a cache");
        assert_eq!(cache.digest_functions, [1]);
        assert_eq!((cache.supported_compressors, cache.supported_batch_update_compressors), (vec![1], vec![1]));
        assert_eq!(cache.max_batch_total_size_bytes, (4 << 20) - (64 << 10));
        assert_eq!(cache.max_cas_blob_size_bytes, 1 << 40);
        assert_eq!(cache.symlink_absolute_path_strategy, 2);
        assert!(!cache.split_blob_support && !cache.splice_blob_support);
        assert!(cache.action_cache_update_capabilities.expect("set").update_enabled);
    }

    /// Goal: a reader is told that it may not write, and a size without bound fits the field.
    #[test]
    fn tells_readers_apart() {
        let answer = ask(&CallContext { read_only: true, ..CallContext::default() }, u64::MAX);
        let cache = answer.cache_capabilities.expect("a cache");
        assert!(!cache.action_cache_update_capabilities.expect("set").update_enabled);
        assert_eq!(cache.max_cas_blob_size_bytes, i64::MAX);
    }
}
