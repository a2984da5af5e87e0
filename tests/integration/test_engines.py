"""Plain models and engines that follow a run: ``shardwell.engines`` without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.engines.vllm_server import VllmServer, follow
from shardwell.weights.pinned_version import PinnedVersion
from shardwell_wire.errors import CorruptDataError, UnavailableError, UsageError, VersionGoneError
from tests.support.background_training import BackgroundTraining
from tests.support.cluster import wait_until


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
            patch.setattr(PinnedVersion, "read", fail)
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
    with pytest.raises(VersionGoneError, match="is no longer available"):
        shardwell.engines.load_weights(reader, weights.update, newest - 4)
    reads, fails = PinnedVersion.read, iter([False, True])
    monkeypatch.setattr(PinnedVersion, "read", lambda self, unit: fail() if next(fails) else reads(self, unit))
    with pytest.raises(CorruptDataError, match="planted"):
        shardwell.engines.load_weights(reader, weights.update)
    assert not weights


@pytest.mark.filterwarnings("ignore")
def test_check_of_the_model_leaves_the_engines_config() -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=8, **sizes)
    before = dict(vars(config))
    with pytest.raises(UsageError, match="does not fit the engine's model LlamaForCausalLM"):
        shardwell.engines.refuse_other_model({}, config)
    assert vars(config) == before


class FakeServer(VllmServer):
    """A server that records the calls and the versions that it is told to load."""

    def __init__(self, url: str = "http://vllm", label: str = "default") -> None:
        super().__init__(url, {"run": "gpt"})
        self.label, self.fails = label, dict[str, BaseException]()
        self.calls, self.loaded = list[str](), list[int]()

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        self.calls.append(path)
        if error := self.fails.pop(path, None):
            raise error
        if path == "update_weights" and body is not None:
            self.loaded.append(body["update_info"]["version"])
        self.label = (body or {}).get("weight_version", self.label)
        return {"weight_version": self.label, "world_size": 1}


def followed(servers: Sequence[VllmServer], run: Iterator[tuple[str, int, int]]) -> None:
    """Follows a run until there is no further description: the id, the number of rollbacks and the version."""
    names = "run_id", "rollback_count", "version"
    reader = SimpleNamespace(
        _describe=lambda: SimpleNamespace(**dict(zip(names, next(run), strict=True))), wait_for=lambda *_: None
    )
    with pytest.raises(StopIteration):
        follow(reader, servers)  # type: ignore[arg-type]


def test_server_is_attached_to_the_run_that_is_followed() -> None:
    server = FakeServer(label="7")  # the label may be of another run: an earlier command has set it
    followed([server], iter([("a", 0, 7), ("a", 0, 7), ("a", 0, 8), ("a", 1, 8), ("b", 1, 8), ("b", 1, 8)]))
    assert server.loaded == [7, 8, 8, 8]
    assert server.calls.count("init_weight_transfer_engine") == 3  # not for the next version of the same history
    server.label = "default"
    server.update(9, history=("b", 1))  # the server was started again
    assert server.calls.count("init_weight_transfer_engine") == 4


def test_each_server_gets_the_version_that_is_the_newest_at_its_turn() -> None:
    servers = [FakeServer(), FakeServer()]
    followed(servers, (("a", 0, version) for version in range(4)))
    assert [server.loaded for server in servers] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("path", ["pause?mode=wait", "update_weights"])
@pytest.mark.parametrize("error", [UnavailableError("planted"), KeyboardInterrupt()])
def test_interrupted_update_is_ended(path: str, error: BaseException) -> None:
    server = FakeServer()
    server.fails = {path: error, "resume": UnavailableError("later")}
    with pytest.raises(type(error)) as raised:
        server.update(3)
    assert raised.value is error
    assert server.calls[-3:] == ["update_weights", "finish_weight_update", "resume"] and server.version() == -1


def test_half_loaded_server_stays_paused_until_an_update_succeeds() -> None:
    server = FakeServer(label="3")
    server.update(4)
    server.fails = {"finish_weight_update": UnavailableError("planted")}
    with pytest.raises(UnavailableError, match="planted"):
        server.update(5)
    assert server.calls[-1] == "finish_weight_update" and server.history is None
    followed([server], iter([("", 0, 4)]))  # the number of its label
    assert server.calls[-1] == "resume" and server.loaded[-1] == 4
