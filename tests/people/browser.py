"""A real Chromium, driven over its DevTools protocol: no driver to install beside the browser."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 30.0


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. ``errors``: what the page logged as an error, threw, or failed to load."""

    def __init__(self, executable: str, profile: Path) -> None:
        self._process = subprocess.Popen(
            [
                executable,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.errors: list[str] = []
        self._last = 0
        self._open = ExitStack()
        try:
            self._connect(profile)
        except BaseException:
            self.close()
            raise

    def _connect(self, profile: Path) -> None:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_S
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            assert self._process.poll() is None, "Chromium ended while it started"
            assert time.monotonic() < deadline, f"Chromium gave no port within {WAIT_S} s"
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()
        self._socket = self._open.enter_context(
            connect(f"ws://127.0.0.1:{port}{path}", max_size=None)
        )
        tab = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def _ask(self, method: str, session: str | None = None, **params: Any) -> dict:
        self._last += 1
        call = {"id": self._last, "method": method, "params": params}
        self._socket.send(json.dumps(call | ({"sessionId": session} if session else {})))
        while True:
            said = json.loads(self._socket.recv(timeout=WAIT_S))
            if said.get("id") == self._last:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]
            self._event(said)

    def _event(self, said: dict) -> None:
        params = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif said.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif said.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))

    def send(self, method: str, **params: Any) -> dict:
        return self._ask(method, self._session, **params)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        said = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait(self, script: str) -> Any:
        """Until the expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            text = self.run("document.body?.innerText")
            assert time.monotonic() < deadline, f"never true: {script}; the page says {text!r}"
            time.sleep(0.05)
        return value

    def press(self, key: str, text: str = "") -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        down = {"type": "keyDown", "key": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
