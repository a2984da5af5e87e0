"""What has changed between two versions of a run, and reads of a part of its tensors."""

from __future__ import annotations

from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.transport.socket_transport import SocketTransport
from shardwell.weights import pinned_version
from shardwell.weights.pinned_version import PinnedVersion
from shardwell_wire.errors import CorruptDataError, UnavailableError, UsageError, VersionGoneError
from shardwell_wire.v1 import shard_pb2
from tests.support.background_training import BackgroundTraining
from tests.support.cluster import wait_in_sync

State = dict[str, torch.Tensor]
KEPT = 4


class Adapted(nn.Module):
    """A linear layer with a frozen weight and a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 200) / 20, requires_grad=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(4, 200) / 20), nn.Parameter(torch.zeros(300, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.lora_b @ self.lora_a).t()


class Model(nn.Module):
    """A model with an adapter, statistics, a tied parameter, a frozen unit and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(200, 200, bias=False), nn.Linear(200, 200)
        self.leave.weight = self.enter.weight
        self.frozen, self.norm = nn.Linear(200, 200).requires_grad_(False), nn.BatchNorm1d(200)
        self.adapted, self.narrow = Adapted(), nn.Linear(300, 7, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.adapted(self.leave(self.norm(self.frozen(self.enter(x)))) * self.scale)
        return self.narrow(hidden.bfloat16()).float()


class Training(BackgroundTraining):
    """A run that trains the model."""

    model, units, width = Model, {nn.BatchNorm1d, Adapted, nn.Linear}, 200


def read(reader: shardwell.Reader, version: int) -> State:
    with reader.pin(version) as pinned:
        return dict(pinned.values())


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def applied(base: State, pinned: PinnedVersion, since: int | str) -> State:
    """Returns copies of tensors with the changes since their version."""
    state = {name: value.clone() for name, value in base.items()}
    for change in pinned.changes(since):
        before = state[change.name].clone()
        change.apply_to(state[change.name])
        if change.indices is not None:
            assert bool((change.indices[1:] > change.indices[:-1]).all())
            changed = (before != state[change.name]).reshape(-1)
            assert not bool(changed[torch.isin(torch.arange(len(changed)), change.indices, invert=True)].any())
    return state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("backups", [0, 1])
def test_base_and_changes_are_the_pinned_version(cluster: shardwell.LocalCluster, dtype: str, backups: int) -> None:
    training = Training(cluster.address, keep_versions=KEPT, backups=backups)
    with training.in_background(), shardwell.attach(cluster.address, training.run, gather_dtype=dtype) as reader:
        training.wait_for(KEPT + 1)
        newest = training.pause()
        versions = range(newest - KEPT, newest + 1)
        states = {version: read(reader, version) for version in versions}
        for version in versions:
            for since in range(newest - KEPT, version + 1):
                with reader.pin(version) as pinned:
                    assert equal(applied(states[since], pinned, since), states[version])
                    names = {change.name for change in pinned.changes(since)}
                    assert bool(names) == (since < version) and not any("frozen" in name for name in names)
                    patched = {name: value.clone() for name, value in states[since].items()}
                    differing = {name for name, value in patched.items() if not value.equal(states[version][name])}
                    # Differences may be small enough where new values are not, and a shard is then not sent whole.
                    assert differing <= set(pinned.patch(patched, since)) <= names and equal(patched, states[version])


def test_changes_that_are_not_read_to_the_end_leave_the_pin_usable(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address, keep_versions=1)
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        version = training.pause()
        state = read(reader, version)
        connected = reader._connections._servers.copy()
        with reader.pin(version) as pinned:
            changes = iter(pinned.changes(version - 1))
            next(changes)
            changes.close()
            assert reader._connections._servers == connected
            assert equal(dict(pinned.values()), state)


def test_changes_of_adapters_have_few_bytes(cluster: shardwell.LocalCluster) -> None:
    """Also in float32: the frozen weight is in the unit of the adapter."""
    training = Training(cluster.address, keep_versions=1)
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        version = training.pause()
        base = read(reader, version - 1)
        for received, pattern in enumerate(["adapted.*", ["adapted.lora_a", "adapted.lora_b"]]):
            before = reader.stats()["received_bytes"]
            with reader.pin(version) as pinned:
                changes = list(pinned.changes(version - 1, pattern))
            assert [change.name for change in changes] == ["adapted.lora_a", "adapted.lora_b"], received
            assert 0 < reader.stats()["received_bytes"] - before < 0.2 * 4 * 300 * 200
            for change in changes:
                change.apply_to(base[change.name])
                assert torch.equal(base[change.name], training.states[version][change.name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_some_tensors_and_slices_are_read(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(pinned_version, "TRANSPORT_NAMES", ("socket",))
    training = Training(cluster.address, keep_versions=1)
    with training.in_background(), shardwell.attach(cluster.address, training.run, gather_dtype=dtype) as reader:
        version = training.pause()
        base, state = read(reader, version - 1), read(reader, version)
        slices = {
            "adapted.weight": (0, 1, 4),
            "*weight": (0, 2, 3),
            "adapted.lora_b": (1, 1, 3),
            "norm.bias": (0, 3, 4),
        }
        with reader.pin(version) as pinned:
            expected = {
                name: value.chunk(slices[pattern][2], slices[pattern][0])[slices[pattern][1]] if pattern else value
                for name, value in state.items()
                for pattern in [next((each for each in slices if fnmatchcase(name, each)), "")]
            }
            assert equal(dict(pinned.values(slices=slices)), expected)
            before = reader.stats()["received_bytes"]
            found = dict(pinned.values(["*lora_b", "adapted.weight", "leave.weight"], slices={"*": (0, 3, 4)}))
            assert equal(
                found, {name: state[name].chunk(4)[3] for name in ("enter.weight", "adapted.weight", "adapted.lora_b")}
            )
            received = reader.stats()["received_bytes"] - before
            assert received < {"float32": 0.3, "bfloat16": 0.3, "int8": 1}[dtype] * 4 * (300 * 200 + 200 * 200)
            patterns = ["adapted*", "enter.weight"]
            names = {change.name for change in pinned.changes(version - 1, patterns, slices=slices)}
            whole = {"adapted.weight"} if dtype == "int8" else set()  # the unit is sent whole
            assert names == {"adapted.lora_a", "adapted.lora_b", "enter.weight"} | whole
            cut = {"adapted.lora_a": base["adapted.lora_a"], "adapted.weight": base["adapted.weight"].chunk(4)[1]}
            cut["adapted.lora_b"] = base["adapted.lora_b"].chunk(3, 1)[1]  # a view that is not contiguous
            cut["enter.weight"] = base["enter.weight"].chunk(3)[2]
            for change in pinned.changes(version - 1, patterns, slices=slices):
                change.apply_to(cut[change.name])
                assert torch.equal(cut[change.name], expected[change.name])
            for wrong in ({"*": (2, 0, 1)}, {"enter.weight": (0, 2, 2)}):
                with pytest.raises(UsageError, match=r"expected \(dim, index, count\)"):
                    pinned.values(slices=wrong)
            for names_wanted, wanted_slices in (("nothing*", None), (["*", "none"], None), (None, {"none": (0, 0, 1)})):
                with pytest.raises(UsageError, match="has no parameter or buffer 'no"):
                    pinned.values(names_wanted, slices=wanted_slices)


def test_a_model_follows_some_tensors(cluster: shardwell.LocalCluster) -> None:
    training, model = Training(cluster.address), Model()
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            version = reader.follow(model, names="adapted.lora*")
            training.wait_for(version)
            for name, value in model.state_dict().items():
                expected = training.states[version] if "lora" in name else before
                assert torch.equal(value, expected[name]), name
            training.wait_for(version + 1)
        version = reader.follow(model)
        training.wait_for(version)
        assert equal(dict(model.state_dict()), training.states[version])


def test_changes_since_a_version_that_cannot_be_read(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address, keep_versions=2)
    with training.in_background(), shardwell.attach(cluster.address, training.run, timeout_s=20.0) as reader:
        training.wait_for(4)
        newest = training.pause()
        state = read(reader, newest - 1)
        with reader.pin(newest) as pinned:
            with pytest.raises(VersionGoneError) as caught:
                list(pinned.changes(newest - 3))
            assert caught.value.data["kept"] == f"{newest - 2}, {newest - 1}"
            with pytest.raises(VersionGoneError, match=f"since version {newest + 1} .* it is not older"):
                list(pinned.changes(newest + 1))
            with pytest.raises(UsageError, match="since=-1: expected a version"):
                list(pinned.changes(-1))
            pinned.rollback_count += 1  # as if the run had been rolled back, and had made the same versions again
            for since in (newest - 2, newest - 1):
                with pytest.raises(VersionGoneError, match="the run was rolled back"):
                    pinned.patch(state, since)
        assert equal(state, read(reader, newest - 1))


@pytest.mark.parametrize("keep_versions", [1, 2])
def test_former_versions_are_pinned_if_the_run_may_drop_them(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch, keep_versions: int
) -> None:
    pinned_versions, real_open, real_changes = list[int](), pinned_version._open, pinned_version.UnitReader.changes

    def counted(reader: pinned_version.UnitReader, *arguments: Any) -> Any:
        pinned_versions.append(reader.version)
        return real_open(reader, *arguments)

    def lose(self: pinned_version.UnitReader, unit: Any, since: Any) -> Any:
        if since.version not in pinned_versions:
            raise VersionGoneError("the run has dropped it")
        return real_changes(self, unit, since)

    monkeypatch.setattr(pinned_version, "_open", counted)
    training = Training(cluster.address, keep_versions=keep_versions)
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        training.wait_for(keep_versions + 1)
        newest = training.pause()
        state, first = read(reader, newest - 1), read(reader, newest - keep_versions)
        for since in {newest - keep_versions, newest - 1}:
            pinned_versions.clear()
            with reader.pin(newest) as pinned:
                assert pinned.patch(dict(state if since == newest - 1 else first), since)
            assert (since in pinned_versions) == (since == newest - keep_versions), "the next commit drops the oldest"
        if keep_versions == 1:
            return
        state, pinned_versions[:] = read(reader, newest - 1), []
        monkeypatch.setattr(pinned_version.UnitReader, "changes", lose)
        before = {name: value.clone() for name, value in state.items()}
        with reader.pin(newest) as pinned:
            with pytest.raises(VersionGoneError, match="the run has dropped it"):
                pinned.patch(state, newest - 1)
            assert equal(state, before)
            assert pinned.patch(state, newest - 1), "it is pinned from now on"
        assert equal(state, read(reader, newest))


def test_patch_from_a_server_that_sends_no_differences(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_version, "TRANSPORT_NAMES", ("socket",))
    real = SocketTransport.fetch_stream
    asked, is_old = list[bool](), False

    def fetch_stream(self: SocketTransport, request: shard_pb2.GatherRequest, *arguments: Any, **options: Any) -> int:
        asked.append(request.takes_differences)
        if is_old:
            request.ClearField("takes_differences")
        return real(self, request, *arguments, **options)

    monkeypatch.setattr(SocketTransport, "fetch_stream", fetch_stream)
    training, received = Training(cluster.address, keep_versions=2), list[float]()
    with (
        training.in_background(),
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16") as reader,
    ):
        training.wait_for(3)
        newest = training.pause()
        for is_old_server in (True, False):
            is_old = is_old_server
            state = read(reader, newest - 1)
            with reader.pin(newest) as pinned:
                before = reader.stats()["received_bytes"]
                asked.clear()
                pinned.patch(state, newest - 1)
                assert asked and all(asked)
                received.append(reader.stats()["received_bytes"] - before)
            assert equal(state, read(reader, newest))
    assert received[1] < 0.9 * received[0]


def test_a_reader_has_changes_since_what_it_keeps_for_deltas(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_version, "TRANSPORT_NAMES", ("socket",))
    training = Training(cluster.address)  # keeps no version
    with (
        training.in_background(),
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16", delta_cache_bytes=1 << 30) as reader,
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16") as other,
    ):
        version = training.pause()
        state = read(reader, version)
        training.resume()
        training.wait_for(version + 2)
        newest = training.pause()
        with other.pin(newest) as pinned, pytest.raises(VersionGoneError):
            pinned.patch(state, version)
        with reader.pin(newest) as pinned:
            sparse = {change.name for change in pinned.changes(version) if change.indices is not None}
            assert "adapted.lora_a" in sparse and "norm.running_mean" not in sparse
        with reader.pin(newest) as pinned, pytest.raises(VersionGoneError):
            pinned.patch(state, version)  # the reader keeps the newest version now
        training.resume()
        training.wait_for(newest + 1)
        state, newest = read(reader, training.pause()), training.step
        training.resume()
        training.wait_for(newest + 1)
        later = training.pause()
        with reader.pin(later) as pinned:
            assert "adapted.weight" not in pinned.patch(state, newest)
        assert equal(state, read(other, later))


def test_wrong_tensors_are_not_patched(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address, keep_versions=2)
    with (
        training.in_background(),
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16") as reader,
    ):
        version = training.pause()
        state = read(reader, version - 1)
        wrong = {name: value.clone() for name, value in state.items()}
        wrong["adapted.weight"][5, 5] += 1.0  # no step changes the frozen weight
        with reader.pin(version) as pinned:
            before = {name: value.clone() for name, value in wrong.items()}
            with pytest.raises(CorruptDataError, match=f"does not have the values of version {version - 1}"):
                pinned.patch(wrong, version - 1)
            assert equal(wrong, before)
            with pytest.raises(UsageError, match=r"'norm\.bias' is missing, 'scale' is of shape"):
                pinned.patch(
                    {name: each for name, each in state.items() if name != "norm.bias"} | {"scale": torch.ones(2)}, 1
                )
            narrow = {
                name: value.bfloat16() if value.dtype == torch.float32 and "running" not in name else value
                for name, value in state.items()
            }
            narrow["leave.weight"] = narrow["enter.weight"].clone()
            assert pinned.patch(narrow | {"other": torch.ones(1)}, version - 1)
            expected = dict(pinned.values())
        expected["leave.weight"] = expected["enter.weight"]
        assert all(torch.equal(value.to(expected[name].dtype), expected[name]) for name, value in narrow.items())


def test_changes_after_the_loss_of_a_server() -> None:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        training = Training(cluster.address, keep_versions=KEPT, backups=1)
        with training.in_background(), shardwell.attach(cluster.address, training.run, timeout_s=20.0) as reader:
            wait_in_sync(cluster.address, training.run)
            training.wait_for(training.step + KEPT + 1)
            newest = training.pause()
            base, state = read(reader, newest - KEPT), read(reader, newest - 1)
            with reader.pin(newest - 1) as pinned:
                cluster.shards[0].kill()
                with suppress(UnavailableError):  # unless the backup is promoted in time
                    assert equal(applied(base, pinned, newest - KEPT), state)
            with reader.pin(newest - 1) as pinned:
                assert equal(applied(base, pinned, newest - KEPT), state)
            training.resume()
            training.wait_for(newest + 1)
            later = training.pause()
            with reader.pin(later) as pinned:  # across the promotion
                pinned.patch(state, newest - 1)
                assert equal(state, dict(pinned.values()))
            training.resume()
