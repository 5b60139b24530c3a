"""Goal: several S3 backends, named by each call together with its tenant's prefix: nothing of one is seen in another, a
call that does not say where it belongs is refused, and a sick backend changes nothing for a well one.
Method: two stores of our own, one of which can be sick, and one server in front of both."""

import concurrent.futures
import http.client
import json
import statistics
import time

import pytest

from bucket import action_key, blob_key, casblob, from_casblob
from content import unique
from fault_s3 import BlackHole, FaultStore
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from server import StartError
from test_metrics import scrape
from wait import until

MIB = 1 << 20
SECRET = "open sesame"
TRUST = {"RINGCAS_TRUST_STORAGE_PREFIX_HEADER": "1", "BAZEL_REMOTE_L1_AUTH_SECRET": SECRET}
AUTH, PREFIX = "x-blacksmith-cache-auth", "x-blacksmith-storage-prefix"
ENDPOINT, BUCKET = "x-blacksmith-s3-endpoint", "x-blacksmith-s3-bucket"


@pytest.fixture
def stores():
    made = [FaultStore(), FaultStore()]
    yield made
    for store in made:
        store.close()


def name_of(store) -> str:
    return f"http://{store.address}"


def config(path, stores, **more) -> str:
    """A configuration file whose first store is the default one; `more` is for the section as a whole."""
    backends = {name_of(store): {"extra_buckets": ["other"]} for store in stores}
    backends[name_of(stores[0])]["default"] = True
    section = {"bucket": "own", "prefix": "shared", "access_key_id": "AK", "secret_access_key": "SK"} | more
    path.write_text(json.dumps({"s3_proxy": section | {"backends": backends}}))
    return str(path)


@pytest.fixture
def make(fresh, stores, tmp_path):
    """Starts servers in front of both stores, each with a cache of its own."""

    def start(environment=TRUST, stores=stores, **flags):
        file = config(tmp_path / "config.yaml", stores)
        # Flushed: some of these servers are killed at once.
        return fresh(environment=environment, http_address="127.0.0.1:0", config_file=file, **{"ack": "flushed"} | flags)

    return start


class Tenant(Client):
    """A client whose calls name a tenant's prefix, a store and a bucket."""

    def __init__(self, server, store, prefix: str, bucket: str = "own", **options):
        super().__init__(server.address, **options)
        self.metadata = [(AUTH, SECRET), (PREFIX, prefix), (ENDPOINT, name_of(store)), (BUCKET, bucket)]


def upload(client, content) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


def read(client, content) -> bytes:
    return client.read(blob_name(content.hash, content.size))


def misses(client, content) -> None:
    with fails(Code.NOT_FOUND):
        read(client, content)


def series(server, name: str, **labels) -> float:
    text = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return scrape(server).get(f"bazel_remote_{name}{{{text}}}", 0.0)


def paths(store) -> set[str]:
    return {request.path for request in store.since(0, "PUT")}


def test_prefixes_keep_tenants_apart(stores, make):
    """What is stored with a prefix is found with it and with no other, in the cache and in the store."""
    server = make()
    small, large, action = unique(5000), unique(3 * MIB), digest_of(b"an action")
    result = message("ActionResult")(exit_code=5)
    with Tenant(server, stores[1], "t/one/") as one, Tenant(server, stores[1], "t/two") as two:
        for content in [small, large]:
            upload(one, content)
            assert read(one, content) == content.bytes()
            assert not one.missing(digest(content)) and two.missing(digest(content))
            misses(two, content)
        one.update_action(action, result)
        assert one.get_action(action).exit_code == 5
        with fails(Code.NOT_FOUND):
            two.get_action(action)
        expected = {f"/own/t/one/{blob_key(content.hash)}" for content in [small, large]}
        expected |= {f"/own/t/one/{action_key(action.hash)}"}
        until(lambda: paths(stores[1]) == expected, "the uploads")
        assert not paths(stores[0])
        # The other tenant has an object of its own under the same name.
        upload(two, large)
        until(lambda: f"/own/t/two/{blob_key(large.hash)}" in paths(stores[1]), "the other tenant's upload")
        assert read(two, large) == large.bytes()
    # They are found again after a crash, and none of it without a prefix.
    server.restart(crash=True)
    with Tenant(server, stores[1], "t/one/") as one:
        for content in [small, large]:
            assert read(one, content) == content.bytes()
    connection = http.client.HTTPConnection(server.http_address, timeout=30)
    connection.request("GET", f"/cas/{small.hash}")
    assert connection.getresponse().status == 404
    connection.close()


def test_a_tenants_blob_is_purged_by_its_hash(stores, make):
    """By who names the tenant as its calls do, but for the secret: here and in its store, and nobody else's."""
    server = make(allow_unauthenticated_purges="true", enable_ac_key_instance_mangling="true")
    content, action = unique(5000), digest_of(b"an action of tenants")
    result = message("ActionResult")(exit_code=5)

    def purge(method: str, path: str, **headers: str):
        connection = http.client.HTTPConnection(server.http_address, timeout=30)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    one_is = {"x_blacksmith_storage_prefix": "t/one/", "x_blacksmith_s3_endpoint": name_of(stores[1])}
    one_is["x_blacksmith_s3_bucket"] = "own"
    with Tenant(server, stores[1], "t/one/") as one, Tenant(server, stores[1], "t/two/") as two:
        for tenant in (one, two):
            upload(tenant, content)
            for instance in ("main", "other"):
                tenant.update_action(action, result, instance_name=instance)
        until(lambda: len(stores[1].objects) == 6, "the uploads")
        # Half a name, and one for what takes no name, are refused: they would purge something else.
        for method, path, headers in [
            ("DELETE", f"/cas/{content.hash}", one_is | {"x_blacksmith_storage_prefix": "/t"}),
            ("DELETE", f"/cas/{content.hash}", {"x_blacksmith_storage_prefix": "t/one/"}),
            ("POST", "/admin/purge?all=true", one_is),
        ]:
            assert purge(method, path, **headers)[0] == 400
        # Without a prefix there is nothing of this hash.
        assert json.loads(purge("DELETE", f"/cas/{content.hash}")[1])["purged"] == 0
        assert not one.missing(digest(content))
        assert json.loads(purge("DELETE", f"/cas/{content.hash}", **one_is)[1])["purged"] == 1
        assert json.loads(purge("DELETE", f"/main/ac/{action.hash}", **one_is)[1])["purged"] == 1
        assert one.missing(digest(content)) and not two.missing(digest(content))
        with fails(Code.NOT_FOUND):
            one.get_action(action, instance_name="main")
        assert one.get_action(action, instance_name="other").exit_code == 5
        assert two.get_action(action, instance_name="main").exit_code == 5
        assert len(stores[1].objects) == 4 and f"t/one/{blob_key(content.hash)}" not in stores[1].objects
    server.restart(crash=True)
    with Tenant(server, stores[1], "t/one/") as one:
        assert one.missing(digest(content))


def test_reads_through_the_store_that_a_call_names(stores, make):
    """A cold blob comes from the store, the bucket and the prefix that the call names; from no other."""
    server = make()
    blobs = [unique(2000) for _ in range(4)]
    places = [(0, "own", "t/1"), (0, "other", "t/1"), (1, "own", "t/1"), (1, "own", "t/2")]
    for content, (store, _, prefix) in zip(blobs, places):
        stores[store].objects[f"{prefix}/{blob_key(content.hash)}"] = casblob(content.bytes())
    for content, (store, bucket, prefix) in zip(blobs, places):
        with Tenant(server, stores[store], prefix, bucket) as tenant, Tenant(server, stores[1 - store], prefix) as elsewhere:
            key = f"{prefix}/{blob_key(content.hash)}"
            assert elsewhere.missing(digest(content))
            misses(elsewhere, content)
            assert not tenant.missing(digest(content))
            assert read(tenant, content) == content.bytes()
            assert [r.path for r in stores[store].since(0, "GET") if key in r.path] == [f"/{bucket}/{key}"]


def test_calls_that_do_not_say_where_they_belong_are_refused(stores, make):
    """Each thing that is missing, doubled or unknown ends a call, marked for programs, and counted; probes need nothing."""
    server = make()
    content = unique(100)
    good = [(AUTH, SECRET), (PREFIX, "t/1/"), (ENDPOINT, name_of(stores[1])), (BUCKET, "other")]
    wrong = [(AUTH, "sesame"), (PREFIX, "../t"), (ENDPOINT, name_of(stores[1]) + "/"), (BUCKET, "mine")]
    causes = ["mismatch", "invalid", "unknown", "bucket_unknown"]
    metrics = ["auth_secret_rejected_total", "storage_prefix_rejected_total"] + 2 * ["s3_backend_selector_rejected_total"]
    with Client(server.address) as client:
        client.metadata = good
        assert client.missing(digest(content))
        for at, cause in enumerate(causes):
            prefix = "bucket_" if at == 3 else ""
            cases = {
                prefix + "missing": good[:at] + good[at + 1 :],
                prefix + "duplicate": [*good, good[at]],
                cause: [*good[:at], wrong[at], *good[at + 1 :]],
            }
            for cause, metadata in cases.items():
                client.metadata = metadata
                code = Code.UNAUTHENTICATED if at == 0 else Code.INVALID_ARGUMENT
                for call in [lambda: client.missing(digest(content)), lambda: upload(client, content)]:
                    with fails(code) as caught:
                        call()
                assert SECRET not in caught[0].details()
                details = dict(caught[0].trailing_metadata()).get("grpc-status-details-bin")
                if at == 0:
                    assert details is None
                else:
                    reason = b"STORAGE_PREFIX_REJECTED" if at == 1 else b"S3_BACKEND_SELECTOR_REJECTED"
                    assert b"google.rpc.ErrorInfo" in details and b"cache.blacksmith.sh" in details
                    assert reason in details and cause.encode() in details
                assert series(server, metrics[at], reason=cause) == 2
        client.metadata = []
        client.capabilities()
        with fails(Code.UNAUTHENTICATED):
            client.get_action(digest_of(b"x"))
    assert server.log.count(" refused: ") == 12


def test_http_has_the_default_store_and_no_prefix(stores, make):
    server = make()
    content = unique(1000)
    connection = http.client.HTTPConnection(server.http_address, timeout=30)
    connection.request("PUT", f"/cas/{content.hash}", content.bytes())
    reply = connection.getresponse()
    reply.read()
    assert reply.status == 200
    key = f"shared/{blob_key(content.hash)}"
    until(lambda: key in stores[0].objects, "the upload")
    assert from_casblob(stores[0].objects[key]) == content.bytes()
    assert not paths(stores[1])
    assert series(server, "s3_default_backend_fallback_total", operation="UPLOAD") == 1
    connection.close()


def test_a_start_without_trust_is_refused(stores, make):
    for environment, text in [
        ({}, "--trust_storage_prefix_header"),
        ({"BAZEL_REMOTE_TRUST_STORAGE_PREFIX_HEADER": "1"}, "--l1_auth_secret"),
    ]:
        with pytest.raises(StartError) as caught:
            make(environment=environment)
        assert text in caught.value.log
    make(environment={"RINGCAS_TRUST_STORAGE_PREFIX_HEADER": "1", "RINGCAS_L1_UNSAFE_NO_AUTH_SECRET": "1"})


def test_prefixes_without_a_map(stores, fresh):
    """One store, and trusted callers: the prefix counts, what is selected does not."""
    server = fresh(environment=TRUST, **stores[0].flags("own"))
    content = unique(1000)
    with Client(server.address) as client:
        client.metadata = [(AUTH, SECRET), (PREFIX, "t/1"), (ENDPOINT, "http://elsewhere")]
        upload(client, content)
        until(lambda: f"/own/t/1/{blob_key(content.hash)}" in paths(stores[0]), "the upload")
        client.metadata = client.metadata[:1]
        with fails(Code.INVALID_ARGUMENT):
            client.missing(digest(content))


SICK = ["silent", "black hole", 500, 503, "stalled_body", "reset"]


@pytest.mark.parametrize("sickness", SICK)
def test_a_sick_store_changes_nothing_for_a_well_one(stores, make, sickness):
    """One core, 200 cold reads, 20 FindMissing and 200 uploads for a sick store: cold reads, checks and uploads of a well
    one are as before, and only the sick one's breaker opens."""
    hole = BlackHole() if sickness == "black hole" else None
    sick, well = stores
    if hole is not None:
        sick_address = hole
    else:
        sick_address = sick
    server = make(stores=[sick_address, well], cores="1", memory_limit="512M")
    if hole is None:
        sick.fault, sick.methods = sickness, ("GET", "HEAD", "PUT")
    cold = [unique(3000) for _ in range(200)]
    for content in cold:
        sick.objects[f"t/1/{blob_key(content.hash)}"] = casblob(content.bytes())
    warm = [unique(3000) for _ in range(60)] + [unique(2 * MIB)]
    for content in warm:
        well.objects[f"t/1/{blob_key(content.hash)}"] = casblob(content.bytes())
    fresh_blobs = [unique(2000) for _ in range(200)]
    with (
        Tenant(server, sick_address, "t/1") as ill,
        Tenant(server, well, "t/1") as fine,
        concurrent.futures.ThreadPoolExecutor(80) as pool,
    ):
        for content in fresh_blobs:
            upload(ill, content)
        waiting = [pool.submit(misses, ill, content) for content in cold]
        asked = [pool.submit(ill.find_missing, [digest(unique(100)) for _ in range(200)]) for _ in range(20)]
        times = []
        for content in warm:
            begun = time.monotonic()
            assert not fine.missing(digest(content))
            assert read(fine, content) == content.bytes()
            times.append(time.monotonic() - begun)
        new = [unique(2000) for _ in range(20)]
        for content in new:
            upload(fine, content)
        keys = {f"t/1/{blob_key(content.hash)}" for content in new}
        until(lambda: keys <= well.objects.keys(), "the uploads to the well store")
        # A busy machine delays a few: whoever waits for the sick one does so each time, for seconds.
        assert statistics.median(times) < 1, f"the well store's clients waited for the sick one: {times}"
        for call in [*waiting, *asked]:
            call.result(60)
    assert series(server, "s3_breaker_state", backend=name_of(well)) == 0
    assert series(server, "s3_failures_total", backend=name_of(well)) == 0
    assert series(server, "s3_short_circuits_total", backend=name_of(well)) == 0
    if sickness not in (503, "reset", "stalled_body"):
        assert series(server, "s3_breaker_transitions_total", backend=name_of(sick_address), to="open") >= 1
    if hole is not None:
        hole.close()


def test_what_is_owed_waits_for_its_store(stores, make, tmp_path):
    """Uploads that a sick store did not take are made after restarts with other maps, to that store, bucket and prefix."""
    sick, well = stores
    sick.fault, sick.methods = 500, ("GET", "HEAD", "PUT")
    server = make()
    owed = [unique(1000) for _ in range(6)]
    with Tenant(server, sick, "t/1") as one, Tenant(server, sick, "t/2/", "other") as two:
        for number, content in enumerate(owed):
            upload([one, two][number % 2], content)
    until(lambda: series(server, "s3_owed_uploads", backend=name_of(sick)) == 6, "all are owed", 60)
    # Without that store they are counted and wait; they go to no other.
    file = config(tmp_path / "without.yaml", [well])
    server.restart(crash=True, config_file=file)
    (left,) = [value for key, value in scrape(server).items() if key.startswith("bazel_remote_s3_orphaned_uploads{")]
    assert left == 6
    assert "not configured any more" in server.log
    assert not well.since(0, "PUT")
    sick.heal()
    file = config(tmp_path / "again.yaml", [well, sick])
    server.restart(config_file=file)
    expected = {f"/{['own/t/1', 'other/t/2'][at % 2]}/{blob_key(content.hash)}" for at, content in enumerate(owed)}
    until(lambda: expected <= paths(sick), "what was owed is uploaded", 60)
    assert not well.since(0, "PUT")
