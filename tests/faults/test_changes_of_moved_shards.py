"""What has changed since a version is right, or refused, when shards have moved in between: never wrong values."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main
from shardwell.weights import pinned_version
from shardwell_wire.errors import CorruptDataError, UnavailableError, VersionGoneError
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner
from tests.support.background_training import BackgroundTraining, FirstStates
from tests.support.cluster import wait_in_sync, wait_until

KEPT, BASE = 3, "base"
MANY = 64
"""Versions that are kept where a test must not lose one while it waits."""

State = dict[str, torch.Tensor]


class Adapted(nn.Module):
    """A linear layer with a frozen weight and a trained adapter, in one unit: few of its values change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(120, 120) / 20, requires_grad=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(4, 120) / 20), nn.Parameter(torch.zeros(120, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.lora_b @ self.lora_a).t()


class Model(nn.Module):
    """A model with an adapter, statistics and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(120, 120, bias=False), nn.Linear(120, 120)
        self.leave.weight = self.enter.weight
        self.norm, self.adapted = nn.BatchNorm1d(120), Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.adapted(self.enter(x))))


class Training(BackgroundTraining):
    model, units, width = Model, {Adapted, nn.BatchNorm1d}, 120

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.states = FirstStates()


BUFFERS = {name for name, _ in Model().named_buffers()}


class Following:
    """Readers of a run in two dtypes, of which each applies changes.

    Args:
        stack: Closes the readers.
        address: Address of the coordinator.
        training: The run.
    """

    def __init__(self, stack: ExitStack, address: str, training: Training) -> None:
        self._training = training
        self._readers = {
            (dtype, cache): stack.enter_context(
                shardwell.attach(address, training.run, gather_dtype=dtype, delta_cache_bytes=cache, timeout_s=30.0)
            )
            for dtype, cache in (("float32", 0), ("bfloat16", 0), ("bfloat16", 1 << 20))
        }
        """By dtype and size of the cache of deltas."""

    def _state(self, dtype: str, version: int) -> State:
        wait_until(lambda: version in self._training.states, f"the state of version {version}")
        state = self._training.states[version]
        if dtype == "bfloat16":
            state = {name: value if name in BUFFERS else value.bfloat16().float() for name, value in state.items()}
        return {name: value.clone() for name, value in state.items()}

    def check(self, since: int | str, version: int, of: int | None = None) -> None:
        """Asserts that the changes from one version to another are right for every reader.

        Args:
            since: The older version, or its name.
            version: The newer version.
            of: Number of the older version if ``since`` is a name.
        """
        for (dtype, _), reader in self._readers.items():
            expected, older = self._state(dtype, version), since if isinstance(since, int) else of
            assert older is not None
            patched, changed = self._state(dtype, older), self._state(dtype, older)
            with reader.pin(version) as pinned:
                names, found = set(pinned.patch(patched, since)), list(pinned.changes(since))
                # Differences may be small enough where new values are not, and a shard is then not sent whole.
                assert names <= {change.name for change in found}
                for change in found:
                    change.apply_to(changed[change.name])
            changed["leave.weight"] = changed["enter.weight"]
            for name, value in expected.items():
                assert torch.equal(patched[name], value), f"{dtype}: {name} of version {version} since {since}"
                assert torch.equal(changed[name], value), f"{dtype}: {name} of version {version} since {since}"

    def follow_until(self, moved: Future[None]) -> int:
        """Patches tensors from version to version until shards have moved; returns how often that succeeded.

        At least once: the version that is read after the move may be the first one that can be patched.
        """
        count, kept, deadline = 0, dict[shardwell.Reader, tuple[State, int]](), time.monotonic() + 90
        while not moved.done() or (not count and time.monotonic() < deadline):
            for (dtype, cache), reader in self._readers.items():
                tensors, since = kept.get(reader, (State(), -1))
                try:
                    with reader.pin() as pinned:
                        if since >= 0:
                            pinned.patch(tensors, since)
                            count += 1
                        kept[reader] = tensors or dict(pinned.values()), pinned.version
                except VersionGoneError:
                    kept.pop(reader, None)
                    continue
                except UnavailableError:
                    continue  # the tensors still have the older version
                tensors, version = kept[reader]
                expected = self._state(dtype, version)
                wrong = [name for name, value in tensors.items() if not torch.equal(value, expected[name])]
                assert not wrong, f"{dtype}, cache of {cache} bytes, version {version} since {since}: {wrong}"
        return count


def drain(cluster: shardwell.LocalCluster, run: str) -> None:
    assert main(["drain", "shard-0", "--wait", "--address", cluster.address]) == 0


def drain_and_rebalance(cluster: shardwell.LocalCluster, run: str) -> None:
    drain(cluster, run)
    assert main(["drain", "shard-0", "--cancel", "--address", cluster.address]) == 0
    assert main(["rebalance", run, "--wait", "--address", cluster.address]) == 0


def stop(cluster: shardwell.LocalCluster, run: str) -> None:
    """Stops a server, which moves its shards before it ends, and starts it again without them."""
    cluster.shards[0].stop(60.0)
    cluster.shards[0].restart(time.monotonic() + 60.0)


def promote(cluster: shardwell.LocalCluster, run: str) -> None:
    cluster.shards[0].kill()


def restart(cluster: shardwell.LocalCluster, run: str) -> None:
    """Kills a server, whose next process takes up its shards or becomes that of backups."""
    cluster.shards[0].restart(time.monotonic() + 60.0)


@contextmanager
def published(cluster: shardwell.LocalCluster, **options: Any) -> Iterator[tuple[Training, Following, int]]:
    """Yields a run that trains, readers of it, and its version that is published as ``BASE``."""
    training = Training(cluster.address, keep_versions=KEPT, **options)
    with training.in_background(), ExitStack() as stack:
        if options.get("backups"):
            wait_in_sync(cluster.address, training.run)
        training.wait_for(training.step + KEPT)
        base = training.pause()
        assert main(["publish", training.run, BASE, "--address", cluster.address]) == 0
        following = Following(stack, cluster.address, training)
        following.check(base - 1, base)
        training.resume()
        yield training, following, base


@pytest.mark.parametrize(
    "move, backups",
    [
        (drain, 0),
        pytest.param(drain, 1, marks=pytest.mark.long),
        pytest.param(drain_and_rebalance, 0, marks=pytest.mark.long),
        pytest.param(drain_and_rebalance, 1, marks=pytest.mark.long),
        pytest.param(stop, 0, marks=pytest.mark.long),
        pytest.param(stop, 1, marks=pytest.mark.long),
        pytest.param(promote, 1, marks=pytest.mark.long),
        pytest.param(restart, 0, marks=pytest.mark.long),
        pytest.param(restart, 1, marks=pytest.mark.long),
    ],
)
def test_changes_are_right_after_shards_have_moved(
    monkeypatch: pytest.MonkeyPatch, move: Callable[[shardwell.LocalCluster, str], None], backups: int
) -> None:
    monkeypatch.setattr(pinned_version, "TRANSPORT_NAMES", ("socket",))  # so that 16-bit weights are received
    with (
        shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as cluster,
        published(cluster, backups=backups) as (training, following, base),
        ThreadPoolExecutor(1) as thread,
        ExitStack() as stack,
    ):
        moved = thread.submit(move, cluster, training.run)
        count = following.follow_until(moved)
        moved.result()
        training.wait_for(training.step + KEPT + 1)
        newest = training.pause()
        later = Following(stack, cluster.address, training)
        for readers in (following, later):
            readers.check(base, newest)
            readers.check(BASE, newest, of=base)
            for since in range(newest - KEPT + 1, newest):
                readers.check(since, newest)
                readers.check(base, since)
        print(f"{count} patches while shards moved, versions {base} to {newest}")
        training.resume()


@pytest.mark.long
def test_changes_are_right_when_a_pinned_version_moves() -> None:
    with (
        shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as cluster,
        published(cluster) as (training, _, base),
        shardwell.attach(cluster.address, training.run, timeout_s=20.0) as reader,
    ):
        with reader.pin() as pinned:
            version = pinned.version
            drain(cluster, training.run)
            tensors = {name: value.clone() for name, value in training.states[base].items()}
            try:
                pinned.patch(tensors, base)
                expected = training.states[version]
            except (VersionGoneError, UnavailableError):
                expected = training.states[base]  # nothing was written
            assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
        with reader.pin() as pinned:  # again, as docs/readers.md says
            tensors = {name: value.clone() for name, value in training.states[base].items()}
            pinned.patch(tensors, base)
        training.wait_for(pinned.version)
        assert all(torch.equal(value, training.states[pinned.version][name]) for name, value in tensors.items())


@pytest.mark.parametrize("servers", [1, 3])
def test_no_changes_since_a_version_before_a_resume_on_another_cluster(tmp_path: Path, servers: int) -> None:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        training = Training(cluster.address, keep_versions=KEPT, checkpoint_dir=str(tmp_path))
        with training.in_background():
            training.wait_for(KEPT)
            saved = training.pause()
            assert main(["checkpoint", training.run, "--wait", "--address", cluster.address]) == 0
    with shardwell.LocalCluster(num_shards=servers, min_shard_bytes=4096) as cluster:
        resumed = Training(
            cluster.address, training.run, keep_versions=MANY, checkpoint_dir=str(tmp_path), resume="latest"
        )
        with resumed.in_background(), ExitStack() as stack:
            resumed.wait_for(saved + 2)
            newest = resumed.pause()
            following = Following(stack, cluster.address, resumed)
            reader = stack.enter_context(shardwell.attach(cluster.address, training.run))
            for since in range(saved - 2, saved):
                tensors = {name: value.clone() for name, value in training.states[since].items()}
                with reader.pin(newest) as pinned, pytest.raises(VersionGoneError, match="is no longer"):
                    pinned.patch(tensors, since)
                assert all(torch.equal(value, training.states[since][name]) for name, value in tensors.items())
            tensors = {name: value.clone() for name, value in training.states[saved].items()}
            for since in range(max(saved, newest - KEPT), newest):
                following.check(since, newest)
            with reader.pin(newest) as pinned:
                pinned.patch(tensors, saved)  # what a reader of the former cluster has
            assert all(torch.equal(value, resumed.states[newest][name]) for name, value in tensors.items())
            resumed.resume()


def test_no_changes_since_a_version_that_was_rolled_back(tmp_path: Path) -> None:
    """The repeated steps have other values. Readers that attach afterwards know it by checksums only."""
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=2.0) as cluster:
        scale = [1.0]

        class Scaled(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return scale[0] * super().forward(x)

        class Repeated(Training):
            model = Scaled

        training = Repeated(cluster.address, keep_versions=MANY, checkpoint_dir=str(tmp_path))
        with training.in_background(), shardwell.attach(cluster.address, training.run, timeout_s=60.0) as reader:
            training.wait_for(KEPT)
            saved = training.pause()
            assert main(["checkpoint", training.run, "--wait", "--address", cluster.address]) == 0
            training.resume()
            training.wait_for(saved + 4)
            lost = training.pause()
            with reader.pin(lost) as pinned:
                tensors = dict(pinned.values())
            before = {name: value.clone() for name, value in tensors.items()}
            training.states = FirstStates()
            scale[0] = -3.0
            server = cluster.shards[1]
            server.kill()
            prefix = FolderOwner(server_id=server.name, coordinator=cluster.address).prefix
            for folder in DEFAULT_DIRECTORY.glob(f"{prefix}*"):
                shutil.rmtree(folder)
            server.restart(time.monotonic() + 60)
            training.resume()
            wait_until(lambda: training.step < lost and saved in training.states, "the rollback", timeout_s=60.0)
            training.wait_for(lost + 2)
            newest = training.pause()
            assert newest - lost <= MANY, "the version is kept"
            with reader.pin(newest) as pinned, pytest.raises(VersionGoneError, match="the run was rolled back"):
                pinned.patch(tensors, lost)
            assert all(torch.equal(value, before[name]) for name, value in tensors.items())
            for dtype in ("float32", "bfloat16"):
                tensors = {name: value.clone() for name, value in before.items()}
                if dtype == "bfloat16":
                    tensors |= {
                        name: value.bfloat16().float() for name, value in tensors.items() if name not in BUFFERS
                    }
                expected = {name: value.clone() for name, value in tensors.items()}
                with (
                    shardwell.attach(cluster.address, training.run, gather_dtype=dtype) as late,
                    late.pin(newest) as pinned,
                    suppress(CorruptDataError),
                ):
                    pinned.patch(tensors, lost)  # tensors that arrive whole are right
                    expected = dict(pinned.values())
                assert all(torch.equal(value, expected[name]) for name, value in tensors.items()), dtype
            training.resume()
