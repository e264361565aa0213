"""A real browser for tests: Debian's Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; `apt-get install chromium`, or `make setup` as root"
)


@dataclass
class Noise:
    """What a page should not do: errors on its console, requests to anybody else."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def foreign(self, own: str) -> list[str]:
        return [url for url in self.requests if not url.startswith((own, "data:", "blob:"))]


@contextmanager
def browser_page(**options: Any) -> Iterator[tuple[Any, Noise]]:
    """(page, what it did wrong) in a browser of its own; options are those of a context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(**{"viewport": {"width": 1100, "height": 900}} | options)
        page.set_default_timeout(20_000)
        noise = Noise()
        page.on("pageerror", lambda error: noise.errors.append(str(error)))
        page.on(
            "console",
            lambda said: noise.errors.append(said.text) if said.type == "error" else None,
        )
        page.on("request", lambda request: noise.requests.append(request.url))
        yield page, noise
        browser.close()
