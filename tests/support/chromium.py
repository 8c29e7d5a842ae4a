"""Chromium without a window, driven over its DevTools pipe: no library in between."""

from __future__ import annotations

import json
import os
from base64 import b64decode
from pathlib import Path
from typing import Any

from support import browsers
from support.browsers import Browser, Navigated, find_program

CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}


class Tab(browsers.Tab):
    """A tab."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        super().__init__()
        self.browser, self.session, self.target = browser, session, target

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        return self.browser.call(method, parameters, self.session)

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            code = CODES.get(key, ord(key[0].upper()))
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, name: str) -> None:
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        (node,) = (each for each in nodes if each.get("role", {}).get("value") == "button" and name == named(each))
        box = self.call("DOM.getBoxModel", backendNodeId=node["backendDOMNodeId"])["model"]["content"]
        place = {"x": (box[0] + box[4]) / 2, "y": (box[1] + box[5]) / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def show_as(self, scheme: str = "light", medium: str = "screen") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def speak(self, languages: str) -> None:
        self.call("Emulation.setUserAgentOverride", userAgent="x", acceptLanguage=languages)

    def offline(self, offline: bool) -> None:
        self.call("Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1,
                  uploadThroughput=-1)  # fmt: skip

    def save_in(self, folder: Path) -> None:
        self.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def choose_file(self, selector: str, path: Path) -> None:
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def lift_policy(self) -> None:
        self.call("Page.setBypassCSP", enabled=True)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def requests(self) -> list[dict[str, Any]]:
        """The protocol's Request objects."""
        sent = (each["params"]["request"] for each in self.events if each["method"] == "Network.requestWillBeSent")
        return [each for each in sent if not each["url"].startswith(("about:", "data:", "blob:", "file:"))]

    def errors(self) -> list[dict[str, Any]]:
        return [each for each in self.events if each["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]

    def close(self) -> None:
        self.browser.call("Target.closeTarget", {"targetId": self.target})


def named(node: dict[str, Any]) -> str:
    """The name of a node of the accessibility tree."""
    name: str = node["name"]["value"]
    return name


class Chromium(Browser):
    """The browser."""

    def __init__(self, folder: Path) -> None:
        program = find_program("chromium", "chromium-browser", "google-chrome")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
                   "--disable-background-networking", "--disable-component-update", "--disable-extensions",
                   f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]  # fmt: skip
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        super().__init__(["bash", "-c", shell, program, *options], pass_fds=(to_browser, from_browser))
        os.close(to_browser)
        os.close(from_browser)
        self._pending, self._tabs = b"", dict[str, Tab]()

    def _close(self) -> None:
        try:
            self.call("Browser.close", {})
        finally:
            os.close(self._read)
            os.close(self._write)

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
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
