"""Chromium that a test can type into, over the pipe of its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
_SECONDS = 30


class Chromium:
    """A page in a window of its own, until the context ends."""

    def __init__(self, profile: Path, url: str) -> None:
        self._profile, self._url = profile, url
        self._last, self._buffer, self._session = 0, b"", ""
        self.errors: list[Any] = []
        """What the page wrote into its console, and its exceptions."""

    def __enter__(self) -> Self:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        with ExitStack() as stack:
            for each in (theirs, answers):
                stack.callback(os.close, each)
            self._process = subprocess.Popen(  # it reads from descriptor 3 and writes to 4
                [
                    *("bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash"),
                    *(str(CHROMIUM), *options, f"--user-data-dir={self._profile}"),
                ],
                pass_fds=(theirs, answers),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Page.navigate", url=self._url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.evaluate(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **named)

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int) -> None:
        """Give the page a window of another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        asked = {"id": self._last, "method": method, "params": parameters}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.errors.append(answer["params"])
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 16)
            assert read, "Chromium has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
