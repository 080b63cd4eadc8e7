"""Headless Chromium for tests of pages: one browser a module, every request and error kept."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    """Its path; skips the test where it or playwright is missing."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed")
    return path


def launch(playwright):
    return playwright.chromium.launch(executable_path=chromium(), args=_ARGUMENTS)


class Opened:
    """A page in the browser, and what it asked for and complained of."""

    def __init__(self, browser, path: Path, width: int, **more) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **more)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("dialog", lambda dialog: self.complaints.append("a dialog"))
        self.url = path.as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)

    def _hear(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def pixels(self, selector: str) -> np.ndarray:
        """[height, width, 3] of what is seen of an element, from 0 to 1."""
        shot = self.page.locator(selector).screenshot()
        return imread(io.BytesIO(shot))[..., :3]
