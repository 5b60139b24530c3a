"""What the server says on its HTTP port."""

import re
import urllib.request

SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


def get(server, path: str) -> str:
    with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=20) as reply:
        return reply.read().decode()


def scrape(server) -> dict:
    """Series by their text, such as `name{label="value"}`."""
    found = {}
    for line in get(server, "/metrics").splitlines():
        if not line.startswith("#"):
            name, labels, value = SERIES.match(line).groups()
            found[f"{name}{{{labels}}}" if labels else name] = float(value)
    return found
