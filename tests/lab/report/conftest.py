"""A browser for the reports, where there is one."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from keepset.lab.report.page import write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

VIEWPORT = {"width": 1280, "height": 720}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fast tier opens a sweep's page; all others are of the full one."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()) and "1280-results" not in item.name:
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


@pytest.fixture(scope="package")
def tab(browser: Any) -> Any:
    """One for all pages: it has compiled plotly, which takes longer than all that a test does."""
    return browser.new_page()


@pytest.fixture(scope="package")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all pages: of another file the browser would compile plotly once more."""
    return tmp_path_factory.mktemp("report") / "report.html"


@pytest.fixture
def load(tab: Any, path: Path) -> Any:
    """Opens a report; at the end nothing may have complained, asked the network or opened a dialog."""
    complaints: list[str] = []

    def asked(request: Any) -> None:
        if request.url != path.as_uri() and not request.url.startswith("data:"):
            complaints.append(f"request: {request.url}")

    listeners = {
        "console": lambda message: complaints.append(f"console: {message.text}"),
        "pageerror": lambda error: complaints.append(f"error: {error}"),
        "dialog": lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        "request": asked,
    }

    def load(content: str, *, viewport: dict[str, int] = VIEWPORT, color_scheme: str = "light") -> Any:
        check_inert(tab)
        write(path, content)
        tab.set_viewport_size(viewport)
        tab.emulate_media(color_scheme=color_scheme)
        tab.mouse.move(0, 0)
        tab.goto(path.as_uri())
        tab.wait_for_selector("#origin > div", state="attached")  # once all is unpacked
        return tab

    for event, listener in listeners.items():
        tab.on(event, listener)
    yield load
    check_inert(tab)
    check_charts(tab)
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    assert complaints == []


def check_charts(page: Any) -> None:
    """All axes that are seen say what stands on them, and every chart has words for readers who do not see it."""
    for words, axes in page.evaluate(
        """() => [...document.querySelectorAll(".js-plotly-plot")].map((box) => [box.ariaLabel,
            Object.entries(box.layout).filter(([name]) => /^[xy]axis/.test(name))
                .filter(([, axis]) => axis.visible !== false && axis.showticklabels !== false)
                .map(([, axis]) => axis.title?.text)])"""
    ):
        assert words and words.startswith("Chart of ") and "undefined" not in words
        assert axes and all(axes), words


def check_inert(page: Any) -> None:
    """No text became a script."""
    assert page.evaluate("window.pwned") is None
