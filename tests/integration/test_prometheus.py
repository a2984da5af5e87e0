"""A real Prometheus scrapes a cluster, fires an alert when a shard server is killed, and resolves it when it is back.

Run by ``make prometheus-test``, which needs ``prometheus`` and ``promtool`` on the PATH.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

import shardwell
from tests.support.cluster import small_run, wait_until
from tests.support.ports import reserved_ports

pytestmark = pytest.mark.prometheus
RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yml"


class Prometheus:
    """A running Prometheus.

    Args:
        port: Its port on loopback.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, what: str, **query: str) -> dict:
        """Returns the data of an answer; an empty dict while it does not answer."""
        try:
            with urlopen(f"{self._url}/{what}?{urlencode(query)}", timeout=5) as answer:
                data: dict = json.load(answer)["data"]
        except OSError:
            return {}
        return data

    def value(self, expression: str) -> float | None:
        """Returns the value of an expression with at most one series."""
        found = self.get("query", query=expression).get("result", [])
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """Returns the names of the alerts that fire."""
        alerts = self.get("alerts").get("alerts", [])
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def watching(cluster: shardwell.LocalCluster, folder: Path) -> Iterator[Prometheus]:
    """Runs Prometheus on a cluster with the shipped alerts, whose delays of minutes are seconds here."""
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+m", "for: 2s", RULES.read_text()))
    jobs = {
        "shardwell-coordinator": [cluster.coordinator.metrics_address],
        "shardwell-shard": [shard.metrics_address for shard in cluster.shards],
    }
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    subprocess.run(["promtool", "check", "config", folder / "prometheus.yml"], check=True, capture_output=True)
    with reserved_ports() as port, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(30)


def test_alert_fires_when_a_server_is_killed_and_is_resolved_when_it_returns(tmp_path: Path) -> None:
    with (
        shardwell.LocalCluster(num_shards=2, metrics=True, min_shard_bytes=64, lease_s=2.0) as cluster,
        watching(cluster, tmp_path) as prometheus,
        small_run(cluster.address, "gpt", steps=5) as session,
    ):
        wait_until(
            lambda: prometheus.value('sum(up{job=~"shardwell-.*"})') == 3, "three targets are up", timeout_s=60.0
        )
        wait_until(
            lambda: prometheus.value('shardwell_run_committed_step{run="gpt"}') == session.step == 5, "five steps"
        )
        assert prometheus.value('shardwell_run_trainers{run="gpt", state="live"}') == 1
        assert prometheus.firing() == set()
        cluster.shards[0].kill()
        wait_until(lambda: {"ServerDown", "ServerLost"} <= prometheus.firing(), "the alerts fire", timeout_s=60.0)
        cluster.shards[0].restart(time.monotonic() + 60)
        wait_until(lambda: prometheus.firing() == set(), "the alerts are resolved", timeout_s=60.0)
        address = cluster.shards[0].metrics_address
        assert prometheus.value(f'shardwell_server_lease_valid{{instance="{address}"}}') == 1
        assert prometheus.value(f'shardwell_server_version{{instance="{address}"}}') == 5
        cluster.coordinator.kill()
        wait_until(lambda: "CoordinatorDown" in prometheus.firing(), "the alert fires", timeout_s=60.0)
        cluster.restart_coordinator()
        wait_until(lambda: prometheus.firing() == set(), "the alert is resolved", timeout_s=60.0)
