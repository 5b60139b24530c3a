"""Bounded waiting for a state that another process reaches."""

import time


def until(reached, what: str, timeout_s: float = 60, step_s: float = 0.02):
    """Polls `reached` until it answers something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = reached()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(step_s)
