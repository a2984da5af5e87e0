"""The web page in Chromium, during a run of a grid that loses a trainer. Takes screenshots, which somebody looks at.

Run by ``make dashboard-test``, which needs ``chromium`` on the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import small_run

pytestmark = [pytest.mark.dashboard, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "dashboard"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 800}
HOSTILE = "<img src=x onerror=document.title='hit'>"
HOSTILE_ANSWERS = """
  const parse = Response.prototype.json;
  const change = (value) => typeof value === "string" && !/^[0-9]/.test(value) ? value + "HOSTILE"
    : Array.isArray(value) ? value.map(change)
    : value && typeof value === "object"
      ? Object.fromEntries(Object.entries(value).map(([name, each]) => [name, change(each)])) : value;
  Response.prototype.json = async function () { return change(await parse.call(this)); };
""".replace("HOSTILE", HOSTILE)
"""Adds markup to every text in an answer, but not to numbers and times."""
_WAIT_MS = 120_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=3, dashboard=True, min_shard_bytes=4096, lease_s=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def training(cluster: shardwell.LocalCluster, folder: Path) -> Iterator[psutil.Process]:
    """Trains a grid of 2 x 2 x 2 while the block runs; yields the launcher."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWELL_")}
    environment |= {"SHARDWELL_CHECKPOINT_DIR": str(folder / "checkpoints"), "SHARDWELL_CHECKPOINT_EVERY": "10"}
    grid = ["--num-trainers", "8", "--dp", "2", "--tp", "2", "--pp", "2", "--restart", "3"]
    command = [sys.executable, "-m", "shardwell", "launch", "--coordinator", cluster.address, "--run", "gpt", *grid]
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(
            [*command, "examples/grid.py", "--num-steps", "10000"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            yield psutil.Process(launcher.pid)
        finally:
            launcher.terminate()
            launcher.wait(60)


def sign_in(page: Any, token: str) -> None:
    page.fill("#token", token)
    page.keyboard.press("Enter")


def test_page_shows_a_run_that_loses_a_trainer(cluster: shardwell.LocalCluster, browser: Any, tmp_path: Path) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    url = f"http://{cluster.coordinator.dashboard_address}/"
    page = browser.new_page(viewport=DESKTOP, color_scheme="light")
    page.set_default_timeout(_WAIT_MS)
    problems, addresses = list[str](), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    with training(cluster, tmp_path) as launcher:
        page.goto(url)
        sign_in(page, "nonsense")
        page.wait_for_selector("#problem:has-text('token')")
        page.screenshot(path=SCREENSHOTS / "login.png")
        sign_in(page, cluster.key.mint(Role.OPERATOR))
        page.wait_for_selector("h1:has-text('gpt')")
        with closing(CoordinatorClient(cluster.address, cluster.credentials)) as operator:
            operator.call("SetBackups", coordinator_pb2.SetBackupsRequest(run="gpt", backups=1))
        page.wait_for_selector(".plot .bar >> nth=39", state="attached")
        assert page.locator(".ranks td").count() == 8
        headings = page.locator(".ranks thead th").all_inner_texts()
        assert [text for text in headings if text] == [f"pp {pp} · tp {tp}" for pp in (0, 1) for tp in (0, 1)]
        assert page.locator(".times li").count() == 8

        launcher.children()[3].kill()
        page.wait_for_selector(".events li:has-text('trainer ended')")
        page.wait_for_selector(".plot .bar.warn", state="attached")
        page.screenshot(path=SCREENSHOTS / "lost.png", full_page=True)
        page.wait_for_selector("dd:has-text('8 of 8')")
        page.wait_for_selector("dd:has-text('1 per shard')")

        chart = page.locator("[data-chart=loss]")
        chart.focus()
        newest = page.locator("figure output").first.inner_text()
        for _ in range(10):
            page.keyboard.press("ArrowLeft")
        assert page.locator("figure output").first.inner_text() != newest
        page.wait_for_timeout(3000)  # the page is renewed, and keeps what the user has chosen
        assert page.evaluate("document.activeElement.dataset.chart") == "loss"
        page.keyboard.press("Escape")
        page.locator("summary", has_text="units is").click()
        page.wait_for_timeout(3000)
        assert page.locator(".units tbody tr").first.is_visible()

        for name, size, scheme in (("light", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "dark")):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") == size["width"], "nothing is cut off"
        assert cluster.token not in page.url and "token" not in page.url
        page.click("text=All runs")
        page.wait_for_selector("h1:has-text('Cluster')")
        assert page.locator("section:has-text('Servers') tbody tr").count() >= 3
        page.screenshot(path=SCREENSHOTS / "cluster-phone.png", full_page=True)
    page.click("text=Sign out")
    page.wait_for_selector("#login")
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0
    assert problems == [] and {address[: len(url)] for address in addresses} == {url}


def test_reader_sees_one_run_and_no_text_becomes_markup(cluster: shardwell.LocalCluster, browser: Any) -> None:
    url = f"http://{cluster.coordinator.dashboard_address}/"
    with small_run(cluster.address, "mine", steps=3, backups=1) as session:
        page = browser.new_page(viewport=PHONE)
        page.set_default_timeout(_WAIT_MS)
        page.goto(url)
        sign_in(page, cluster.key.mint(Role.READER, run="mine", run_id=session.run_id))
        page.wait_for_selector("h1:has-text('mine')")
        page.wait_for_selector("section:has-text('Shards') tbody tr")
        assert page.locator("td:has-text('127.0.0.1')").count() == 0, "addresses of servers are for operators"
        page.goto(f"{url}#/run/gpt")
        page.wait_for_selector("#problem:has-text('the request names run')")
        page.close()
        page = browser.new_page(viewport=PHONE)
        page.set_default_timeout(_WAIT_MS)
        page.add_init_script(HOSTILE_ANSWERS)
        page.goto(f"{url}#/run/mine")
        sign_in(page, cluster.token)
        for place in ("h1", ".ranks td", ".times li", ".events li", "section:has-text('Shards') td"):
            page.wait_for_selector(f"{place}:has-text('<img')")
        page.goto(f"{url}#/")
        page.wait_for_selector("td:has-text('<img')")
        assert page.locator("img").count() == 0 and page.title() != "hit"
