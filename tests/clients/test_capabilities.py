"""Goal: what the server announces is what clients need and what it does.
Method: read GetCapabilities by gRPC and compare with the rules of the Remote Execution API."""

from reapi import SHA256, ZSTD, Client, message


def test_announces_what_clients_need(client):
    found = client.capabilities()
    assert (found.low_api_version.major, found.low_api_version.minor) == (2, 0)
    assert (found.high_api_version.major, found.high_api_version.minor) == (2, 12)
    assert not found.HasField("execution_capabilities")
    cache = found.cache_capabilities
    assert list(cache.digest_functions) == [SHA256]
    assert ZSTD in cache.supported_compressors
    assert ZSTD in cache.supported_batch_update_compressors
    assert cache.action_cache_update_capabilities.update_enabled
    assert 3 << 20 < cache.max_batch_total_size_bytes < 4 << 20
    assert cache.max_cas_blob_size_bytes > 0
    assert cache.symlink_absolute_path_strategy == 2  # ALLOWED: Bazel refuses absolute symlinks otherwise
    ranges = cache.cache_priority_capabilities.priorities
    assert not ranges or any(range.min_priority <= 0 <= range.max_priority for range in ranges)
    assert not cache.split_blob_support and not cache.splice_blob_support


def test_instance_names_do_not_matter(client):
    assert client.capabilities("a/b") == client.capabilities()


def test_largest_blob_follows_the_flag(fresh):
    server = fresh(max_blob_size=str(1 << 20))
    with Client(server.address) as client:
        assert client.capabilities().cache_capabilities.max_cas_blob_size_bytes == 1 << 20


def test_largest_blob_fits_into_the_cache(fresh):
    server = fresh(max_size="0.5")
    with Client(server.address) as client:
        largest = client.capabilities().cache_capabilities.max_cas_blob_size_bytes
    assert (1 << 30) // 4 <= largest <= (1 << 30) // 2, "half of max_size can be stored, more than max_size cannot"


def test_message_classes_are_complete():
    # The fields that a newer client sends must not be unknown to the server's own proto files.
    assert "digest_function" in message("FindMissingBlobsRequest").DESCRIPTOR.fields_by_name
    assert "acceptable_compressors" in message("BatchReadBlobsRequest").DESCRIPTOR.fields_by_name
