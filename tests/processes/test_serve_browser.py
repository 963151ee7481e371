"""The page of a served model in a real browser, headless: it is live, shows what was asked, and needs the token."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.inference.images import ImagePredictor
from manyhands.serve.model_server import ModelServer, ServeOptions
from manyhands.tasks.vision import ImageClassifier

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
missing = [str(path) for path in (CHROMIUM, CHROMEDRIVER) if not path.exists()]
pytestmark = [
    pytest.mark.skipif(
        bool(missing), reason=f"no browser to test with: {', '.join(missing)} is not installed"
    ),
    pytest.mark.timeout(120),
]

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(CHROMEDRIVER)))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture
def server() -> Iterator[ModelServer]:
    torch.manual_seed(0)
    predictor = ImagePredictor(ImageClassifier(side=8, white=16, width=4))
    predictor.task = "digits"
    with ModelServer(predictor, "a model", ServeOptions(workers=2)) as running:
        yield running


def text_of(browser: Any, key: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0])?.textContent ?? ''", key)


def awaited(browser: Any, condition: Callable[[], bool], what: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda _: condition(), f"waited for {what}")


def ask(server: ModelServer) -> int:
    image = str([[0] * 8] * 8)
    headers = {"Authorization": f"Bearer {server.token}"}
    request = urllib.request.Request(
        f"{server.address}/predict", f'{{"inputs": [{image}, {image}]}}'.encode(), headers
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return int(answer.status)


def test_the_page_is_live_and_shows_requests_and_deaths(browser: Any, server: ModelServer) -> None:
    browser.get(server.url)
    awaited(browser, lambda: text_of(browser, "line") == "connected", "the page to become live")
    awaited(browser, lambda: "Every request was answered" in text_of(browser, "wrong"), "both workers")
    assert browser.title == "digits · served by 2 workers"
    assert browser.current_url == f"{server.address}/", "the token leaves the address"
    assert [ask(server) for _ in range(3)] == [200] * 3
    awaited(browser, lambda: "3 × 200" in text_of(browser, "notes"), "the requests to be shown")
    assert "ms" in text_of(browser, "now")
    assert "worker 1" in text_of(browser, "workers")
    os.kill(server.view().workers[0].pid, signal.SIGKILL)
    awaited(browser, lambda: "died and were replaced: 1" in text_of(browser, "notes"), "the death to be told")
    awaited(browser, lambda: "worker 3" in text_of(browser, "workers"), "the one that replaced it")
    assert [one for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []


def test_without_the_token_the_page_says_so_and_shows_nothing(browser: Any, server: ModelServer) -> None:
    browser.get(f"{server.address}/")
    awaited(browser, lambda: "token is missing or wrong" in text_of(browser, "line"), "the refusal")
    assert text_of(browser, "workers") == ""
