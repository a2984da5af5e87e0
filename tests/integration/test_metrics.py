"""The metrics of coordinator and shard servers: what they say, their names, and that series of deleted runs end."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from shardwell.command.cli import build_parser as build_client_parser
from shardwell.transport.service_client import CoordinatorClient
from shardwell_server.cli import build_parser
from shardwell_server.serving.server_options import endpoint_of
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import silent_connections, small_run, wait_until
from tests.support.server_processes import server_process

DEPLOY = Path(__file__).parents[2] / "deploy"
_NAME = re.compile(r"shardwell_(coordinator|run|cluster_server|server|rpc|events|rpcs|build)(_[a-z]+)*")
_LABELS = {"run", "server", "state", "role", "kind", "method", "code", "transport", "version", "le"}


def scrape(address: str, path: str = "/metrics") -> tuple[int, str]:
    with closing(HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def families(address: str) -> dict[str, Metric]:
    status, text = scrape(address)
    assert status == 200, text
    found = list(text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    (number,) = [
        sample.value
        for family in found.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return number


def runs_in(found: dict[str, Metric]) -> set[str]:
    return {sample.labels.get("run", "") for family in found.values() for sample in family.samples} - {""}


@pytest.fixture(scope="module")
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=2, metrics=True, min_shard_bytes=64) as cluster:
        yield cluster


def test_metrics_say_what_a_run_does(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    settings = {"backups": 1, "checkpoint_dir": folder, "token_file": cluster.token_file}
    with small_run(cluster.address, "gpt", steps=3, **settings) as session:
        session.save_checkpoint(wait=True)
        of_cluster = families(cluster.coordinator.metrics_address)
        of_shards = [families(shard.metrics_address) for shard in cluster.shards]
        for name, expected in {
            "shardwell_run_committed_step": 3,
            "shardwell_run_wanted_trainers": 1,
            "shardwell_run_checkpoint_step": 3,
            "shardwell_run_checkpoint_failing": 0,
            "shardwell_run_rollbacks_total": 0,
            "shardwell_run_readers": 0,
            "shardwell_run_max_reader_lag_versions": 0,
            "shardwell_run_step_duration_seconds_count": 2,
        }.items():
            assert value(of_cluster, name, run="gpt") == expected, name
        assert value(of_cluster, "shardwell_run_trainers", run="gpt", state="live") == 1
        assert value(of_cluster, "shardwell_events_total", run="gpt", kind="step_committed") == 3
        assert value(of_cluster, "shardwell_events_total", run="gpt", kind="rolled_back") == 0
        assert value(of_cluster, "shardwell_events_total", run="", kind="server_registered") == 2
        for wanted in ("shardwell_run_wanted_backups", "shardwell_run_backups_in_sync"):
            assert value(of_cluster, wanted, run="gpt") == value(of_cluster, "shardwell_run_shards", run="gpt") > 0
        for number, found in enumerate(of_shards):
            name = f"shard-{number}"
            assert value(of_cluster, "shardwell_cluster_server_state", server=name, state="live") == 1
            size = value(found, "shardwell_server_shard_bytes", run="gpt", role="primary")
            assert value(of_cluster, "shardwell_cluster_server_shard_bytes", server=name, role="primary") == size > 0
            assert value(found, "shardwell_server_version", run="gpt") == 3
            assert value(found, "shardwell_rpcs_total", method="Update", code="OK") >= 3
            assert value(found, "shardwell_server_lease_valid") == 1
            budget = value(found, "shardwell_server_memory_budget_bytes")
            assert 0 < value(found, "shardwell_server_memory_used_bytes") < budget
            assert value(found, "process_resident_memory_bytes") > 0
        reduced = sum(value(found, "shardwell_server_reduced_bytes_total", transport="shm") for found in of_shards)
        assert reduced > 0
        with shardwell.attach(cluster.address, run="gpt", token_file=cluster.token_file) as reader, reader.pin():
            wait_until(
                lambda: value(families(cluster.shards[0].metrics_address), "shardwell_server_pins", run="gpt") == 1,
                "the pin is not counted",
            )
    with closing(CoordinatorClient(cluster.address, cluster.credentials)) as operator:
        operator.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run="gpt", force=True))
    for server in (cluster.coordinator, *cluster.shards):
        assert runs_in(families(server.metrics_address)) == set()
    deleted = families(cluster.coordinator.metrics_address)
    assert value(deleted, "shardwell_events_total", run="", kind="run_deleted") == 1


def test_streamed_bytes_are_counted(cluster: shardwell.LocalCluster) -> None:
    def moved() -> tuple[float, float]:
        found = [families(shard.metrics_address) for shard in cluster.shards]
        gathered = sum(value(each, "shardwell_server_gathered_bytes_total") for each in found)
        return gathered, sum(value(each, "shardwell_server_reduced_bytes_total", transport="stream") for each in found)

    for transports in ("socket", "grpc"):
        before = moved()
        with small_run(cluster.address, transports, transfers=shardwell.TransferOptions(transports=transports)):
            after = moved()
        assert all(late > early for late, early in zip(after, before, strict=True)), transports


def test_names_help_types_and_labels(cluster: shardwell.LocalCluster) -> None:
    with small_run(cluster.address, "names"):
        texts = [scrape(server.metrics_address)[1] for server in (cluster.coordinator, *cluster.shards)]
    for text in texts:
        named = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP shardwell_")]
        typed = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE shardwell_"))
        assert set(named) == set(typed) and len(named) > 10
        for name, kind in typed.items():
            assert _NAME.fullmatch(name), name
            assert (kind == "counter") == name.endswith("_total"), name
            assert not re.search(r"_(ms|millis|minutes|mib|percent)(_|$)", name), name
        samples = [line for line in text.splitlines() if line.startswith("shardwell_")]
        assert {label for line in samples for label in re.findall(r'[{,]([a-z_]+)="', line)} <= _LABELS
        assert len(samples) < 700, "too many series for one run and three servers"
        if promtool := shutil.which("promtool"):
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
            )
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_other_paths_show_nothing(cluster: shardwell.LocalCluster) -> None:
    assert scrape(cluster.coordinator.metrics_address, "/")[0] == 404
    assert "gpt" not in scrape(cluster.coordinator.metrics_address, "/debug")[1]


def test_many_connections_do_not_stop_the_server(cluster: shardwell.LocalCluster) -> None:
    address = cluster.shards[0].metrics_address
    with silent_connections(address, 20), small_run(cluster.address, "beside") as session:
        assert session.step == 2
    wait_until(lambda: _answers(address), "the metrics do not come back")


def _answers(address: str) -> bool:
    try:
        return scrape(address)[0] == 200
    except OSError:
        return False


def test_process_names_the_address_that_is_taken(cluster: shardwell.LocalCluster) -> None:
    port = cluster.coordinator.metrics_address.rpartition(":")[2]
    with server_process("coordinator", "--listen", "127.0.0.1:0", "--metrics-port", port) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use; choose another address with" in errors


def test_port_is_checked_and_may_be_empty(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHARDWELL_METRICS_PORT", "")
    assert endpoint_of(build_parser("coordinator").parse_args(["coordinator"])).metrics_bind == ""
    monkeypatch.setenv("SHARDWELL_METRICS_PORT", "9464")
    arguments = build_parser("coordinator").parse_args(["coordinator", "--metrics-host", "[::1]"])
    assert endpoint_of(arguments).metrics_bind == "[::1]:9464"
    with pytest.raises(SystemExit):
        build_parser("coordinator").parse_args(["coordinator", "--metrics-port", "70000"])
    assert "expected a port from 0 to 65535, got '70000'" in capsys.readouterr().err


def expressions() -> list[str]:
    """Returns the expressions of the alerts and the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana/shardwell.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    rules = re.findall(r"expr: (?:>-\n)?(.*?)\n +(?:for|labels):", _alerts(), re.DOTALL)
    assert len(rules) == _alerts().count("- alert:") and targets and variables
    return [*targets, *variables, *rules]


def _alerts() -> str:
    return (DEPLOY / "prometheus/alerts.yml").read_text()


def test_alerts_and_dashboard_use_metrics_that_exist(cluster: shardwell.LocalCluster) -> None:
    found = [families(server.metrics_address) for server in (cluster.coordinator, *cluster.shards)]
    known = {sample.name for each in found for family in each.values() for sample in family.samples} | {"up"}
    with_series_later = {"shardwell_run_checkpoint_step", "shardwell_run_checkpoint_timestamp_seconds"}
    text = "".join(scrape(server.metrics_address)[1] for server in (cluster.coordinator, *cluster.shards))
    known |= {line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")}
    known.add("shardwell_run_step_duration_seconds_bucket")
    assert with_series_later <= known
    for expression in expressions():
        used = set(re.findall(r"\b(?:shardwell|process)_[a-z_]+", expression)) | set(re.findall(r"\bup\b", expression))
        assert used and used <= known, expression


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana/shardwell.json").read_text())["panels"]
    cells = [
        (at["x"] + x, at["y"] + y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["w"])
        for y in range(at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_runbooks_name_commands_that_exist() -> None:
    runbooks = re.findall(r"runbook: >-\n(.*?)\n\n", f"{_alerts()}\n", re.DOTALL)
    assert len(runbooks) == _alerts().count("- alert:")
    for runbook in runbooks:
        text = re.sub(r"\{\{ \$labels\.[a-z]+ \}\}", "NAME", " ".join(runbook.split()))
        commands = [shlex.split(each) for each in re.findall(r"`(shardwell[^`]*)`", text)]
        assert commands, runbook
        for program, *words in commands:
            parser = build_client_parser(words[0]) if program == "shardwell" else None
            if parser is not None:
                parser.parse_args(words)
            else:
                assert (program, words[0]) in {("shardwell-server", "coordinator"), ("shardwell-server", "shard")}


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Debian's package `promtool`")
@pytest.mark.parametrize(
    "words",
    [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_accepts_the_alerts(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
