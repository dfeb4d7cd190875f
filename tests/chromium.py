"""A browser that tests and pictures drive through its debugging pipe, as its own tools do."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.planner.page import render

BROWSER = next(filter(None, map(shutil.which, render.BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(render.BROWSERS)} is installed"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)
# The browser reads commands from descriptor 3 and writes to 4.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for end, own in zip(ends, (3, 4)):
    os.dup2(end, own)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), "ArrowRight": ("", 39),
         "ArrowLeft": ("", 37), "End": ("", 35), "Home": ("", 36), "Space": (" ", 32)}  # fmt: skip


class Browser:
    """One that is running."""

    def __init__(self, process: subprocess.Popen, commands: int, answers: int):
        self._process, self._commands, self._answers = process, commands, answers
        self._ids = itertools.count(1)
        self._read = b""
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **params) -> dict:
        """What a command brings; events that come meanwhile are kept."""
        id = next(self._ids)
        message = {"id": id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline, answer = time.monotonic() + 60, None
        while answer is None:
            for found in self._receive(deadline):
                if found.get("id") == id:
                    answer = found
                else:
                    self.events.append(found)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def page(self, **size) -> "Page":
        """A new page, which shares nothing with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        return Page(self, found["sessionId"], context, **size)

    def _receive(self, deadline: float) -> list[dict]:
        seconds = max(0.0, deadline - time.monotonic())
        assert select.select([self._answers], [], [], seconds)[0], "the browser does not answer"
        data = os.read(self._answers, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._read = (self._read + data).split(b"\0")
        return [json.loads(each) for each in whole]


class Page:
    """A page of it."""

    def __init__(self, browser: Browser, session: str, context: str, width=1280, height=860):
        self._browser, self._session, self.context = browser, session, context
        for name in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{name}.enable")
        self.resize(width, height)

    def call(self, method: str, **params) -> dict:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int, scale: float = 1, is_phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=is_phone)  # fmt: skip

    def prefer(self, **features: str) -> None:
        """Media features, such as color_scheme="dark"."""
        named = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=named)

    def open(self, url: str) -> None:
        assert "errorText" not in self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def allow(self, *permissions: str) -> None:
        self._browser.call(
            "Browser.grantPermissions", permissions=permissions, browserContextId=self.context
        )

    def reload(self) -> None:
        self.do("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self.context)

    def do(self, script: str):
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                          awaitPromise=True, userGesture=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Returns once an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.do(f"!!({condition})"):
            assert time.monotonic() < deadline, f"it did not happen in time: {condition}"
            time.sleep(0.02)

    def text(self, query: str) -> str:
        return self.do(f"document.querySelector({json.dumps(query)})?.textContent")

    def click(self, query: str) -> None:
        x, y = self.middle(query)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, query: str) -> None:
        """Moves the pointer there."""
        x, y = self.middle(query)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, query: str) -> tuple[float, float]:
        found = self.do(
            f"(() => {{ const found = document.querySelector({json.dumps(query)});"
            "found.scrollIntoView({ block: 'nearest' });"
            "const b = found.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return found[0], found[1]

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        text, code = _KEYS[key]
        name = " " if key == "Space" else key
        held = {"key": name, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **held)
        self.call("Input.dispatchKeyEvent", type="keyUp", **held)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]
        path.write_bytes(base64.b64decode(data))

    def events(self, method: str) -> list[dict]:
        """Parameters of all that came so far."""
        self.do("0")  # what came before it is read
        return [
            each["params"]
            for each in self._browser.events
            if each.get("sessionId") == self._session and each["method"] == method
        ]

    def requests(self) -> list[str]:
        """The addresses that it asked."""
        return [each["request"]["url"] for each in self.events("Network.requestWillBeSent")]

    def forget_problems(self) -> None:
        """Those that were expected."""
        kept = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        self._browser.events = [
            each
            for each in self._browser.events
            if each.get("sessionId") != self._session or each["method"] not in kept
        ]

    def problems(self) -> list[str]:
        """What stands in its console: errors, warnings, policies that were broken."""
        said = [str(each["args"]) for each in self.events("Runtime.consoleAPICalled")]
        said += [str(each["exceptionDetails"]) for each in self.events("Runtime.exceptionThrown")]
        return said + [str(each["entry"]) for each in self.events("Log.entryAdded")]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with this."""
    assert BROWSER is not None
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _START, str(command_end), str(answer_end), BROWSER,
             *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            pass_fds=(command_end, answer_end), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_end)
        os.close(answer_end)
        found = Browser(process, commands, answers)
        try:
            yield found
            found.call("Browser.close")
        finally:
            os.close(commands)
            os.close(answers)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
