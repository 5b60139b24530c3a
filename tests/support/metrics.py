"""What the server says on its HTTP port."""

import re
import urllib.request

from wait import until

SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


def get(server, path: str, **headers: str) -> str:
    request = urllib.request.Request(f"http://{server.http_address}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def series(text: str) -> dict:
    """Series by their text, such as `name{label="value"}`."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = SERIES.match(line).groups()
            found[f"{name}{{{labels}}}" if labels else name] = float(value)
    return found


def of_all_cores(ask) -> dict:
    """The series in the text that `ask` brings, of all cores as they are now: an answer does not wait for cores that are late,
    and has what they said last."""

    def whole() -> dict | None:
        found = series(ask())
        (silent,) = [value for name, value in found.items() if name.endswith("_cores_silent")]
        return found if silent == 0 else None

    return until(whole, "all cores answer")


def scrape(server, **headers: str) -> dict:
    return of_all_cores(lambda: get(server, "/metrics", **headers))


def scrape_at_rest(server) -> dict:
    """When no call is in flight: a client has its answer a moment before the call is counted as ended."""

    def ended() -> dict | None:
        found = scrape(server)
        return found if found["bazel_remote_calls_inflight"] == 0 else None

    return until(ended, "no call is in flight")
