"""Readers of versions that a run keeps: ``join(keep_versions=...)``, ``publish`` and digests."""

from __future__ import annotations

import json
import os
import socket
import time
from functools import partial

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.shard.restart.shard_record import decode
from shardwell_wire.errors import CapacityError, NotFoundError, RunMismatchError, VersionGoneError
from shardwell_wire.host.server_folders import RECORD_SUFFIX
from tests.support.background_training import BackgroundTraining
from tests.support.cluster import events, wait_in_sync, wait_until
from tests.support.shared_files import folder_of

KEPT = 3


class Model(nn.Module):
    """A model with statistics, a tied parameter and a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(120, 120, bias=False), nn.Linear(120, 120)
        self.leave.weight = self.enter.weight
        self.frozen, self.norm = nn.Linear(120, 120).requires_grad_(False), nn.BatchNorm1d(120)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.frozen(self.enter(x))))


class Training(BackgroundTraining):
    """A run that trains the model."""

    model, units, width = Model, {nn.BatchNorm1d}, 120

    def digest(self, version: int) -> str:
        return shardwell.weights_digest(self.states[version])


class PlainTraining(Training):
    """A run without buffers, which may be asynchronous."""

    model, units = partial(nn.Sequential, nn.Linear(120, 120)), {nn.Linear}  # type: ignore[assignment]


def lost_versions(address: str, run: str) -> list[str]:
    return [event.message for event in events(address, run) if event.kind == EventKind.VERSIONS_LOST]


def assert_version(reader: shardwell.Reader, training: Training, version: int, name: int | str | None = None) -> None:
    """Asserts that a version is read as it was trained."""
    with reader.pin(version if name is None else name) as pinned:
        assert pinned.version == version
        found = dict(pinned.values())
        assert found and all(torch.equal(value, training.states[version][key]) for key, value in found.items())
    assert reader.digest(version if name is None else name) == training.digest(version)


@pytest.mark.parametrize("backups", [0, 1])
def test_kept_versions_are_read_while_training_goes_on(cluster: shardwell.LocalCluster, backups: int) -> None:
    training = Training(cluster.address, keep_versions=KEPT, backups=backups)
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        training.wait_for(KEPT + 2)
        newest = training.pause()
        for version in range(newest - KEPT, newest + 1):
            assert_version(reader, training, version)
            assert reader.wait_for(version, 60.0) == newest
        with pytest.raises(VersionGoneError, match="is no longer available") as caught, reader.pin(newest - KEPT - 1):
            pass
        assert caught.value.data["kept"] == ", ".join(map(str, range(newest - KEPT, newest)))
        training.resume()
        training.wait_for(newest + KEPT)
        with pytest.raises(VersionGoneError), reader.pin(newest - KEPT):
            pass


def test_published_version_stays_and_its_name_is_read(
    cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(cluster.address, keep_versions=KEPT)
    command = ["--address", cluster.address]
    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        training.wait_for(KEPT)
        published = training.pause() - 1
        assert main(["publish", training.run, "eval", "--version", str(published), *command]) == 0
        training.resume()
        training.wait_for(published + 3 * KEPT)
        assert_version(reader, training, published, "eval")
        newest = training.pause()
        for version in (newest - KEPT + 1, newest):
            assert_version(reader, training, version)
        capsys.readouterr()
        assert main(["digest", training.run, "--version", "eval", *command]) == 0
        assert capsys.readouterr().out == f"{training.digest(published)}  {training.run} version {published}\n"
        assert main(["publish", training.run, *command]) == 0
        kept = f"{published}, {newest - 2}, {newest - 1}"
        assert capsys.readouterr().out == (
            f"run '{training.run}': newest version {newest}\nkept: {kept}\neval: version {published}\n"
        )
        assert main(["publish", training.run, "--remove", *command]) == 1
        assert "name the version: shardwell publish RUN NAME" in capsys.readouterr().err
        assert main(["publish", training.run, "eval", "--remove", *command]) == 0
        training.resume()
        with pytest.raises(NotFoundError, match="has no version 'eval'"), reader.pin("eval"):
            pass
        training.wait_for(newest + 2)
        with pytest.raises(VersionGoneError), reader.pin(published):
            pass


def test_readers_agree_on_a_version_that_is_not_committed_yet(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address, keep_versions=200)
    with (
        training.in_background(),
        shardwell.attach(cluster.address, training.run) as one,
        shardwell.attach(cluster.address, training.run) as other,
    ):
        agreed = one.version + 2
        assert one.digest(agreed) == other.digest(agreed)
        with one.pin(at_least=agreed + 1) as pinned:
            assert pinned.version > agreed
        training.wait_for(agreed)
        assert one.digest(agreed) == training.digest(agreed)


def test_promoted_backup_has_the_kept_versions() -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        training = Training(cluster.address, keep_versions=KEPT, backups=1)
        with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
            wait_in_sync(cluster.address, training.run)
            training.wait_for(training.step + KEPT + 1)
            newest = training.pause()
            cluster.shards[0].kill()
            for version in range(newest - KEPT, newest + 1):
                assert_version(reader, training, version)
            training.resume()


@pytest.mark.parametrize("stop, is_asynchronous", [("kill", False), ("stop", False), ("kill", True)])
def test_versions_survive_a_restart_of_all_servers(stop: str, is_asynchronous: bool) -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        training = Training(cluster.address, keep_versions=KEPT)
        if is_asynchronous:
            training = PlainTraining(cluster.address, keep_versions=KEPT, consistency=shardwell.ASYNCHRONOUS)
        with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
            training.wait_for(KEPT + 1)
            published = training.pause() - 1
            assert (
                main(["publish", training.run, "eval", "--version", str(published), "--address", cluster.address]) == 0
            )
            training.resume()
            training.wait_for(published + 2 * KEPT)
            newest = training.pause()
            for server in cluster.shards:
                server.kill() if stop == "kill" else server.stop(20.0)
                server.restart(time.monotonic() + 60.0)
            cluster.restart_coordinator()
            for version in (newest - 2, newest - 1, newest):
                assert_version(reader, training, version)
            assert_version(reader, training, published, "eval")
            training.resume()
            training.wait_for(newest + 2 * KEPT)
            assert_version(reader, training, published, "eval")
        assert not lost_versions(cluster.address, training.run)


def test_backup_that_is_built_later_has_the_published_version() -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        training = Training(cluster.address, keep_versions=KEPT)
        with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
            training.wait_for(KEPT)
            published = training.pause()
            assert main(["publish", training.run, "eval", "--address", cluster.address]) == 0
            training.resume()
            training.wait_for(published + KEPT)
            assert main(["backups", training.run, "1", "--address", cluster.address]) == 0
            wait_in_sync(cluster.address, training.run)
            newest = training.pause()
            cluster.shards[0].kill()
            assert_version(reader, training, published, "eval")
            assert_version(reader, training, newest - 1)
            training.resume()
        assert not lost_versions(cluster.address, training.run)


def test_versions_that_a_restarted_server_lacks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        training = Training(cluster.address, keep_versions=KEPT)
        with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
            training.wait_for(KEPT)
            published, address = training.pause(), ["--address", cluster.address]
            assert main(["publish", training.run, "eval", *address]) == 0
            training.resume()
            training.wait_for(published + 2)
            newest = training.pause()
            server = cluster.shards[0]
            folder = folder_of(server.pid)
            server.kill()
            for record in folder.glob(f"*{RECORD_SUFFIX}"):
                for number, name in enumerate(decode(record.read_bytes()).held):
                    if number:
                        (folder / name).unlink(missing_ok=True)
                    else:
                        (folder / name).write_bytes(b"cannot be mapped")
            server.restart(time.monotonic() + 60.0)
            (lost,) = lost_versions(cluster.address, training.run)
            assert f"{published} (eval)" in lost and "the former process of server 'shard-0' did not leave them" in lost
            with pytest.raises(VersionGoneError, match=f"has lost 'eval', version {published}: the former"):
                reader.digest("eval")
            with pytest.raises(VersionGoneError, match="did not leave them"):
                reader.digest(newest - 1)
            capsys.readouterr()
            assert main(["publish", training.run, *address]) == 0
            assert f"eval: lost, version {published}: the former process of server" in capsys.readouterr().out
            assert main(["publish", training.run, "eval", "--remove", *address]) == 0
            training.resume()
            newest = training.step + KEPT + 1
            training.wait_for(newest)
            assert_version(reader, training, training.pause() - KEPT)


def test_server_without_memory_for_the_versions_refuses_the_run() -> None:
    with shardwell.LocalCluster(num_shards=1, memory_budget=24 << 20) as cluster:
        model = nn.Linear(1000, 1000)
        with (
            shardwell.join(cluster.address, run="many", keep_versions=20) as session,
            pytest.raises(CapacityError, match="20 older versions"),
        ):
            shardwell.auto_wrap(model, session)
            model(torch.zeros(1, 1000))


def test_trainers_agree_on_the_number_of_kept_versions(cluster: shardwell.LocalCluster) -> None:
    world, run = shardwell.World(dp=2), "agree"
    with (
        shardwell.join(cluster.address, run=run, world=world, min_trainers=1, keep_versions=1) as session,
        pytest.raises(RunMismatchError, match="keep_versions=1, but this trainer asks for keep_versions=2"),
    ):
        shardwell.join(cluster.address, run=run, world=world, min_trainers=1, keep_versions=2)
    assert session.run == run


def test_readers_are_listed_with_their_versions(
    cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(cluster.address, keep_versions=KEPT)
    command = ["readers", training.run, "--address", cluster.address]

    def listed() -> dict[str, tuple[str | None, str | None]]:
        capsys.readouterr()
        assert main([*command, "-o", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return {each["name"]: (each.get("version"), each.get("lag")) for each in found.get("readers", [])}

    with training.in_background():
        with (
            shardwell.attach(cluster.address, training.run, name="engine-1") as one,
            shardwell.attach(cluster.address, training.run) as other,
        ):
            model = Model()
            read = one.follow(model)
            newest = training.pause()
            assert one.wait_for(read, 60.0) == newest
            default = f"{socket.gethostname()}:{os.getpid()}"
            assert listed() == {"engine-1": (str(read), str(newest - read)), default: (None, None)}
            assert other.follow(model) == other.version == newest
            assert listed()[default] == (str(newest), "0")
            assert main(command) == 0
            assert "engine-1" in capsys.readouterr().out
        assert listed() == {}
        assert main(command) == 0
        assert capsys.readouterr().out == f"no readers; the newest version is {newest}\n"


def test_run_waits_for_a_reader_that_holds_it(
    cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(cluster.address, max_reader_lag=1)

    def is_waiting() -> bool:
        capsys.readouterr()
        assert main(["stall", training.run, "--address", cluster.address]) == 0
        return "reader 'engine' on" in capsys.readouterr().out.replace("\n", " ")

    with training.in_background():
        with shardwell.attach(cluster.address, training.run, name="engine", hold_s=60.0) as reader:
            model = Model()
            for _ in range(3):
                read = reader.follow(model)
                wait_until(is_waiting, "the run waits for the reader")
                assert reader.version == read + 2, "the step after next is not committed"
        training.wait_for(read + 4)
        with shardwell.attach(cluster.address, training.run, name="engine", hold_s=0.2) as reader:
            read = reader.follow(model)
            training.wait_for(read + 4)
    silent = [event.message for event in events(cluster.address, training.run) if event.kind == "reader_silent"]
    assert "reader 'engine' on" in silent[0] and "the run has waited 0.2 s for it" in silent[0]
