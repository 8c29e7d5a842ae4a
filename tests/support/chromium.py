"""Chromium without a window, driven over its DevTools pipe: no library in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 30.0
CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}


def find_chromium() -> str:
    """Its path; skips, saying so, where none is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed: the page is not tried in a browser")
    return found


class Navigated(Exception):
    """The page went away while it was asked."""


class Tab:
    """A tab. events: all that the browser reported of it."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        return self.browser.call(method, parameters, self.session)

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """The first value of an expression that is true; the tab may be on its way to another page meanwhile."""

        def look() -> Any:
            with suppress(Navigated):
                return self.run(script)

        return wait_for(look, script)

    def open(self, url: str) -> None:
        """Goes there; a page that differs in its fragment alone is loaded again too."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, *keys: str) -> None:
        """Keys as from a keyboard."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            code = CODES.get(key, ord(key[0].upper()))
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """A PNG of the window at this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def offline(self, offline: bool) -> None:
        """Cuts the tab from every network, or ends that."""
        self.call("Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1,
                  uploadThroughput=-1)  # fmt: skip

    def requests(self) -> list[dict[str, Any]]:
        """What it sent since it was opened, in order: the protocol's Request objects."""
        sent = (each["params"]["request"] for each in self.events if each["method"] == "Network.requestWillBeSent")
        return [each for each in sent if not each["url"].startswith(("about:", "data:", "blob:", "file:"))]


class Chromium:
    """A browser with a profile of its own in `folder`; the same folder again is the same person's browser."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
                   "--disable-background-networking", "--disable-component-update", "--disable-extensions",
                   f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]  # fmt: skip
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, find_chromium(), *options],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._pending, self._number, self._tabs = b"", 0, dict[str, Tab]()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.call("Browser.close", {})
        except OSError:
            self._process.kill()
        self._process.wait(SECONDS)
        os.close(self._read)
        os.close(self._write)

    def kill(self) -> None:
        """Ends it without warning, and all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SECONDS)

    def tab(self) -> Tab:
        """A new tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        return tab

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """A command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("sessionId") in self._tabs:
                self._tabs[answer["sessionId"]].events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = os.read(self._read, 1 << 16)
            if not data:
                raise OSError("the browser is gone")
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """The first true value of `look`; fails after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if value := look():
            return value
        time.sleep(0.02)
    raise AssertionError(f"in vain: {what}")
