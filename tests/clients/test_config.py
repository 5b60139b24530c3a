"""Goal: an operator of bazel-remote starts ringcas with the same file, environment or flags: every documented setting has its
effect, or a line in the log that says what it means here. SIGHUP takes over what can change.
Method: a file and an environment with every documented key and variable; each is looked up in what the server says that it
runs with, in its log, or in what it then does."""

import http.client
import os
import re
import shutil
import signal
import ssl
import subprocess
import urllib.request

import pytest

import credentials
from content import unique
from reapi import Client, Code, digest, fails, message
from server import BINARY, Server, scratch
from wait import until

NO_EFFECT = "has no effect"
OLDER = "its newer name is"

# Every key of bazel-remote's file (a dot: in that section), a value, and what becomes of it: the value in the effective
# configuration, or a part of its line in the log.
KEYS = {
    "dir": ("{dir}", "{dir}"),
    "max_size": ("2", "2"),
    "max_size_hard_limit": ("3", NO_EFFECT),
    "storage_mode": ("uncompressed", "uncompressed"),
    "zstd_implementation": ("cgo", NO_EFFECT),
    "http_address": ("127.0.0.1:0", "127.0.0.1:0"),
    "host": ("localhost", OLDER),
    "port": ("8081", OLDER),
    "grpc_address": ("127.0.0.1:0", "127.0.0.1:0"),
    "grpc_port": ("9093", OLDER),
    "profile_address": ("127.0.0.1:6060", NO_EFFECT),
    "profile_host": ("127.0.0.1", NO_EFFECT),
    "profile_port": ("6060", NO_EFFECT),
    "http_read_timeout": ("1m30s", "1m30s"),
    "http_write_timeout": ("1m", "1m"),
    "idle_timeout": ("1h", "1h"),
    "max_queued_uploads": ("1000", "1000"),
    "num_uploaders": ("10", "10"),
    "max_blob_size": ("1048576", "1048576"),
    "max_proxy_blob_size": ("2097152", "2097152"),
    "grpc_proxy.url": ("grpcs://user:hush@h:9092", NO_EFFECT),
    "grpc_proxy.key_file": ("/k", NO_EFFECT),
    "grpc_proxy.cert_file": ("/c", NO_EFFECT),
    "grpc_proxy.ca_file": ("/a", NO_EFFECT),
    "http_proxy.url": ("https://h", NO_EFFECT),
    "http_proxy.key_file": ("/k", NO_EFFECT),
    "http_proxy.cert_file": ("/c", NO_EFFECT),
    "http_proxy.ca_file": ("/a", NO_EFFECT),
    "gcs_proxy.bucket": ("g", NO_EFFECT),
    "gcs_proxy.use_default_credentials": ("true", NO_EFFECT),
    "gcs_proxy.json_credentials_file": ("/g", NO_EFFECT),
    "s3_proxy.endpoint": ("127.0.0.1:1", "127.0.0.1:1"),
    "s3_proxy.bucket": ("b", "b"),
    "s3_proxy.bucket_lookup_type": ("path", "path"),
    "s3_proxy.prefix": ("p", "p"),
    "s3_proxy.auth_method": ("access_key", "access_key"),
    "s3_proxy.access_key_id": ("AK", "AK"),
    "s3_proxy.secret_access_key": ("hush", "(secret)"),
    "s3_proxy.session_token": ("hush", "(secret)"),
    "s3_proxy.signature_type": ("v2", "requests are signed by version 4"),
    "s3_proxy.aws_shared_credentials_file": ("/aws", "/aws"),
    "s3_proxy.aws_profile": ("prod", "prod"),
    "s3_proxy.disable_ssl": ("true", "true"),
    "s3_proxy.update_timestamps": ("true", NO_EFFECT),
    "s3_proxy.iam_role_endpoint": ("http://127.0.0.1:1", "http://127.0.0.1:1"),
    "s3_proxy.region": ("eu-west-1", "eu-west-1"),
    "s3_proxy.key_version": ("1", NO_EFFECT),
    "s3_proxy.max_idle_conns": ("64", "64"),
    "azblob_proxy.tenant_id": ("t", NO_EFFECT),
    "azblob_proxy.storage_account": ("a", NO_EFFECT),
    "azblob_proxy.container_name": ("c", NO_EFFECT),
    "azblob_proxy.prefix": ("p", NO_EFFECT),
    "azblob_proxy.update_timestamps": ("true", NO_EFFECT),
    "azblob_proxy.auth_method": ("shared_key", NO_EFFECT),
    "azblob_proxy.shared_key": ("hush", NO_EFFECT),
    "azblob_proxy.client_id": ("i", NO_EFFECT),
    "azblob_proxy.client_secret": ("hush", NO_EFFECT),
    "azblob_proxy.cert_path": ("/c", NO_EFFECT),
    "disable_http_ac_validation": ("true", "true"),
    "disable_grpc_ac_deps_check": ("true", "true"),
    "enable_ac_key_instance_mangling": ("true", "true"),
    "enable_endpoint_metrics": ("true", "true"),
    "http_metrics_prefix": ("true", "true"),
    "experimental_remote_asset_api": ("true", NO_EFFECT),
    "access_log_level": ("none", "none"),
    "log_timezone": ("none", "none"),
}
# Only in the file.
FILE_ONLY = {
    "endpoint_metrics_duration_buckets": ("[0.5, 1, 2.5]", "0.5,1,2.5"),
    "s3_proxy.conn_recycle_interval": ("3m", "3m"),
    "s3_proxy.read_timeout": ("4m", "4m"),
}
# Variables that do not follow from the key: BAZEL_REMOTE_S3_BUCKET is that of s3_proxy.bucket.
ODD = {
    "disable_grpc_ac_deps_check": "BAZEL_REMOTE_DISABLE_GRPS_AC_DEPS_CHECK",
    "azblob_proxy.client_secret": "BAZEL_REMOTE_AZBLOB_SECRET_CLIENT_SECRET",
    "gcs_proxy.bucket": "BAZEL_REMOTE_GCS_BUCKET",
    "gcs_proxy.use_default_credentials": "BAZEL_REMOTE_GCS_USE_DEFAULT_CREDENTIALS",
    "gcs_proxy.json_credentials_file": "BAZEL_REMOTE_GCS_JSON_CREDENTIALS_FILE",
}
# Only variables, of forks and of Azure's tools.
VARIABLES_ONLY = {
    "BAZEL_REMOTE_LRU_ARTIFACTS": ("1", NO_EFFECT),
    "BAZEL_REMOTE_L1_UNSAFE_NO_AUTH_SECRET": ("1", None),
    "BAZEL_REMOTE_SERVICE_HOST": ("10.0.0.1", None),
    "BAZEL_REMOTE_PORT_8080_TCP_ADDR": ("10.0.0.1", None),
}
AZURE = {
    "AZURE_TENANT_ID": "t",
    "AZURE_STORAGE_ACCOUNT_KEY": "hush",
    "AZURE_CLIENT_ID": "i",
    "AZURE_CLIENT_SECRET": "hush",
    "AZURE_CLIENT_CERTIFICATE_PATH": "/c",
}
# What would have kept somebody out, and is not done here.
REFUSED = [
    "LDAP_URL",
    "LDAP_BASE_DN",
    "LDAP_BIND_USER",
    "LDAP_BIND_PASSWORD",
    "LDAP_GROUPS_QUERY",
    "LDAP_CACHE_TIME",
    "LDAP_USER_ATTRIBUTE",
]


def variable(key: str) -> str:
    section, _, name = key.rpartition(".")
    prefix = {"": "", "s3_proxy": "S3_", "azblob_proxy": "AZBLOB_"}.get(section, f"{section.upper()}_")
    return ODD.get(key, f"BAZEL_REMOTE_{prefix}{name.upper()}")


def yaml(keys: dict[str, str]) -> str:
    """A file as an operator writes it: sections where keys have one."""
    lines, sections = [], {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, []) if section else lines).append(f"{name}: {value}")
    for section, inner in sections.items():
        lines += [f"{section}:", *(f"  {line}" for line in inner)]
    return "\n".join(lines) + "\n"


def run(*args: str, prefix: tuple[str, ...] = (), **variables: str):
    """(exit code, stdout, stderr) of the binary, started by what stands in `prefix`."""
    own = ("RINGCAS_", "BAZEL_REMOTE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)} | variables
    done = subprocess.run([*prefix, BINARY, *args], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)


def effective(text: str) -> dict[str, tuple[str, str]]:
    """key -> (value, source) of what `--print_config` printed."""
    found, section = {}, ""
    for line in text.splitlines():
        if re.fullmatch(r"\w+:", line):
            section = line[:-1] + "."
            continue
        key, value, source = re.fullmatch(r"\s*(?:# )?(\w+): ?(.*?)\s+# (.*)", line).groups()
        found[(section if line.startswith(" ") else "") + key] = (value.strip('"'), source)
    return found


def check(key: str, place: str, source: str, expected: str, printed: dict, log: str) -> None:
    """`place` is how the log names the setting, `source` how the printed configuration names where it comes from."""
    if expected in (NO_EFFECT, OLDER) or " " in expected:
        lines = [line for line in log.splitlines() if re.search(rf"(?<![\w.]){re.escape(place)} ", line)]
        assert len(lines) == 1 and expected in lines[0], f"{key}: {lines}"
    else:
        assert printed.get(key) == (expected, source), key


@pytest.fixture
def home():
    made = scratch("config")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_every_key_of_a_file(home, fresh):
    """Each key is told of where it has no meaning, and has its value where it has one; the server then does as it says."""
    table = KEYS | FILE_ONLY
    keys = {key: value.format(dir=home / "cache") for key, (value, _) in table.items()}
    file = home / "bazel-remote.yaml"
    file.write_text(yaml(keys))
    code, out, log = run("--config_file", str(file), "--print_config")
    assert code == 0, log
    assert "hush" not in out + log
    printed = effective(out)
    for key, (_, expected) in table.items():
        check(key, f"{file}: {key}", str(file), expected.format(dir=home / "cache"), printed, log)
    assert run("--check_config", BAZEL_REMOTE_CONFIG_FILE=str(file))[0] == 0

    server = fresh(config_file=file, max_size=None, http_address=None, grpc_address=None, memory_limit="256M")
    assert not re.search(r"^\d{4}-", server.log, re.M), "log_timezone: none"
    with Client(server.address) as client:
        assert client.capabilities().cache_capabilities.max_cas_blob_size_bytes == 1048576
        absent, action = unique(100), unique(64)
        result = message("build.bazel.remote.execution.v2.ActionResult")()
        result.output_files.add(path="a", digest=digest(absent))
        client.update_action(digest(action), result, instance_name="one")
        client.get_action(digest(action), instance_name="one")
        with fails(Code.NOT_FOUND):
            client.get_action(digest(action), instance_name="two")
    value = urllib.request.Request(f"http://{server.http_address}/ac/{action.hash}", b"no result", method="PUT")
    assert urllib.request.urlopen(value).status == 200
    scrape = lambda: urllib.request.urlopen(f"http://{server.http_address}/metrics").read().decode()
    # A scrape goes without a core that is late, and says so.
    until(lambda: "bazel_remote_http_request_duration_seconds_bucket" in scrape(), "the prefix before http_*")
    assert " in=" not in server.log, "access_log_level: none"
    assert "backend default: http://127.0.0.1:1, bucket b, prefix \"p/\"" in server.log


def test_every_variable(home, fresh):
    """The same by a systemd unit's environment, without a file."""
    values = {key: value.format(dir=home / "cache") for key, (value, _) in KEYS.items()}
    environment = {variable(key): value for key, value in values.items()}
    environment |= {name: value for name, (value, _) in VARIABLES_ONLY.items()}
    code, out, log = run("--print_config", **environment)
    assert code == 0, log
    assert "hush" not in out + log
    printed = effective(out)
    for key, (_, expected) in KEYS.items():
        check(key, variable(key), variable(key), expected.format(dir=home / "cache"), printed, log)
    for name, (_, expected) in VARIABLES_ONLY.items():
        if expected is None:
            assert name not in log
        else:
            check(name, name, name, expected, printed, log)
    _, _, log = run("--check_config", **AZURE)
    for name in AZURE:
        check(name, name, name, NO_EFFECT, {}, log)
    server = Server(environment=environment, max_size=None, http_address=None, grpc_address=None, memory_limit="256M")
    with server:
        with Client(server.address) as client:
            assert client.capabilities().cache_capabilities.max_cas_blob_size_bytes == 1048576


def test_access_keys_of_a_file(home, fresh):
    """TLS, passwords and open reads by bazel-remote's keys; its oldest TLS is more than is spoken here, and is told."""
    authority = credentials.Authority(home)
    certificate, key = authority.sign("server", "/CN=cache")
    (home / "htpasswd").write_text(f"alice:{credentials.apr1('hush')}\n")
    keys = {
        "htpasswd_file": home / "htpasswd",
        "min_tls_version": "1.0",
        "tls_cert_file": certificate,
        "tls_key_file": key,
        "tls_ca_file": authority.certificate,
        "allow_unauthenticated_reads": "true",
    }
    file = home / "bazel-remote.yaml"
    file.write_text(yaml({name: str(value) for name, value in keys.items()}))
    code, out, log = run("--config_file", str(file), "--print_config")
    assert code == 0, log
    for name, value in keys.items():
        assert effective(out)[name] == (str(value), str(file))
    environment = {"BAZEL_REMOTE_UNAUTHENTICATED_READS": "1", "BAZEL_REMOTE_HTPASSWD_FILE": str(home / "htpasswd")}
    code, out, log = run("--print_config", **environment)
    assert effective(out)["allow_unauthenticated_reads"] == ("1", "BAZEL_REMOTE_UNAUTHENTICATED_READS"), log
    assert run("--check_config", BAZEL_REMOTE_UNAUTHENTICATED_READS="1")[0] == 1, "there is nothing to be let in without"

    server = fresh(config_file=file, http_address="127.0.0.1:0")
    context = ssl.create_default_context(cafile=str(authority.certificate))
    content = unique(100)
    for method, headers, status in [
        ("PUT", {}, 401),
        ("PUT", {"Authorization": credentials.basic("alice", "wrong")}, 401),
        ("PUT", {"Authorization": credentials.basic("alice", "hush")}, 200),
        ("GET", {}, 200),
    ]:
        host, port = server.http_address.split(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
        body = content.bytes() if method == "PUT" else None
        connection.request(method, f"/cas/{content.hash}", body, headers)
        assert connection.getresponse().status == status, (method, headers)
        connection.close()


def test_no_lock_is_left_off():
    """A setting that would have kept somebody out, and cannot here, ends the start."""
    for name in REFUSED:
        code, _, log = run("--check_config", **{f"BAZEL_REMOTE_{name}": "1"})
        assert code == 1 and f"BAZEL_REMOTE_{name}: " in log and "open" in log, name


def test_precedence_and_slips(home):
    file = home / "ringcas.yaml"
    file.write_text("max_blob_size: 3\nack: durable\n")
    config = f"--config_file={file}"
    printed = effective(run(config, "-max_blob_size=1", "--print_config", RINGCAS_MAX_BLOB_SIZE="2")[1])
    assert printed["max_blob_size"] == ("1", "flag")
    printed = effective(run(config, "--print_config", RINGCAS_MAX_BLOB_SIZE="2", BAZEL_REMOTE_MAX_BLOB_SIZE="4")[1])
    assert printed["max_blob_size"] == ("2", "RINGCAS_MAX_BLOB_SIZE")
    assert printed["ack"] == ("durable", str(file))
    assert printed["storage_mode"] == ("zstd", "default")
    file.write_text("max_blob_sise: 3\n")
    code, _, log = run(config, "--check_config")
    assert code == 1 and 'did you mean "max_blob_size"?' in log
    code, _, log = run("--check_config", BAZEL_REMOTE_MAX_BLOB_SISE="3")
    assert code == 1 and "did you mean BAZEL_REMOTE_MAX_BLOB_SIZE?" in log
    code, _, log = run("--max_blob_sise=3")
    assert code == 2 and "'--max_blob_size'" in log
    code, _, log = run("--enable_endpoint_metrics", "false")
    assert code == 2 and "'false'" in log and "--x=false" in log
    code, _, log = run("--dir", str(home), "stats")
    assert code == 2 and "ringcas stats --dir" in log


def test_what_follows_is_printed(home, fresh):
    """What nobody has set is printed with what it follows from, and is what a start then has."""
    place = ["--dir", str(home / "cache"), "--memory_limit=256M"]
    for given, source in [([], "default"), (["--max_inflight_cas_writes=0"], "flag, which means {}")]:
        code, out, log = run(*place, *given, "--print_config", XDG_CACHE_HOME=str(home))
        assert code == 0, log
        printed = effective(out)
        assert printed["ram_cache"] == (str(64 << 20), "default: a quarter of memory_limit")
        slots, why = printed["max_inflight_cas_writes"]
        if given:
            assert slots == "0"
            slots = re.search(r"means (\d+)", why)[1]
        assert why == source.format(slots) + ": as many as memory_limit has room for"
        assert printed["memory_limit"] == ("256M", "flag") and printed["max_size"][1].startswith("default: ")
        server = fresh(memory_limit="256M", max_size=None, http_address="127.0.0.1:0")
        assert f"CAS writes: {slots} in flight at a time" in server.log
        server.stop()
    printed = effective(run("--print_config", XDG_CACHE_HOME=str(home))[1])
    assert printed["dir"] == (str(home / "ringcas"), "default: below XDG_CACHE_HOME")
    assert printed["memory_limit"][1] in ("default: half of the machine's memory", "default: half of what the cgroup may use")
    code, _, log = run("--check_config", "--dir", str(home / "cache"), "--memory_limit=64M")
    assert code == 1 and "too few for" in log, "a start would end so"


def test_one_protocol_may_be_off(home, fresh):
    """`none`, as bazel-remote has it for gRPC; a server must have something to serve."""
    code, _, log = run("--dir", str(home), "--grpc_address=none", "--http_address=none", "--check_config")
    assert code == 1 and "--grpc_address and --http_address" in log
    server = fresh(grpc_address="none", http_address="127.0.0.1:0", take_over="true")
    assert server.port == 0 and "listening: grpc=none http=127.0.0.1:" in server.log
    content = unique(100)
    request = urllib.request.Request(f"http://{server.http_address}/cas/{content.hash}", content.bytes(), method="PUT")
    assert urllib.request.urlopen(request).status == 200
    assert urllib.request.urlopen(f"http://{server.http_address}/cas/{content.hash}").read() == content.bytes()
    server.stop()


def test_help_fits_the_terminal():
    """Each setting is there, and no line is longer than the terminal is wide."""
    code, text, _ = run("--help", COLUMNS="80")
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    assert all(f"--{flag}" in text for flag in ("dir", "htpasswd_file", "s3.bucket", "check_config"))


def test_a_directory_of_bazel_remote(home):
    """The first thing that an operator tries: ringcas on the old directory. It stays as it is, and the error says what to do."""
    (home / "old" / "cas.v2").mkdir(parents=True)
    (home / "old" / "ac.v2").mkdir()
    for flags in (["--check_config"], ["--grpc_address=127.0.0.1:0", "--http_address=none"]):
        code, _, log = run("--dir", str(home / "old"), *flags)
        assert code == 1 and f"ringcas import --from {home / 'old'}" in log, log
    assert sorted(path.name for path in (home / "old").iterdir()) == ["ac.v2", "cas.v2"]


def test_a_check_leaves_nothing(home):
    code, _, log = run("--check_config", "--dir", str(home / "new" / "cache"))
    assert code == 0 and "the configuration is valid" in log, log
    assert not (home / "new").exists()


@pytest.mark.parametrize(
    "address, remedy",
    [("192.0.2.1:0", "Give an address of this machine"), ("unix:{home}/nowhere/socket", "Make the directory"),
     ("unix:{home}/" + "long" * 40, "Give another one")],
)  # fmt: skip
def test_an_address_that_cannot_be_had(home, address, remedy):
    address = address.format(home=home)
    code, _, log = run(f"--dir={home}/cache", "--max_size=0.0625", f"--http_address={address}", "--grpc_address=none")
    assert code == 1 and "--http_address" in log and remedy in log, log


def test_a_check_finds_what_may_not_be_written(home, fresh):
    """A directory that cannot be made or filled, and a cache of another user."""
    # Root may write everything, unless it is told not to.
    plain = ("setpriv", "--bounding-set=-dac_override") if os.getuid() == 0 else ()
    server = fresh()
    server.stop()
    cases = [(home / "new", "new/lock"), (home / "there" / "new", "there/new/lock"), (server.directory, "data.0")]
    (home / "there").mkdir()
    for directory, path in cases:
        code, _, log = run("--check_config", "--dir", str(directory), prefix=plain)
        assert code == 0, log
    for made in (home, home / "there", server.directory / "data.0"):
        made.chmod(0o555)
    for directory, path in cases:
        for flags in (["--check_config"], ["--grpc_address=127.0.0.1:0", "--http_address=none"]):
            code, _, log = run("--dir", str(directory), *flags, prefix=plain)
            assert code == 1 and path.removesuffix("/lock") in log and "Permission denied" in log, (flags, log)
    home.chmod(0o755)


def test_sighup(home, fresh):
    """What can change does, for calls from then on; what cannot is named; a broken file changes nothing."""
    file = home / "ringcas.yaml"
    file.write_text("access_log_level: all\nmax_blob_size: 1000\nlog_level: info\nstorage_mode: zstd\n")
    server = fresh(config_file=file, http_address="127.0.0.1:0")
    def reload(text: str, *lines: str) -> None:
        file.write_text(text)
        server.signal(signal.SIGHUP)
        for line in lines:
            until(lambda: f"reload: {line}" in server.log, line)

    with Client(server.address) as client:
        client.put(unique(900).bytes())
        until(lambda: "BatchUpdateBlobs" in server.log, "an access line")
        reload(
            "access_log_level: none\nmax_blob_size: 500\nlog_level: debug\nstorage_mode: uncompressed\nshutdown_timeout: 1s\n",
            "access_log_level was all, is now none",
            "max_blob_size was 1000, is now 500",
            "log_level was info, is now debug",
            "shutdown_timeout was 30s, is now 1s",
            "storage_mode stays zstd: for uncompressed the server has to be started again",
        )
        until(lambda: client.capabilities().cache_capabilities.max_cas_blob_size_bytes == 500, "the new limit")
        lines = server.log.count(" in=")
        client.put(unique(400).bytes())
        client.put(unique(400).bytes())
        reload("max_blob_size: none\n", "nothing changes: ")
        assert client.capabilities().cache_capabilities.max_cas_blob_size_bytes == 500
        assert server.log.count(" in=") == lines, "no access lines any more"
        reload("access_log_level: none\n", "max_blob_size was 500, is now 9223372036854775807")
    server.stop()


@pytest.mark.parametrize(
    "flag, text",
    [("--htpasswd_file", "no user"), ("--token_file", "write short"), ("--tls_cert_file", "no certificate"),
     ("--max_size", "0.001"), ("--max_size", "60000"), ("--log_level", "loud"), ("--log_level", "info,debgu")],
)  # fmt: skip
def test_a_check_of_the_configuration_finds_what_a_start_would(flag, text):
    home = scratch("checked")
    value = text
    if flag.endswith("_file"):
        (home / "file").write_text(text + "\n")
        value = str(home / "file")
    arguments = [f"{flag}={value}"] + [f"--tls_key_file={value}"] * (flag == "--tls_cert_file")
    code, _, log = run(f"--dir={home}/cache", "--check_config", *arguments)
    assert code != 0 and flag.removeprefix("--") in log, (code, log)
    assert not (home / "cache").exists()
    shutil.rmtree(home)


@pytest.mark.parametrize(
    "flag", ["config_file", "htpasswd_file", "token_file", "roles_file", "tls_cert_file", "tls_key_file", "tls_ca_file"]
)
def test_a_huge_file_is_named_and_not_read(flag):
    home = scratch("huge")
    key, certificate = home / "key", home / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (home / "tokens").write_text("write 0123456789abcdef\n")
    files = {
        "tls_cert_file": certificate, "tls_key_file": key, "tls_ca_file": certificate, "token_file": home / "tokens",
    }  # fmt: skip
    with open(home / "huge", "wb") as file:
        file.truncate(1 << 40)
    files[flag] = home / "huge"
    code, _, log = run(f"--dir={home}/cache", "--check_config", *[f"--{name}={path}" for name, path in files.items()])
    assert code != 0 and flag in log and str(home / "huge") in log and "larger than 16 MiB" in log, (code, log)
    shutil.rmtree(home)
