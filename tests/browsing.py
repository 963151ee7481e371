"""A real browser, headless, for tests of pages: started, sized, and asked what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
_MISSING = [str(path) for path in (CHROMIUM, CHROMEDRIVER) if not path.exists()]
needs_a_browser = pytest.mark.skipif(
    bool(_MISSING), reason=f"no browser to test with: {', '.join(_MISSING)} is not installed"
)

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip

CUT = """
  const cut = [], main = document.getElementById("main");
  for (const one of main.querySelectorAll("dd, td, th, caption, .scroll, .fill, section, li, p, figcaption")) {
    if (getComputedStyle(one).overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1) cut.push(one);
    const text = document.createRange();
    text.selectNodeContents(one);
    const card = one.closest("section").getBoundingClientRect(), box = text.getBoundingClientRect();
    if (box.width > 0 && (box.right > card.right || box.left < card.left)) cut.push(one);
  }
  return [...new Set(cut)].filter((one) => !one.closest("thead")).map((one) => one.outerHTML.slice(0, 80));
"""
"""A script that names what does not fit into its card."""


@contextmanager
def browsing(folder: Path, *flags: str) -> Iterator[Any]:
    """A driver of a browser whose profile is in `folder`; what pages log and ask for is kept."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, *flags, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(CHROMEDRIVER)))
    try:
        driver.set_page_load_timeout(30)
        yield driver
    finally:
        driver.quit()


def sized(browser: Any, width: int, height: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def coloured(browser: Any, scheme: str) -> None:
    """As for a reader whose setting is `light` or `dark`."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def awaited(browser: Any, condition: Callable[[], bool], what: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 120, poll_frequency=0.05).until(lambda _: condition(), f"waited for {what}")


def text_of(browser: Any, key: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0])?.textContent ?? ''", key)


def complaints(browser: Any) -> list[str]:
    return [
        entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]
