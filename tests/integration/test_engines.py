"""Plain models and engines that follow a run: ``shardwell.engines`` without vLLM."""

from __future__ import annotations

import email.message
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.engines import GroupReader, follow, run_command
from shardwell.engines.vllm_server import VllmServer
from shardwell.transport.service_client import CoordinatorClient
from shardwell.weights import pinned_version
from shardwell.weights import reader as reader_module
from shardwell.weights.pinned_version import UnitReader
from shardwell_wire.errors import (
    CorruptDataError,
    ShardwellError,
    StepStateError,
    UnavailableError,
    UsageError,
    VersionGoneError,
)
from shardwell_wire.v1 import coordinator_pb2
from tests.support.background_training import BackgroundTraining
from tests.support.cluster import wait_until
from tests.support.processes import ROOT, run_ranks


class Model(nn.Module):
    """A tied model with ``generate`` of its own, which tells its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.leave.weight, self.norm = self.enter.weight, nn.LayerNorm(8)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)))

    def generate(self, x: torch.Tensor, *, times: int) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(60)
        for _ in range(times):
            x = self(x)
        return x


class Training(BackgroundTraining):
    """A run that trains the model."""

    model, units, width = Model, {nn.LayerNorm}, 8


@pytest.fixture
def training(cluster: shardwell.LocalCluster) -> Iterator[Training]:
    training = Training(cluster.address, keep_versions=3)
    with training.in_background():
        yield training


@pytest.fixture
def reader(cluster: shardwell.LocalCluster, training: Training) -> Iterator[shardwell.Reader]:
    with shardwell.attach(cluster.address, training.run) as reader:
        yield reader


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def assert_answer(training: Training, answer: tuple[int, torch.Tensor]) -> None:
    """Asserts that an answer is that of its version."""
    version, output = answer
    wait_until(lambda: version in training.states, "the state")
    plain = Model()
    plain.load_state_dict(training.states[version])
    assert not output.requires_grad
    assert torch.equal(output, plain.generate(X, times=3))


def test_every_answer_is_that_of_its_version(training: Training, reader: shardwell.Reader) -> None:
    live = shardwell.engines.LiveModel(reader, Model())
    with live.following(pause_s=0.1):
        answers = [live.generate(X, times=3)]
        while len({version for version, _ in answers}) < 5:  # also if the requests leave the model no rest
            answers.append(live.generate(X, times=3))
    assert [version for version, _ in answers] == sorted(version for version, _ in answers)
    for answer in {answer[0]: answer for answer in answers}.values():
        assert_answer(training, answer)


def test_new_weights_wait_for_the_request_that_is_computed(training: Training, reader: shardwell.Reader) -> None:
    live = shardwell.engines.LiveModel(reader, model := Model())
    first = live.follow()
    model.go_on.clear()
    answers: list[Any] = []
    request = threading.Thread(target=lambda: answers.append(live.generate(X, times=3)))
    request.start()
    assert model.entered.wait(60)
    training.wait_for(first + 2)
    update = threading.Thread(target=live.follow)
    update.start()
    wait_until(live._using._next.locked, "the update")
    assert live.version == first
    model.go_on.set()
    request.join(60)
    update.join(60)
    assert [version for version, _ in answers] == [first] and live.version > first
    assert_answer(training, answers[0])


def fail(*_: object) -> None:
    raise CorruptDataError("planted")


def test_failed_read_leaves_the_former_version(
    training: Training, reader: shardwell.Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = shardwell.engines.LiveModel(reader, Model())
    with pytest.raises(UsageError, match=r"no weights of the run yet: call follow\(\) first"):
        live.generate(X, times=3)
    assert live.version == -1
    with live.following(pause_s=0.05):
        with monkeypatch.context() as patch:
            patch.setattr(UnitReader, "read", fail)
            wait_until(lambda: "planted" in caplog.text, "a failed read")
            former = live.version
            training.wait_for(former + 2)
            assert live.generate(X, times=3)[0] == former
        wait_until(lambda: live.version > former, "a newer version")
    assert f"the model stays at version {former}: planted" in caplog.text
    assert_answer(training, live.generate(X, times=3))


def test_engine_gets_a_whole_version_or_nothing(
    training: Training, reader: shardwell.Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: dict[str, torch.Tensor] = {}
    training.wait_for(5)
    newest = training.pause()
    assert shardwell.engines.load_weights(reader, weights.update, newest - 1) == newest - 1
    assert weights.keys() == {"enter.weight", "leave.bias", "norm.weight", "norm.bias"}
    assert all(torch.equal(value, training.states[newest - 1][name]) for name, value in weights.items())
    weights.clear()
    renamed = {"enter.weight": "W"}
    assert shardwell.engines.load_weights(reader, weights.update, rename=renamed.get) == newest
    assert torch.equal(weights.pop("W"), training.states[newest]["enter.weight"]) and not weights
    assert shardwell.engines.load_weights(reader, weights.update, newest - 1, names=["norm.*", "*bias"]) == newest - 1
    assert weights.keys() == {"leave.bias", "norm.weight", "norm.bias"}
    assert all(torch.equal(value, training.states[newest - 1][name]) for name, value in weights.items())
    weights.clear()
    version, halves = reader.read(newest, names="enter.*", slices={"*": (0, 1, 2)})
    assert version == newest and halves.keys() == {"enter.weight"}
    assert torch.equal(halves["enter.weight"], training.states[newest]["enter.weight"][4:])
    with pytest.raises(UsageError, match=r"no parameter or buffer 'lora.\*'"):
        shardwell.engines.load_weights(reader, weights.update, names="lora.*")
    with pytest.raises(VersionGoneError, match="is no longer available"):
        shardwell.engines.load_weights(reader, weights.update, newest - 4)
    reads, fails = UnitReader.read, iter([False, True])
    monkeypatch.setattr(UnitReader, "read", lambda *arguments: fail() if next(fails) else reads(*arguments))
    with pytest.raises(CorruptDataError, match="planted"):
        shardwell.engines.load_weights(reader, weights.update)
    assert not weights


def test_versions_before_and_after_a_rollback_differ(
    training: Training, reader: shardwell.Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.pause()
    before, described = reader.newest(), reader._describe()
    assert before == reader.newest() and before[0] == reader.version
    described.rollback_count += 1
    monkeypatch.setattr(reader, "_describe", lambda: described)
    assert reader.newest()[0] == before[0] and reader.newest()[1] != before[1]


def test_code_of_the_page_for_sglang_runs(training: Training, reader: shardwell.Reader) -> None:
    pattern = r'```python title="update_sglang.py"\n(.*?)^```'
    [code] = re.findall(pattern, (ROOT / "docs/serving.md").read_text(), re.S | re.M)
    calls: list[Any] = []
    answer = True, ""
    engine = SimpleNamespace(
        begin_weight_update=lambda: calls.append("begin"),
        update_weights_from_tensor=lambda tensors: calls.append(dict(tensors)) or answer,
        end_weight_update=lambda: calls.append("end"),
    )
    names = {"shardwell": shardwell, "reader": reader, "engine": engine}
    exec(code, names)
    begin, tensors, end = calls
    assert (begin, end) == ("begin", "end")
    assert torch.equal(tensors["norm.weight"], training.states[names["version"]]["norm.weight"])
    answer = False, "planted"
    with pytest.raises(RuntimeError, match="planted"):
        exec(code, names)
    assert calls[-1] == "end"


@pytest.mark.filterwarnings("ignore")
def test_check_of_the_model_leaves_the_engines_config() -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=8, **sizes)
    before = dict(vars(config))
    with pytest.raises(UsageError, match="does not fit the engine's model LlamaForCausalLM"):
        shardwell.engines.refuse_other_model({}, config)
    assert vars(config) == before


def load_in_group(rank: int, folder: Path, address: str, token_file: str, run: str, alone: bool) -> None:
    """Loads versions in a process of a group of three, and saves what was loaded and what happened."""
    pinned_version.TRANSPORT_NAMES = ("socket",)  # as on another host
    store = dist.FileStore(str(folder / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    if alone and rank == 2:
        reader_module._can_map = lambda pid, *_: pid == os.getpid()  # as if in another container
    readers, failures, loaded = list[shardwell.Reader](), list[str](), dict[int, dict[str, torch.Tensor]]()

    def attach() -> shardwell.Reader:
        readers.append(shardwell.attach(address, run, token_file=token_file))
        return readers[-1]

    def load(tensors: dict[str, torch.Tensor]) -> None:
        loaded[len(loaded)] = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors["leave.bias"].fill_(7)  # not seen by the others

    group = GroupReader(attach, dist.group.WORLD)
    newest = int((folder / "newest").read_text())
    group.update(newest - 1, load, "started")
    group.update(newest - 1, load, "read")
    assert not loaded
    group.update(newest - 1, load)
    for version, failing in ((newest, rank == 1), (newest - 20, False)):
        reads = reader_module.map_tensors
        reader_module.map_tensors = fail if failing else reads
        try:
            group.update(version, load)
        except ShardwellError as error:
            failures.append(type(error).__name__)
        reader_module.map_tensors = reads
    group.update(newest, load)
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    received = sum(each.stats()["received_bytes"] for each in readers)
    torch.save((loaded, failures, received, [each for each in files if "shardwell-" in each]), folder / f"{rank}")
    group.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("alone", [False, True])
def test_processes_of_a_host_read_once_and_load_together(
    cluster: shardwell.LocalCluster, training: Training, tmp_path: Path, alone: bool
) -> None:
    training.wait_for(25)
    newest = training.pause()
    (tmp_path / "newest").write_text(str(newest))
    run_ranks(load_in_group, tmp_path, cluster.address, cluster.token_file, training.run, alone, count=3)
    results = [torch.load(tmp_path / str(rank)) for rank in range(3)]
    for loaded, _, _, left in results:
        assert not left
        for number, version in enumerate((newest - 1, newest)):
            state = training.states[version]
            assert loaded[number].keys() == {"enter.weight", "leave.bias", "norm.weight", "norm.bias"}
            assert all(torch.equal(value, state[name]) for name, value in loaded[number].items())
    mapping = ["UnavailableError", "CorruptDataError", "UnavailableError"]
    gone = ["VersionGoneError", "UnavailableError", "VersionGoneError" if alone else "UnavailableError"]
    assert [failures for _, failures, *_ in results] == [list(each) for each in zip(mapping, gone, strict=True)]
    received = [received for *_, received, _ in results]
    size = sum(value.nbytes for value in results[0][0][0].values())
    assert received[1] == 0 and received[0] >= 3 * size  # the version that one process could not map was read twice
    assert received[2] == (received[0] if alone else 0)


class FakeServer(VllmServer):
    """A server that records the calls and the versions that it is told to load."""

    def __init__(self, url: str = "http://vllm", label: str = "default") -> None:
        super().__init__(url, {"run": "gpt"})
        self.label, self.fails = label, dict[str, BaseException]()
        self.calls, self.loaded = list[str](), list[int]()

    def _call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        update = (body or {}).get("update_info", {})
        self.calls.append(call := path.removesuffix("?mode=wait") + update.get("until", ""))
        if error := self.fails.pop(call, None):
            raise error
        if call == "update_weightsloaded":
            self.loaded.append(update["version"])
        self.label = (body or {}).get("weight_version", self.label)
        return {"weight_version": self.label}


def followed(servers: Sequence[VllmServer], run: Iterator[tuple[int, str]]) -> None:
    """Follows a run until there is no further newest version."""
    reader = SimpleNamespace(newest=lambda: next(run), wait_for=lambda *_: None)
    with pytest.raises(StopIteration):
        follow(reader, servers)  # type: ignore[arg-type]


def test_server_is_attached_to_the_run_that_is_followed() -> None:
    server = FakeServer(label="7")  # the label may be of another run: an earlier command has set it
    followed([server], iter([(7, "a0"), (7, "a0"), (8, "a0"), (8, "a1"), (8, "b1"), (8, "b1")]))
    assert server.loaded == [7, 8, 8, 8]
    assert server.calls.count("init_weight_transfer_engine") == 3  # not for the next version of the same history
    server.label = "default"
    server.update(9, "b1")  # the server was started again
    assert server.calls.count("init_weight_transfer_engine") == 4


def test_each_server_gets_the_version_that_is_the_newest_at_its_turn() -> None:
    servers = [FakeServer(), FakeServer()]
    followed(servers, ((version, "a0") for version in range(4)))
    assert [server.loaded for server in servers] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("path", ["pause", "update_weightsread"])
@pytest.mark.parametrize("error", [UnavailableError("planted"), KeyboardInterrupt()])
def test_interrupted_update_is_ended(path: str, error: BaseException) -> None:
    server = FakeServer()
    server.fails = {path: error, "resume": UnavailableError("later")}
    with pytest.raises(type(error)) as raised:
        server.update(3)
    assert raised.value is error
    assert server.calls[-2:] == ["finish_weight_update", "resume"] and server.version() == -1 and not server.loaded


def test_half_loaded_server_stays_paused_until_an_update_succeeds() -> None:
    server = FakeServer(label="3")
    server.update(4)
    server.fails = {"update_weightsloaded": UnavailableError("planted")}
    with pytest.raises(UnavailableError, match="planted"):
        server.update(5)
    assert server.calls[-1] == "update_weightsloaded" and server.history is None
    followed([server], iter([(4, "")]))  # the number of its label
    assert server.calls[-1] == "resume" and server.loaded[-1] == 4


def test_update_of_a_caller_that_was_killed_is_ended() -> None:
    server, refused = FakeServer(label="3"), UnavailableError("refused")
    refused.__cause__ = HTTPError("http://vllm", 500, "an update is open", email.message.Message(), None)
    server.fails = {"init_weight_transfer_engine": refused}
    server.update(4)
    attach = "init_weight_transfer_engine"
    assert server.calls[1:5] == [attach, "finish_weight_update", attach, "start_weight_update"] and server.loaded == [4]
    server.history, server.fails = None, {attach: UnavailableError("unreachable")}
    with pytest.raises(UnavailableError, match="unreachable"):
        server.update(5)
    assert server.calls[-1] == attach  # nothing is ended at a server that cannot be reached


def test_version_that_cannot_be_read_does_not_pause_the_server() -> None:
    server = FakeServer()
    server.update(1)
    server._lead_s, server.calls = 0.01, []
    reads = iter([True, False])
    answers = server._call

    def call(path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        if (body or {}).get("update_info", {}).get("until") == "started" and not next(reads):
            server.fails["update_weightsstarted"] = UnavailableError("planted")
        return answers(path, body, timeout_s)

    server._call = call  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="planted"):
        server.update(2)
    assert server.calls.count("update_weightsstarted") == 2 and "pause" not in server.calls
    assert server.calls[-2:] == ["finish_weight_update", "resume"]
    assert server._lead_s > 0.01  # the next attempt waits as long


def test_failing_server_does_not_delay_the_others() -> None:
    failing, other = FakeServer("http://failing"), FakeServer()
    failing.fails = {"weight_info": UnavailableError("down")}
    followed([failing, other], ((version, "a0") for version in range(20)))
    assert failing.calls == ["weight_info"] and other.loaded == list(range(1, 20, 2))
    with pytest.raises(UsageError, match="at least one server"):
        followed([], iter(()))


def test_update_that_has_begun_is_finished_before_the_command_ends() -> None:
    stop, servers = threading.Event(), [FakeServer(), FakeServer()]
    answers = servers[0]._call

    def call(path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        if path == "finish_weight_update":
            stop.set()
        return answers(path, body, timeout_s)

    servers[0]._call = call  # type: ignore[method-assign]
    reader = SimpleNamespace(newest=lambda: (1, "a0"), wait_for=lambda *_: None)
    follow(reader, servers, stop=stop)  # type: ignore[arg-type]
    assert servers[0].calls[-1] == "resume" and not servers[1].calls


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b'{"weight_version": "7"}', 7),
        (200, b'{"weight_version": null}', -1),
        (200, b"<html>", "Expecting value"),
        (200, b"[1]", "cannot convert"),
        (200, b"null", "not iterable"),
        (500, b'{"error": "no such run"}', "500.*no such run"),
    ],
)
def test_answer_of_another_program_is_an_error_of_the_server(status: int, body: bytes, expected: int | str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.handle_request)
        thread.start()
        server = VllmServer(f"http://127.0.0.1:{http.server_port}", {})
        if isinstance(expected, int):
            assert server.version() == expected
        else:
            with pytest.raises(UnavailableError, match=expected):
                server.version()
        thread.join()


@pytest.mark.parametrize(
    ("address", "url", "expected"),
    [
        ("localhost:50051", "http://gpu-7:8000", "name the coordinator's host"),
        ("other:1,127.0.0.1:50051", "http://gpu-7:8000", "name the coordinator's host"),
        ("[::1]:50051", "http://gpu-7:8000", "name the coordinator's host"),
        ("head:50051", "gpu-7:8000", "'gpu-7:8000' is not a URL: expected one such as http://localhost:8000"),
    ],
)
def test_command_refuses_addresses_that_cannot_work(
    address: str, url: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["http://localhost:8000", url]
    monkeypatch.setattr(sys, "argv", ["vllm_server", "--run", "gpt", "--address", address, *urls])
    with pytest.raises(SystemExit):
        run_command(VllmServer, None)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], r"run 'gone' does not exist; existing runs: .*"),
        (["--token-file", "/gone"], "token file /gone cannot be read: No such file or directory"),
        (["--address", "localhost"], "'localhost' is not an address: expected HOST:PORT, such as localhost:50051"),
        (["--gather-dtype", "bf16"], r"attach\(gather_dtype='bf16'\): expected one of float32, bfloat16, .*"),
    ],
)
def test_command_that_cannot_attach_ends_with_a_sentence(
    cluster: shardwell.LocalCluster, options: list[str], expected: str
) -> None:
    arguments = ["--run", "gone", "--address", cluster.address, *options, "http://localhost:8000"]
    command = [sys.executable, "-m", "shardwell.engines.vllm_server", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(rf"vllm_server.py: {expected}\n", ended.stderr)


END_LIMIT_S = 60.0
"""A read that was ended must finish within this time. Its own deadline is much later."""


@pytest.mark.parametrize("end", ["drop", "close", "other"])
def test_read_of_a_version_that_never_comes_is_ended(
    cluster: shardwell.LocalCluster, training: Training, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    group, waiting, calls = ThreadGroup(1, monkeypatch), threading.Event(), CoordinatorClient.call
    group.local.rank = 0

    def call(client: CoordinatorClient, name: str, request: Any, **options: Any) -> Any:
        if name == "DescribeWeights" and request.version == 10**6:
            waiting.set()
        return calls(client, name, request, **options)

    monkeypatch.setattr(CoordinatorClient, "call", call)
    reader = GroupReader(lambda: shardwell.attach(cluster.address, training.run, timeout_s=600.0), group)  # type: ignore[arg-type]
    reader.update(10**6, print, "started")
    assert reader._pending is not None
    pending = reader._pending[1]
    assert waiting.wait(60) and not pending.done()
    if end == "other":
        loaded = list[str]()
        reader.update(training.pause(), loaded.extend)
        assert sorted(loaded) == ["enter.weight", "leave.bias", "norm.bias", "norm.weight"]
    else:
        getattr(reader, end)()
    with pytest.raises(UnavailableError):
        pending.result(END_LIMIT_S)
    reader.close()


class ThreadGroup:
    """Threads that are a group of ``torch.distributed``. Each is as if on another host."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.barrier, self.local = size, threading.Barrier(size), threading.local()
        self.values: list[Any] = [None] * size
        monkeypatch.setattr(reader_module, "dist", self)
        monkeypatch.setattr(reader_module, "_can_map", lambda *_: False)

    def get_rank(self, _: object) -> int:
        return int(self.local.rank)

    def get_world_size(self, _: object) -> int:
        return self.size

    def all_gather(self, gathered: list[torch.Tensor], own: torch.Tensor, *, group: object) -> None:
        self.values[self.local.rank] = own
        self.barrier.wait(30)
        for target, value in zip(gathered, self.values, strict=True):
            target.copy_(value)
        self.barrier.wait(30)


class FakeReader(shardwell.Reader):
    """A reader of one tensor, in a history of a run."""

    def __init__(self, *, rollback_count: int = 0, run_id: str = "a", dtype: torch.dtype = torch.float32) -> None:
        self.rollback_count, self.run_id, self.dtype, self._timeout_s = rollback_count, run_id, dtype, 60.0
        self._report = coordinator_pb2.ReaderReport()

    def newest(self) -> tuple[int, str]:
        return 5, f"{self.run_id}-{self.rollback_count}"

    @contextmanager
    def pin(self, version: int | str | None = None, *, at_least: int = 0) -> Iterator[Any]:
        stored = SimpleNamespace(name="w", meta=torch.empty(2, dtype=self.dtype, device="meta"))
        pinned = SimpleNamespace(version=version, rollback_count=self.rollback_count, values=self.values)
        pinned.choose = lambda _: [(stored, None)]
        yield pinned

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(2, dtype=self.dtype)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("other", [FakeReader(rollback_count=1), FakeReader(run_id="b")])
def test_hosts_that_have_read_two_histories_load_nothing(other: FakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    group, loaded = ThreadGroup(2, monkeypatch), list[int]()

    def run(rank: int) -> None:
        group.local.rank = rank
        reader = GroupReader(lambda: other if rank else FakeReader(), group)  # type: ignore[arg-type, return-value]
        with pytest.raises(UnavailableError, match="different histories"):
            reader.update(5, lambda _: loaded.append(5))
        other.rollback_count, other.run_id = 0, "a"
        reader.update(5, lambda _: loaded.append(rank))
        reader.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert sorted(loaded) == [0, 1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a function that makes a group reader of one process, which shares what it reads if it is told to."""
    group, made = ThreadGroup(1, monkeypatch), list[GroupReader]()
    group.local.rank = 0

    def make(reader: Any, *, is_alone: bool = True) -> GroupReader:
        made.append(GroupReader(lambda: reader, group))  # type: ignore[arg-type]
        made[-1]._is_alone = is_alone
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("version", [True, "5", None, 5.0])
def test_version_that_is_no_number_is_refused(alone: Any, version: Any) -> None:
    with pytest.raises(UsageError, match="expected an int"):
        alone(FakeReader()).update(version, print)


def test_read_that_is_dropped_while_its_reader_attaches_is_ended(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attached, group_reader, loaded = threading.Event(), alone(FakeReader()), list[str]()
    attach = group_reader._attach
    monkeypatch.setattr(group_reader, "_attach", lambda: (attached.wait(60), attach())[1])
    group_reader.update(5, print, "started")
    pending = group_reader._pending[1]
    wait_until(pending.running, "the read")
    group_reader.drop()
    attached.set()
    with pytest.raises(UsageError, match="the read of version 5 was dropped"):
        pending.result(END_LIMIT_S)
    reader = group_reader._reader
    group_reader.update(6, loaded.extend)
    assert loaded == ["w"] and group_reader._reader is reader  # the next read uses it


def test_version_that_was_pinned_during_a_rollback_is_read_again(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    histories, loaded = iter(["a-1", "a-0", "a-0"]), list[str]()  # after each pin, and at the end
    monkeypatch.setattr(FakeReader, "newest", lambda _: (5, next(histories)))
    alone(FakeReader()).update(5, loaded.extend)
    assert loaded == ["w"] and next(histories, None) is None


def test_closed_group_reader_is_not_used(alone: Any) -> None:
    group_reader = alone(FakeReader())
    group_reader.close()
    with pytest.raises(UsageError, match=r"before close\(\)"):
        group_reader.update(5, print)


def test_failed_read_leaves_no_memory(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group_reader = alone(FakeReader(), is_alone=False)
    monkeypatch.setattr(FakeReader, "values", fail)
    gc.collect()
    gc.disable()
    try:
        failures = []
        for _ in range(3):
            with pytest.raises(CorruptDataError) as raised:
                group_reader.update(5, print)
            failures.append(raised.value)
        files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
        assert not [file for file in files if group_reader._memory_name in file]
    finally:
        gc.enable()


def test_dtype_without_a_name_in_shared_memory_is_refused(alone: Any) -> None:
    with pytest.raises(UsageError, match=r"'w' has dtype torch\.complex128"):
        alone(FakeReader(dtype=torch.complex128), is_alone=False).update(5, print)


def test_failure_of_a_started_read_is_raised_once(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group_reader, loaded = alone(FakeReader()), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(FakeReader, "values", fail)
        with pytest.raises(CorruptDataError, match="planted"):
            while True:
                group_reader.update(5, loaded.append, "started")
    group_reader.update(5, loaded.append)
    assert len(loaded) == 1


def test_interrupted_process_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group, errors = ThreadGroup(2, monkeypatch), dict[int, type[BaseException]]()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def run(rank: int) -> None:
        group.local.rank = rank
        reader = GroupReader(FakeReader, group)  # type: ignore[arg-type]
        try:
            reader.update(5, (print, interrupt)[rank])
        except BaseException as error:
            errors[rank] = type(error)
        monkeypatch.setattr(group, "all_gather", gone)
        with pytest.raises(UnavailableError, match="gone or late") as raised:
            reader.in_any(True)
        assert isinstance(raised.value.__cause__, RuntimeError)
        reader.close()

    def gone(*_: object, group: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert errors == {0: UnavailableError, 1: KeyboardInterrupt}


def test_only_the_last_worker_of_vllm_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def __class_getitem__(cls, _: object) -> type:
            return cls

    names = {
        "vllm": {"LLM": object},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: SimpleNamespace(rank_in_group=rank)},
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": Base},
        "vllm.model_executor.model_loader.reload": dict.fromkeys(
            ("finalize_layerwise_reload", "initialize_layerwise_reload")
        ),
    }
    for name, contents in names.items():
        for index in range(name.count(".") + 1):
            parent = ".".join(name.split(".")[: index + 1])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
        vars(sys.modules[name]).update(contents)
    monkeypatch.delitem(sys.modules, "shardwell.engines.vllm", raising=False)
    from shardwell.engines.vllm import ShardwellEngine

    for rank in range(2):
        engine = ShardwellEngine()
        engine.parallel_config = SimpleNamespace(distributed_executor_backend="mp", world_size=2)
        engine.start_weight_update()
        calls: dict[type[Exception], Callable[[], None]] = {
            TypeError: partial(engine.init_transfer_engine, {"unknown": 1}),
            StepStateError: partial(engine.update_weights, {"version": 1}),  # the engine is not attached
        }
        for error, call in calls.items():
            if rank == 0:
                call()
            else:
                with pytest.raises(error, match=r"unknown|not attached"):
                    call()
        assert engine._is_open == (rank == 0)
    sys.modules.pop("shardwell.engines.vllm")
