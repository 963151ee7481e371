"""The pictures in these documents: `python docs/screenshots.py`, on a quiet machine, some four minutes.

Trains digits on two servers and three workers, of which one is slowed from a third of the run on, opens the live page
in headless Chromium during the run and after its end, at the widths of a laptop, a tablet and a phone, light and dark,
and writes docs/figures/page-*.png. Then compares strategies with a slowed worker, and writes docs/figures/compare.png
of the report and benchmarks/results/compare.json with its figures. Last come the site of `make docs` and the list of
commands at 80 columns. `--report FILE` takes one picture alone: of a report that exists, into docs/figures/ under
`--name`.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

from manyhands.observe.analyse.follow import coming_run
from manyhands.observe.draw.prometheus import metrics_text
from manyhands.serving.hosting import Dashboard

FIGURES = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
STRATEGY = "ps servers=2 replicas=1 consistency=bounded:4"
STEPS = 900
TRAIN = (
    *("digits", "--strategy", STRATEGY, "--workers", "3", "--steps", str(STEPS), "--evaluate-every", "90"),
    *("--slow", f"worker=2,factor=3,from={STEPS // 3}"),
)
COMPARE = ("digits", "--slow", "worker=1,factor=5", "--out", "compare")
LAPTOP, TABLET, PHONE = 1280, 768, 390
MAX_BYTES = 200_000
TERMINAL = "body { background: #16181d; color: #e6e6e6 } pre { font: 14px/1.35 monospace; width: 81ch }"


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Headless Chromium of the distribution."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def picture(driver: Any, name: str, width: int, *, dark: bool = False, height: int | None = None) -> None:
    """What the browser shows, as wide as asked and as high as the page or `height`, in few colours."""
    metrics = {"width": width, "height": height or 900, "deviceScaleFactor": 1, "mobile": width < 500}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    whole = driver.execute_script("return document.documentElement.scrollHeight")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**metrics, "height": height or whole})
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    path = FIGURES / name
    Image.open(io.BytesIO(base64.b64decode(taken))).convert("RGB").quantize(128).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path} · {size:,} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"{path} is larger than {MAX_BYTES:,} bytes")


def picture_run(driver: Any, folder: Path) -> None:
    """A run with a straggler, pictured while it goes on and after its end."""
    run = folder / "run"
    command = [sys.executable, "-m", "manyhands", "train", *TRAIN, "--out", str(run)]
    with Dashboard(coming_run(run, "digits", STRATEGY, 3), metrics_text) as dashboard:
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            driver.get(dashboard.url)
            _await(driver, f"return document.querySelector('progress')?.value > {0.7 * STEPS}")
            picture(driver, "page-live.png", LAPTOP)
            picture(driver, "page-live-dark.png", LAPTOP, dark=True)
            if training.wait(600):
                raise SystemExit("the run failed")
        finally:
            training.kill()
            training.wait()
        _await(driver, "return document.querySelector('dd')?.textContent === 'ended'")
        for dark in (False, True):
            picture(driver, f"page-tablet{'-dark' * dark}.png", TABLET, dark=dark, height=1400)
            picture(driver, f"page-phone{'-dark' * dark}.png", PHONE, dark=dark, height=1700)


def picture_comparison(driver: Any, folder: Path) -> None:
    """Strategies side by side, one worker slowed."""
    command = [sys.executable, "-m", "manyhands", "compare", *COMPARE]
    subprocess.run(command, cwd=folder, check=True, timeout=600)
    shutil.copy(folder / "compare" / "figures.json", RESULTS / "compare.json")
    driver.get((folder / "compare" / "report.html").as_uri())
    picture(driver, "compare.png", LAPTOP)


def picture_site(driver: Any) -> None:
    """The first page of the documentation, which `make docs` has built."""
    for dark in (False, True):
        driver.get((Path(__file__).parent.parent / "build" / "site" / "index.html").as_uri())
        picture(driver, f"site{'-dark' * dark}.png", LAPTOP, dark=dark, height=1000)


def picture_help(driver: Any, folder: Path) -> None:
    """What `manyhands` prints in a terminal of 80 columns."""
    command = [sys.executable, "-m", "manyhands"]
    environment = {**os.environ, "COLUMNS": "80"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    page = folder / "help.html"
    page.write_text(f"<style>{TERMINAL}</style><pre>$ manyhands\n{escape(printed)}</pre>", encoding="utf-8")
    driver.get(page.as_uri())
    picture(driver, "help.png", 760)


def _await(driver: Any, question: str) -> None:
    WebDriverWait(driver, 300, poll_frequency=0.1).until(lambda _: driver.execute_script(question), question)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("page", "compare", "site", "help"), help="one of them")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a picture of this report and no other")
    parser.add_argument("--name", default="report.png", help="of that picture")
    parser.add_argument("--height", type=int, help="of that picture, in pixels", metavar="PIXELS")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as driver:
        if asked.report is not None:
            driver.get(asked.report.resolve().as_uri())
            picture(driver, asked.name, LAPTOP, height=asked.height)
            return
        if asked.only in (None, "page"):
            picture_run(driver, Path(folder))
        if asked.only in (None, "compare"):
            picture_comparison(driver, Path(folder))
        if asked.only in (None, "site"):
            picture_site(driver)
        if asked.only in (None, "help"):
            picture_help(driver, Path(folder))


if __name__ == "__main__":
    main()
