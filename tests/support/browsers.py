"""The interface of a browser to tests, the same for each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

SECONDS = 30.0


def find_program(*names: str) -> str:
    """The path of the first that is installed; skips, saying so, where none is."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(names)} is installed: the page is not tried in that browser")
    return path


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """The first true value of `look`; fails after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if value := look():
            return value
        time.sleep(0.02)
    raise AssertionError(f"in vain: {what}")


class Navigated(Exception):
    """The page went away while it was asked."""


class Tab(ABC):
    """A tab; what is set of size, media and languages holds for it at least. events: all that was reported of it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    @abstractmethod
    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""

    def wait(self, script: str) -> Any:
        """The first value of an expression that is true; the tab may be on its way to another page meanwhile."""

        def look() -> Any:
            with suppress(Navigated):
                return self.run(script)

        return wait_for(look, script)

    @abstractmethod
    def open(self, url: str) -> None:
        """Goes there; a page that differs in its fragment alone is loaded again too."""

    @abstractmethod
    def press(self, *keys: str) -> None:
        """Keys as from a keyboard."""

    @abstractmethod
    def click(self, name: str) -> None:
        """On the button of this name in the accessibility tree."""

    @abstractmethod
    def resize(self, width: int, height: int) -> None:
        """The size of the window, without its frame."""

    @abstractmethod
    def show_as(self, scheme: str = "light", medium: str = "screen") -> None:
        """For eyes that prefer light or dark; on a screen or as `print`."""

    @abstractmethod
    def speak(self, languages: str) -> None:
        """The languages that the person reads, best first, as in Accept-Language; before a page is opened."""

    @abstractmethod
    def offline(self, offline: bool) -> None:
        """Cuts the tab from every network, or ends that."""

    @abstractmethod
    def save_in(self, folder: Path) -> None:
        """Set the folder of downloads."""

    @abstractmethod
    def choose_file(self, selector: str, path: Path) -> None:
        """Puts a file into an input of the page."""

    @abstractmethod
    def lift_policy(self) -> None:
        """Lets scripts of a test do what the page's policy forbids, from the next page on."""

    @abstractmethod
    def screenshot(self, path: Path) -> None:
        """A PNG of the window."""

    @abstractmethod
    def requests(self) -> list[dict[str, Any]]:
        """Its requests since it was opened, in order: `method`, `url` and `postData` of each."""

    @abstractmethod
    def errors(self) -> list[dict[str, Any]]:
        """Events that say what went wrong in the page."""

    @abstractmethod
    def close(self) -> None:
        """Ends it."""


class Browser(ABC):
    """A browser with a profile of its own in `folder`; the same folder again is the same person's browser."""

    def __init__(self, command: list[str], pass_fds: Iterable[int] = ()) -> None:
        self._process = subprocess.Popen(
            command, pass_fds=tuple(pass_fds), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with suppress(OSError):
                self._close()
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it without warning, and all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SECONDS)

    @abstractmethod
    def _close(self) -> None:
        """Asks it to end; an OSError where it is gone."""

    @abstractmethod
    def tab(self) -> Tab:
        """A new tab."""
