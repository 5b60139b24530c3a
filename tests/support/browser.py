"""Headless Chromium, driven over a pipe in the DevTools protocol: no driver, no library."""

import base64
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

ANSWER_S = 60
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One browser with one page. Closed at the end of a `with`."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self.out = os.pipe()
        self.inn, from_browser = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --no-first-run"
        flags += f" --disable-background-networking --user-data-dir={self.profile.name}"
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        command = ["bash", "-c", script, "bash", CHROMIUM, *flags.split(), "about:blank"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[to_browser, from_browser],
            # Its helpers are to end with it.
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.calls, self.rest, self.session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ANSWER_S)
        os.close(self.out)
        os.close(self.inn)
        self.profile.cleanup()

    def call(self, method: str, **parameters):
        """Asks the browser, and waits for its answer; what else it says is passed over."""
        self.calls += 1
        request = {"id": self.calls, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.out, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.calls:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self.rest:
            got = os.read(self.inn, 1 << 16)
            assert got, "the browser has ended"
            self.rest += got
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str, width: int, height: int = 900) -> None:
        """Shows `url` in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)

    def ask(self, expression: str):
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
