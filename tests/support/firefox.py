"""Firefox without a window, driven over WebDriver BiDi, which it speaks itself: no library in between.

A script in about:config does what the protocol has no word for: dark, print, languages, downloads, requests.
"""

from __future__ import annotations

import json
import socket
import struct
from base64 import b64decode
from pathlib import Path
from typing import Any

from support import browsers
from support.browsers import SECONDS, Browser, Navigated, find_program, wait_for

KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "ArrowLeft": "\ue012", "ArrowRight": "\ue014"}
TO_PROXY = "network.proxy.allow_hijacking_localhost"
PREFERENCES = {
    "browser.download.alwaysOpenPanel": False,  # it would take the keyboard
    "browser.download.folderList": 2,
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    TO_PROXY: False,
}
"""All but this machine is behind a proxy that is not there, so that the browser's own errands reach nobody."""
KEEP_REQUESTS = """
globalThis.requests = [];
const { NetUtil } = ChromeUtils.importESModule("resource://gre/modules/NetUtil.sys.mjs");
Services.obs.addObserver((channel) => {
    const { requestMethod: method, URI: { spec: url }, loadInfo } = channel.QueryInterface(Ci.nsIHttpChannel);
    if (!loadInfo.targetBrowsingContextID) return; // an errand of the browser's own
    const body = channel.QueryInterface(Ci.nsIUploadChannel).uploadStream;
    const copy = body?.QueryInterface(Ci.nsICloneableInputStream).clone();
    const postData = copy ? NetUtil.readInputStreamToString(copy, copy.available()) : "";
    requests.push({ method, url, postData });
}, "http-on-modify-request");
"""
GONE = ("no such frame", "destroyed", "discarded", "AbortError")


class WebSocket:
    """Text messages to and from a server on this machine (RFC 6455)."""

    def __init__(self, port: int, path: str) -> None:
        self._stream = socket.create_connection(("127.0.0.1", port), 10 * SECONDS).makefile("rwb")
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade",
                 "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: MTIzNDU2Nzg5MGFiY2RlZg==", "", ""]  # fmt: skip
        self._write("\r\n".join(lines).encode())
        assert b" 101 " in self._stream.readline()
        while self._stream.readline().strip():
            pass

    def send(self, text: str) -> None:
        """One frame; Firefox refuses a mask of zeros, and a length in more bytes than it needs."""
        data, mask = text.encode(), b"mask"
        if len(data) < 126:
            head = struct.pack(">BB", 0x81, 0x80 | len(data))
        elif len(data) < 1 << 16:
            head = struct.pack(">BBH", 0x81, 0x80 | 126, len(data))
        else:
            head = struct.pack(">BBQ", 0x81, 0x80 | 127, len(data))
        self._write(head + mask + bytes(each ^ mask[place % 4] for place, each in enumerate(data)))

    def receive(self) -> str:
        """A message of one or several frames."""
        text, last = b"", False
        while not last:
            first, length = self._read(2)
            if length > 125:
                length = int.from_bytes(self._read(2 if length == 126 else 8), "big")
            text, last = text + self._read(length), bool(first & 0x80)
        return text.decode()

    def _read(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise OSError("the browser is gone")
        return data

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()


class Tab(browsers.Tab):
    """A tab; size apart, what is set holds for all tabs of its browser."""

    def __init__(self, browser: Firefox, context: str, before: int) -> None:
        super().__init__()
        self.browser, self.context, self._before = browser, context, before

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of WebDriver BiDi about this tab."""
        return self.browser.call(method, {"context": self.context, **parameters})

    def run(self, script: str) -> Any:
        target = {"context": self.context}
        found = self.browser.call("script.evaluate", {"expression": script, "target": target, "awaitPromise": True})
        assert found["type"] == "success", found["exceptionDetails"]
        return value_of(found["result"])

    def open(self, url: str) -> None:
        for each in ("about:blank", url):
            self.call("browsingContext.navigate", url=each, wait="complete")

    def press(self, *keys: str) -> None:
        strokes = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("browsingContext.activate")
        self.call("input.performActions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def click(self, name: str) -> None:
        place = {"type": "element", "element": self._find("accessibility", {"role": "button", "name": name})}
        moves = [{"type": "pointerMove", "x": 0, "y": 0, "origin": place}, {"type": "pointerDown", "button": 0},
                 {"type": "pointerUp", "button": 0}]  # fmt: skip
        self.call("input.performActions", actions=[{"type": "pointer", "id": "mouse", "actions": moves}])

    def resize(self, width: int, height: int) -> None:
        self.call("browsingContext.setViewport", viewport={"width": width, "height": height})

    def show_as(self, scheme: str = "light", medium: str = "screen") -> None:
        override = f"prefersColorSchemeOverride: '{scheme}', mediumOverride: '{medium}'"
        windows = "Services.wm.getMostRecentWindow('navigator:browser').gBrowser.browsers"
        self.browser.set_up(f"{windows}.forEach((each) => Object.assign(each.browsingContext, {{ {override} }}))")

    def speak(self, languages: str) -> None:
        self.browser.set_up(f"Services.prefs.setStringPref('intl.accept_languages', '{languages}')")

    def offline(self, offline: bool) -> None:
        """Not by its own offline mode, which goes on to reach this machine."""
        self.browser.set_up(f"Services.prefs.setBoolPref('{TO_PROXY}', {json.dumps(offline)})")

    def save_in(self, folder: Path) -> None:
        self.browser.set_up(f"Services.prefs.setStringPref('browser.download.dir', {json.dumps(str(folder))})")

    def choose_file(self, selector: str, path: Path) -> None:
        self.call("input.setFiles", element=self._find("css", selector), files=[str(path)])

    def lift_policy(self) -> None:
        """Nothing to do: scripts of this protocol are not bound by it."""

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("browsingContext.captureScreenshot")["data"]))

    def requests(self) -> list[dict[str, Any]]:
        """Of all tabs of its browser."""
        return self.browser.requests()[self._before :]

    def errors(self) -> list[dict[str, Any]]:
        logged = (each for each in self.events if each["method"] == "log.entryAdded")
        return [each for each in logged if each["params"]["level"] == "error"]

    def _find(self, kind: str, value: Any) -> dict[str, str]:
        """The protocol's reference to the one element that a locator names."""
        (node,) = self.call("browsingContext.locateNodes", locator={"type": kind, "value": value})["nodes"]
        return {"sharedId": node["sharedId"]}

    def close(self) -> None:
        self.browser.set_up("Services.prefs.clearUserPref('intl.accept_languages')")
        self.offline(False)
        self.call("browsingContext.close")


def value_of(remote: dict[str, Any]) -> Any:
    """The Python value of a RemoteValue of the protocol."""
    value = remote.get("value")
    if remote["type"] == "array":
        return [value_of(each) for each in value or ()]
    if remote["type"] == "object":
        return {key: value_of(each) for key, each in value or ()}
    return value


class Firefox(Browser):
    """The browser."""

    def __init__(self, folder: Path) -> None:
        place = folder / "WebDriverBiDiServer.json"
        folder.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        lines = (f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items())
        (folder / "user.js").write_text("".join(lines), encoding="utf-8")
        super().__init__(
            [find_program("firefox", "firefox-esr"), "--headless", "--no-remote", "--profile", str(folder),
             "--remote-debugging-port", "0", "--remote-allow-system-access"]
        )  # fmt: skip
        try:
            self._connect(place)
        except BaseException:  # nobody has this object yet, who could end the process
            self.kill()
            raise

    def _connect(self, place: Path) -> None:
        """Open the session whose port Firefox writes to `place`."""
        wait_for(lambda: place.is_file() and place.read_text(), "Firefox listens")
        self._socket = WebSocket(json.loads(place.read_text())["ws_port"], "/session")
        self._tabs = dict[str, Tab]()
        self.call("session.new", {"capabilities": {}})
        self.call("session.subscribe", {"events": ["log.entryAdded"]})
        self._settings = self._new_tab(0)
        self._settings.open("about:config")
        self.set_up(KEEP_REQUESTS)

    def _close(self) -> None:
        self.call("browser.close", {})

    def tab(self) -> Tab:
        return self._new_tab(len(self.requests()))

    def _new_tab(self, before: int) -> Tab:
        context = self.call("browsingContext.create", {"type": "tab"})["context"]
        tab = self._tabs[context] = Tab(self, context, before)
        return tab

    def set_up(self, script: str) -> None:
        """Runs a script with the rights of the browser itself."""
        self._settings.run(f"{script}; 0")

    def requests(self) -> list[dict[str, str]]:
        """The requests of its tabs since it was started, in order."""
        requests: list[dict[str, str]] = self._settings.run("requests")
        return requests

    def call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """A command and its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.receive())
            if answer.get("id") == self._number:
                if any(each in str(answer.get("error")) + str(answer.get("message")) for each in GONE):
                    raise Navigated
                assert answer["type"] == "success", (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            context = answer["params"].get("source", {}).get("context")
            if context in self._tabs:
                self._tabs[context].events.append(answer)
