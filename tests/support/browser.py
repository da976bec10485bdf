"""Headless Chromium, driven by its DevTools protocol through a pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None if there is none here."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
TIMEOUT_SECONDS = 60.0
COMMANDS_FD, EVENTS_FD = 3, 4
"""File descriptors from which the browser reads commands, and to which it writes results and events."""
ENTER, ESCAPE, TAB = ("Enter", 13, "\r"), ("Escape", 27, ""), ("Tab", 9, "")
SHIFT = 8


class Connection:
    """Sends commands through the pipe, and collects events while it waits for results."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._read = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        command: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        command |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next_message()).get("id") != self._last_id:
            self.events.append(message)
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._events], [], [], TIMEOUT_SECONDS)[0], "the browser does not answer"
            received = os.read(self._events, 2**20)
            assert received, "the browser has ended"
            self._read += received
        first, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message


class Page:
    """One tab of the browser."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        target = connection.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = connection.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._connection.call(method, self._session, **parameters)

    @property
    def problems(self) -> list[str]:
        """Uncaught exceptions, and violations of the page's security policy."""
        found = [event["params"] for event in self._connection.events if event.get("sessionId") == self._session]
        thrown = [row["exceptionDetails"]["text"] for row in found if "exceptionDetails" in row]
        logged = [row["entry"] for row in found if "entry" in row]
        return thrown + [entry["text"] for entry in logged if entry["source"] in ("security", "javascript")]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return the value of a JavaScript expression once it is truthy."""
        started = time.monotonic()
        while not (value := self.run(script)):
            assert time.monotonic() < started + TIMEOUT_SECONDS, script
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Insert text into the focused element."""
        self._call("Input.insertText", text=text)

    def press(self, key: tuple[str, int, str], modifiers: int = 0) -> None:
        name, code, text = key
        pressed = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def scroll(self, x: int, y: int, by: int) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def show_as(self, width: int, height: int, *, dark: bool = False, still: bool = False) -> None:
        """Set the size of the window, and whether the user prefers dark pages and no motion."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self._call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def picture(self) -> bytes:
        """Return a PNG of the window."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Connection]:
    """Run the browser with its profile in the folder ``profile``, and yield a connection to it."""
    assert BROWSER
    (commands_out, commands), (events, events_in) = os.pipe(), os.pipe()
    passed = [fcntl(end, F_DUPFD_CLOEXEC, 10) for end in (commands_out, events_in)]  # clear of the numbers to pass
    os.close(commands_out)
    os.close(events_in)
    actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, *pair) for pair in zip(passed, (COMMANDS_FD, EVENTS_FD), strict=True)]
    arguments = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(BROWSER, arguments, os.environ, file_actions=actions, setsid=True)
    for end in passed:
        os.close(end)
    connection = Connection(commands, events)
    try:
        yield connection
        connection.call("Browser.close")
    finally:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(commands)
        os.close(events)
