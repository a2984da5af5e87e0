"""The coordinator's web page over HTTP: it answers what the rpcs answer, to whom they answer, and survives the rest."""

from __future__ import annotations

import json
import operator
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

import shardwell
from shardwell.command.cli import main
from shardwell.command.output import as_dict
from shardwell_server.cli import build_parser
from shardwell_server.serving import dashboard
from shardwell_server.serving.server_options import endpoint_of
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.security.credentials import new_key
from shardwell_wire.security.tls import Tls
from shardwell_wire.security.tokens import ClusterKey, Role
from shardwell_wire.v1 import coordinator_pb2
from tests.support.certificates import TestAuthority, replace_files
from tests.support.cluster import silent_connections, small_run, wait_until
from tests.support.server_processes import server_process

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
OF_RUN = [name for name in dashboard.RPCS if name not in ("ListRuns", "ListServers", "DescribeCluster")]


def get(
    address: str, path: str, token: str = "", *, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Returns status, text and headers of an answer."""
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    with closing(HTTPConnection(address, timeout=20)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}


def api(address: str, token: str, rpc: str, **fields: object) -> Any:
    status, text, _ = get(address, f"/api/{rpc}?{urlencode(fields)}", token)
    assert status == 200, text
    return json.loads(text)


def rpc_status(address: str, rpc: str, token: str, **fields: object) -> int:
    """Returns the status of an rpc over gRPC, as one of HTTP."""
    method = SERVICE.methods_by_name[rpc]
    request = GetMessageClass(method.input_type)(**fields).SerializeToString()
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with open_channel(address) as channel:
        path = f"/{SERVICE.full_name}/{rpc}"
        try:
            if method.server_streaming:
                list(channel.unary_stream(path)(request, metadata=metadata, timeout=20))
            else:
                channel.unary_unary(path)(request, metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return dashboard._STATUS[error.code()]
    return 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=2, dashboard=True, min_shard_bytes=64) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def run(cluster: shardwell.LocalCluster) -> Iterator[str]:
    with small_run(cluster.address, "gpt", steps=3):
        yield "gpt"


@pytest.fixture(scope="module")
def page(cluster: shardwell.LocalCluster) -> str:
    return cluster.coordinator.dashboard_address


def run_id(cluster: shardwell.LocalCluster, name: str) -> str:
    runs = api(cluster.coordinator.dashboard_address, cluster.token, "ListRuns")["runs"]
    return next(each["run_id"] for each in runs if each["run"] == name)


def test_page_needs_nothing_from_elsewhere(page: str) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        status, text, headers = get(page, path)
        assert status == 200 and headers["content-type"] == f"{kind}; charset=utf-8"
        addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.]+", re.sub(r"(^|\s)// .*", "", text, flags=re.M)))
        assert addresses <= {"http://www.w3.org"}, "the namespace of SVG"
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(| style=|<script>| on\w+=", text
        )
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert get(page, path, method="HEAD")[:2] == (200, "")
    assert 'data-needs-token="true"' in get(page, "/")[1]


def test_api_answers_what_the_rpcs_answer(cluster: shardwell.LocalCluster, page: str, run: str) -> None:
    fields: dict[str, dict[str, object]] = {name: {"run": run} if name in OF_RUN else {} for name in dashboard.RPCS}
    fields["DescribePerformance"]["logged_count"] = 3
    with open_channel(cluster.address) as channel:
        for name in set(dashboard.RPCS) - {"WatchEvents"}:
            method = SERVICE.methods_by_name[name]
            request = GetMessageClass(method.input_type)(**fields[name]).SerializeToString()
            call = channel.unary_unary(f"/{SERVICE.full_name}/{name}")

            def both_answers(name=name, method=method, request=request, call=call) -> tuple[Any, Any]:
                data = call(request, metadata=cluster.credentials.metadata, timeout=20)
                expected = as_dict(GetMessageClass(method.output_type).FromString(data))
                return _without_times(api(page, cluster.token, name, **fields[name])), _without_times(expected)

            # A heartbeat may arrive between the two.
            wait_until(lambda ask=both_answers: operator.eq(*ask()), f"{name}: {both_answers()}")
    events = api(page, cluster.token, "WatchEvents", run=run)["events"]
    assert [each["message"] for each in events if each["kind"] == "step_committed"][-1].startswith("step 2")
    later = api(page, cluster.token, "WatchEvents", run=run, after=events[-3]["time"])["events"]
    assert later == [each for each in events if each["time"] > events[-3]["time"]] and len(later) < len(events)
    assert api(page, cluster.token, "WatchEvents", run=run, after=events[-1]["time"]) == {"events": []}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        changing = ("silent_s", "state_s", "phase_s", "used_bytes", "waiting_for", "transports", "replicated_bytes")
        return {name: _without_times(each) for name, each in value.items() if name not in changing}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def test_callers_see_what_they_see_over_grpc(cluster: shardwell.LocalCluster, page: str, run: str) -> None:
    own = run_id(cluster, run)
    tokens = {
        "none": "",
        "nonsense": "nonsense",
        "of another cluster": new_key().mint(Role.OPERATOR),
        "expired": ClusterKey(cluster.key.secret, clock=lambda: time.time() - 1e6).mint(Role.OPERATOR),
        "reader": cluster.key.mint(Role.READER, run=run, run_id=own),
        "reader of an earlier run": cluster.key.mint(Role.READER, run=run, run_id="0" * 16),
        "reader of another run": cluster.key.mint(Role.READER, run="other", run_id="1" * 16),
        "trainer": cluster.key.mint(Role.TRAINER, run=run, run_id=own),
        "server": cluster.key.mint(Role.SERVER),
        "operator": cluster.key.mint(Role.OPERATOR),
    }
    found = {}
    for caller, token in tokens.items():
        for name in dashboard.RPCS:
            fields = {"run": run} if name in OF_RUN else {}
            streamed = {"duration_s": 0.01} if name == "WatchEvents" else {}
            status, text, _ = get(page, f"/api/{name}?{urlencode(fields)}", token)
            assert status == rpc_status(cluster.address, name, token, **fields, **streamed), (caller, name)
            found[caller, name] = status
            assert status == 200 or run_id(cluster, run) not in text or caller == "reader of an earlier run"
    assert {status for (caller, _), status in found.items() if caller == "operator"} == {200}
    assert {status for (caller, _), status in found.items() if caller in ("none", "nonsense", "expired")} == {401}
    assert found["reader", "DescribeRun"] == 200 and found["reader", "DescribeCluster"] == 403
    assert found["reader of another run", "DescribeRun"] == 403
    with small_run(cluster.address, "hidden"):
        assert [each["run"] for each in api(page, tokens["reader"], "ListRuns")["runs"]] == [run]
        assert api(page, tokens["reader of another run"], "ListRuns")["runs"] == []


def test_refusal_says_how_to_get_a_token(
    cluster: shardwell.LocalCluster, page: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for token, problem in (("", "carries no token"), ("x", "token")):
        status, text, headers = get(page, "/api/ListRuns", token)
        message = json.loads(text)["message"]
        assert (status, headers["www-authenticate"]) == (401, "Bearer") and problem in message
        commands = re.findall(r"`shardwell (token [^`]*)`", message)
        html = re.findall(r"<code>shardwell (token [^<]*)</code>", get(page, "/")[1])
        assert commands == html and len(commands) == 2
        for words in commands:
            arguments = shlex.split(words.replace("RUN", run))
            assert main([*arguments, "--address", cluster.address]) == 0
            assert api(page, capsys.readouterr().out.strip(), "DescribeRun", run=run)["summary"]["run"] == run


def test_bad_requests_get_a_short_answer(cluster: shardwell.LocalCluster, page: str, run: str) -> None:
    token = cluster.token
    for path, status, problem in (
        ("/nothing", 404, "the page is at /"),
        ("/api", 404, "expected /api/ and one of ListRuns, "),
        ("/api/DeleteRun?run=gpt", 404, "expected /api/"),
        ("/api/../page.js", 404, "expected /api/"),
        ("/api/DescribeRun?run=gone", 404, "run 'gone' does not exist"),
        ("/api/DescribeRun", 404, "existing runs: "),
        ("/api/DescribeRun?name=gpt", 400, "DescribeRun has no field 'name', only run"),
        ("/api/DescribePerformance?run=gpt&logged_count=x", 400, "logged_count"),
        ("/api/WatchEvents?run=gpt&after=now", 400, "after"),
        ("/api/DescribeWorld", 400, "either a run or a world"),
    ):
        found, text, headers = get(page, path, token)
        assert found == status and problem in text, (path, text)
        assert "content-security-policy" in headers and len(text) < 1000
    assert get(page, "/api/ListRuns", token, method="POST")[0] == 405
    assert get(page, "/", body=b"x" * 10)[0] == 413
    # A connection that is closed with unread bytes may be reset before the client reads the answer.
    assert raw(page, b"GET / HTTP/1.1\r\nHost: " + b"y" * 100_000)[:12] in (b"HTTP/1.1 400", b"")
    assert get(page, "/", Upgrade="websocket", Connection="Upgrade")[0] == 200
    assert raw(page, b"\x00\xff\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(page, b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert api(page, token, "DescribeRun", run=run)["summary"]["run"] == run


def raw(address: str, data: bytes) -> bytes:
    """Returns what a server answers to bytes, until it closes the connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        with suppress(ConnectionResetError):
            return b"".join(iter(lambda: connection.recv(4096), b""))
        return b""


def test_many_connections_do_not_stop_the_run(cluster: shardwell.LocalCluster, page: str) -> None:
    with silent_connections(page, dashboard._MAX_CONNECTIONS + 20), small_run(cluster.address, "beside") as session:
        assert session.step == 2
    wait_until(lambda: _answers(page), "the page does not come back")


def _answers(address: str) -> bool:
    try:
        return get(address, "/")[0] == 200
    except OSError:
        return False


def test_cluster_without_key_needs_no_token_and_the_server_stops_cleanly() -> None:
    with server_process("coordinator", "--listen", "127.0.0.1:0", "--dashboard-port", "0") as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["dashboard"]
        assert 'data-needs-token="false"' in get(address, "/")[1]
        assert api(address, "", "ListRuns") == {"runs": []}
        for name, status in (("site.example:80", 403), ("localhost:1", 200), ("[::1]:8080", 200)):
            assert get(address, "/api/ListRuns", Host=name)[0] == status, "a site may let its name lead here"
        port = address.rpartition(":")[2]
        with server_process("coordinator", "--listen", "127.0.0.1:0", "--dashboard-port", port) as second:
            output, errors = second.communicate(timeout=60)
        assert (second.returncode, output) == (1, "")
        assert f"cannot serve the dashboard on {address}: Address already in use; choose another address" in errors
        with closing(HTTPConnection(address, timeout=60)) as idle:
            idle.request("GET", "/")
            idle.getresponse().read()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "ERROR" not in errors and "Traceback" not in errors


def test_page_has_the_tls_of_the_rpcs(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "certs").make()
    arguments = ("--listen", "127.0.0.1:0", "--dashboard-port", "0", *authority.server_arguments())
    with server_process("coordinator", *arguments) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["dashboard"]
        assert b"HTTP" not in raw(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert _runs_over_tls(address, authority) == {"runs": []}
        other = TestAuthority(tmp_path / "other").make()
        replace_files(other, authority)
        assert _runs_over_tls(address, other) == {"runs": []}, "changed files are read before the next handshake"


def _runs_over_tls(address: str, authority: TestAuthority) -> Any:
    context = ssl.create_default_context(cafile=authority.path("ca"))
    with closing(HTTPSConnection(address, context=context, timeout=20)) as connection:
        connection.request("GET", "/api/ListRuns")
        return json.load(connection.getresponse())


def test_mutual_tls_asks_a_browser_for_a_certificate(tmp_path: Path) -> None:
    tls = Tls(TestAuthority(tmp_path).make().server(), require_client_cert=True)
    assert tls.server_context().verify_mode is ssl.CERT_REQUIRED


def test_network_needs_tls_and_a_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_DASHBOARD_HOST", "0.0.0.0")
    monkeypatch.setenv("SHARDWELL_DASHBOARD_PORT", "8080")
    arguments = build_parser("coordinator").parse_args(["coordinator"])
    assert endpoint_of(arguments).dashboard_bind == "0.0.0.0:8080"
    assert arguments.handler is not None and _main("coordinator") == 1
    assert "--dashboard-host 0.0.0.0 is not a loopback address, and the server has no TLS" in capsys.readouterr().err
    monkeypatch.setenv("SHARDWELL_DASHBOARD_PORT", "")
    assert endpoint_of(build_parser("coordinator").parse_args(["coordinator"])).dashboard_bind == ""
    shard = build_parser("shard").parse_args(["shard", "--coordinator", "a:1"])
    assert endpoint_of(shard).dashboard_bind == "" and not hasattr(shard, "dashboard_port")


def _main(*arguments: str) -> int:
    from shardwell_server.cli import main as server_main

    return server_main([*arguments])


def test_missing_packages_are_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "shardwell_server", "coordinator", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--dashboard-port", "0"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and done.stdout == ""
    advised = re.search(r"--dashboard-port needs the package 'uvicorn'.*: run pip install '(.*)'$", done.stderr, re.M)
    assert advised is not None and "Traceback" not in done.stderr
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    name, extra = re.fullmatch(r"(\w+)\[(\w+)\]", advised[1]).groups()  # type: ignore[union-attr]
    assert name == project["name"]
    packages = {re.split(r"[<>=]", each)[0] for each in project["optional-dependencies"][extra]}
    assert packages == {"starlette", "uvicorn"}
