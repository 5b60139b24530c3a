"""Goal: the page at `/` shows people how the server is, on a phone as on a desk, and keeps up without a reload.
Method: headless Chromium at two widths; what it shows is compared with what was done, and nothing may stick out sideways.
Screenshots stand in target/tests, for the eye."""

import http.client
import json
import re

import pytest
from browser import CHROMIUM, Browser
from content import unique
from reapi import Client, upload_name
from server import ROOT, Server
from wait import until

WIDTHS = [360, 1280]


@pytest.fixture(scope="module")
def server():
    # Twelve cores make a table, and a backend that nobody answers for has a breaker to show.
    secret = {"BAZEL_REMOTE_S3_SECRET_ACCESS_KEY": "secret"}
    flags = {"s3.endpoint": "127.0.0.1:9", "s3.bucket": "a-bucket", "s3.access_key_id": "id", "s3.disable_ssl": "true"}
    with Server(cores="12", http_address="127.0.0.1:0", environment=secret, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium here; tests/run installs it")
    with Browser() as opened:
        yield opened


def get(server, path: str, method: str = "GET"):
    connection = http.client.HTTPConnection(server.http_address, timeout=20)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def test_the_page_needs_nothing_else(server):
    answer, page = get(server, "/")
    assert answer.status == 200 and answer.getheader("content-type") == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.getheader("content-security-policy")
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,", "/status", "/metrics"}
    assert get(server, "/", "HEAD")[0].status == 200 and get(server, "/", "HEAD")[1] == ""
    assert get(server, "/", "PUT")[0].status == 405


def test_the_figures(server):
    answer, text = get(server, "/overview.json")
    assert answer.getheader("content-type") == "application/json"
    figures = json.loads(text)

    # A core that is too busy to answer the first who asks is not there yet.
    def cores():
        return [core["core"] for core in json.loads(get(server, "/overview.json")[1])["cores"]]

    until(lambda: cores() == list(range(12)), "all cores have answered")
    assert figures["disk"]["max_bytes"] == 1 << 30 and figures["memory"]["resident_bytes"] > 0
    assert [backend["breaker"] for backend in figures["backends"]] in (["closed"], ["open"], ["half-open"])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_in_a_browser(server, browser, width):
    browser.open(f"http://{server.http_address}/", width)
    until(lambda: browser.ask('document.getElementById("state")?.textContent') == "Serving.", "the figures are there")
    until(lambda: "%" in browser.ask('document.querySelector("#cores td").textContent'), "and their changes")
    shown = browser.ask("document.body.innerText")
    for part in ("Disk", "Entries", "Action results", "Blobs read", "closed", "Core"):
        assert part in shown, part
    assert browser.ask('document.querySelectorAll("#cores tr").length') == 12
    browser.screenshot(ROOT / "target" / "tests" / f"page-{width}.png")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.ask(wide) == 0, "the page is wider than its window"
    # What may be wider than the window stands in a box that can be moved by itself, also by keyboard.
    outside = """[...document.querySelectorAll("body *")].filter((e) => !e.closest(".wide")
        && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML)"""
    assert browser.ask(outside) == []
    assert browser.ask('[...document.querySelectorAll(".wide")].every((e) => e.tabIndex === 0 && e.ariaLabelledByElements?.length !== 0)')
    assert browser.ask('[...document.querySelectorAll("th")].every((e) => e.scope)')
    assert browser.ask('document.documentElement.lang === "en" && document.querySelectorAll("h1, main").length === 2')


def test_the_page_keeps_up(server, browser):
    browser.open(f"http://{server.http_address}/", 800)
    entries = '[...document.querySelectorAll("#cards div")].find((e) => e.innerText.startsWith("Entries"))?.innerText'
    before = until(lambda: browser.ask(entries), "the figures are there")
    loaded = browser.ask("performance.timeOrigin")
    with Client(server.address) as client:
        for _ in range(5):
            content = unique(1000)
            client.write(upload_name(content.hash, content.size), content.chunks())
    until(lambda: browser.ask(entries) != before, "the new blobs show")
    assert browser.ask("performance.timeOrigin") == loaded, "without a reload"


def test_a_server_that_is_gone_shows(browser):
    with Server(http_address="127.0.0.1:0") as server:
        browser.open(f"http://{server.http_address}/", 800)
        until(lambda: browser.ask('document.getElementById("state")?.textContent') == "Serving.", "the figures are there")
    until(lambda: "No answer" in browser.ask('document.getElementById("state").textContent'), "the page says so")
