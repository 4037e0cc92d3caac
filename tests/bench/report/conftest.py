"""A browser for the reports, where there is one."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from keepset.bench.report.page import write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fast tier opens the page of latencies; all others are of the full one."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()) and item.path.name != "test_latency.py":
            item.add_marker(pytest.mark.full)


# Not for longer than this folder's tests: while it is open, nothing else can run an event loop.
@pytest.fixture(scope="package")
def browser() -> Any:
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("needs the playwright package and an installed Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def load(browser: Any, tmp_path: Path) -> Any:
    """Opens a report; at the end nothing may have complained, asked the network or opened a dialog."""
    complaints: list[str] = []
    pages = []

    def load(content: str, **options: Any) -> Any:
        path = tmp_path / f"report{len(pages)}.html"
        write(path, content)
        page = browser.new_page(**options)
        pages.append(page)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == path.as_uri() or request.url.startswith("data:")
                else complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        return page

    yield load
    for page in pages:
        assert page.evaluate("window.pwned") is None
        page.close()
    assert complaints == []
