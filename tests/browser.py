"""A real Chromium without a window, over its DevTools protocol: opens a page and says what happened.

Skips where there is no Chromium; TGI_TEST_CHROMIUM names one that is elsewhere.
"""

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("TGI_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
WHY_NOT = "needs Chromium (or TGI_TEST_CHROMIUM=/path/to/it)"
_SECONDS = 60.0


class Tab:
    """One page. `problems` are console messages above a note and uncaught errors; `requests` are all addresses asked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str = "") -> None:
        self._socket, self._session, self.last = socket, session, 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.last += 1
        asked = {"id": self.last, "method": method, "params": params}
        await self._socket.send_json(asked | ({"sessionId": self._session} if self._session else {}))
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.receive_str(), _SECONDS))
            if message.get("id") == self.last:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    async def wait(self, event: str) -> None:
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.receive_str(), _SECONDS))
            self._note(message)
            if message.get("method") == event:
                return

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] != "info":
                self.problems.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.problems.append(f"console: {params['args']}")
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case _:
                pass

    async def open(
        self, url: str, width: int, height: int = 800, dark: bool = False, print_media: bool = False
    ) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", media="print" if print_media else "", features=scheme)
        mobile = width < 500
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )
        await self.call("Page.navigate", url=url)
        await self.wait("Page.loadEventFired")

    async def evaluate(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def screenshot(self, file: Path, whole: bool = True) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    async def pdf(self) -> bytes:
        done = await self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(done["data"])


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        # The sandbox cannot be had inside most containers; the pages are our own.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        flags += ["--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            address = await asyncio.wait_for(asyncio.to_thread(_find_address, process), _SECONDS)
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(address, max_msg_size=0, autoclose=False) as socket,
            ):
                browser = Tab(socket)
                target = (await browser.call("Target.createTarget", url="about:blank"))["targetId"]
                attached = await browser.call("Target.attachToTarget", targetId=target, flatten=True)
                tab = Tab(socket, attached["sessionId"])
                tab.last = 1000
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                yield tab
        finally:
            process.terminate()
            process.wait(_SECONDS)


def _find_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        if found := re.search(r"DevTools listening on (ws://\S+)", line):
            return found[1]
    raise AssertionError(f"Chromium did not start: {told[-2000:]}")
