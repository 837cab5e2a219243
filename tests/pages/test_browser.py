"""Every page in a real browser, as wide as a phone and as a desk: it shows itself, whole, and asks nobody for anything.

Needs playwright (`pip install playwright`) and a Chromium: the system's, or `playwright install chromium`.
Screenshots are kept where KEYHOLE_SCREENSHOTS names a directory.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages.made import PAGES

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE, DESK = 390, 1280
OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [text, b] of boxes) {
      const out = Math.max(frame.left - b.left, b.right - frame.right, frame.top - b.top, b.bottom - frame.bottom);
      if (out > 1) found.push(`outside: ${text}`);
    }
    boxes.forEach(([s, a], i) => boxes.slice(i + 1).forEach(([t, b]) => {
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 1 && y > 1) found.push(`over each other: ${s} and ${t}, ${x.toFixed(1)} x ${y.toFixed(1)}`);
    }));
  }
  return found;
}"""
SMALLEST = """() => Math.min(99, ...[...document.querySelectorAll('svg text')]
  .filter(t => t.getBoundingClientRect().width)
  .map(t => Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b) * parseFloat(getComputedStyle(t).fontSize)))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, once for all pages."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path = next(filter(None, map(shutil.which, NAMES)), own if os.path.exists(own) else None)
        if path is None:
            pytest.skip("no Chromium is installed")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = driver.chromium.launch(executable_path=path, args=root)
        yield made
        made.close()


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_itself(browser: Any, tmp_path: Path, name: str, width: int) -> None:
    """No script error, no request but for the file, nothing wider than the screen, no label over another one or out of
    its picture, and none too small to read; in all panels that a reader can choose."""
    file = tmp_path / f"{name}.html"
    file.write_text(PAGES[name](), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme="light")
    page, trouble, asked = context.new_page(), [], []
    page.on("console", lambda said: trouble.append(said.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(file.as_uri())
        for panel in range(max(1, page.locator(".pick").count())):
            if page.locator(".pick").count():
                page.locator(".pick + label").nth(panel).click()
                assert page.locator(".panel:visible").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(OVERLAPS) == []
            assert page.locator("svg:visible").count() > 0 and page.evaluate(SMALLEST) >= 7.5
        for table in page.locator(".answers").all():  # a phone shows them whole, one under the other
            assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")
        if directory := os.environ.get("KEYHOLE_SCREENSHOTS"):
            page.screenshot(path=Path(directory) / f"{name}-{width}.png", full_page=True)
    finally:
        context.close()
    assert trouble == [] and set(asked) == {file.as_uri()}
