"""Transfers whose bytes arrive with a wrong checksum: they are repeated and counted, and the weights stay the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.data_plane.kept_streams import DeltaIncoming
from shardwell_server.shard.requests.client_streams import ReceivedStream
from shardwell_wire.connection import socket_frames
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import CorruptDataError
from tests.support.cluster import events, join_options, wait_in_sync
from tests.support.reference import sha256

STEPS = 4


class Damage:
    """Damages streams of this process, at their receivers, as if bytes had changed on the way."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self._pattern, self.left, self.count = "", 0, 0
        for receiver, check, name in (
            (socket_frames.StreamReceiver, "_end", "_what"),
            (chunk_streams.StreamReceiver, "_finish", "what"),
        ):
            self._patch(patched, receiver, check, lambda self, args, name=name: getattr(self, name))
        self._patch(patched, ReceivedStream, "_check", lambda _, args: args[1])
        self._patch(patched, DeltaIncoming, "_apply", lambda self, _: f"deltas of {self._what}")

    def arm(self, pattern: str, times: int = 1) -> None:
        """Damages the next streams with a description that matches."""
        self._pattern, self.left = pattern, times

    def _patch(self, patched: pytest.MonkeyPatch, owner: type, name: str, what_of: Callable[[Any, Any], str]) -> None:
        check = getattr(owner, name)

        def damaged(receiver: Any, *args: Any) -> Any:
            what = what_of(receiver, args)
            if self.left and re.search(self._pattern, what):
                self.left, self.count = self.left - 1, self.count + 1
                raise CorruptDataError(f"{what}: the bytes have checksum 0x1, expected 0x2")
            return check(receiver, *args)

        patched.setattr(owner, name, damaged)


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Damage:
    return Damage(monkeypatch)


@pytest.fixture
def address() -> Iterator[str]:
    with shardwell.testing.in_process_cluster(2, dp=2) as found:
        yield found


def train(
    run: str,
    disturb: Callable[[int], None] = lambda step: None,
    *,
    width: int = 256,
    optimizer: Callable[[Any], Any] = lambda parameters: shardwell.optim.AdamW(parameters, lr=1e-3),
    **options: Any,
) -> tuple[str, shardwell.Session]:
    """Trains two data ranks in this process; returns the hash of the weights, and the session, which is open."""
    session = shardwell.join(run=run, **join_options(**options))
    disturb(-1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    for index in (0, 2):
        shardwell.fully_shard(model[index], session, name=f"layer{index}")
    shardwell.fully_shard(model, session, name="rest")
    stepped = optimizer(model.parameters())
    for step in session.steps(STEPS):
        disturb(step.number)
        for batch in step.batches(lambda number, rank: torch.full((3, 32), 0.1 * number + 0.01 * rank)):
            model(batch).square().mean().backward()
        stepped.step()
        stepped.zero_grad()
    return sha256(shardwell.full_state_dict(model)), session


LOSSY = {"gather_dtype": "bfloat16", "delta_cache_bytes": 1 << 28}
TRANSFERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": (r"^Gather of unit", {}),
    "push": (r"^gradient of unit", {}),
    "batch of gathers": (r"^GatherBatch", {"width": 16}),
    "batch of pushes": (r"^gradient of unit", {"width": 16}),
    "deltas": (r"^deltas of unit", LOSSY),
    "stream of deltas": (r"^Gather of unit", LOSSY),
    "encoded push": (r"^gradient of unit", {"push_dtype": "int8", "push_error_feedback": True}),
}


@pytest.mark.parametrize("transport", ["socket", "grpc"])
@pytest.mark.parametrize("name", TRANSFERS)
def test_one_damaged_transfer_is_repeated_and_counted(name: str, transport: str, address: str, damage: Damage) -> None:
    pattern, options = TRANSFERS[name]
    expected, first = train("undamaged", transports=transport, **options)
    first.close()

    weights, session = train(
        "damaged", lambda step: damage.arm(pattern) if step == 2 else None, transports=transport, **options
    )
    assert damage.count == 1
    assert weights == expected
    assert session.stats()["corrupt_transfer_count"] == 1
    (server,) = session.report().corrupt_transfers
    assert f"damaged: 1 transfers with {server} since join had a wrong checksum and were repeated" in str(
        session.report()
    )
    session._membership.ask()
    (message,) = [event.message for event in events(address, "damaged") if event.kind == "transfers_corrupt"]
    assert f"at {server}: 1 transfers since the trainer joined arrived with a wrong checksum" in message


@pytest.mark.parametrize("transport", ["socket", "grpc"])
@pytest.mark.parametrize("pattern", [r"^Gather of unit", r"^gradient of unit"], ids=["gather", "push"])
def test_two_damaged_attempts_are_repeated_and_the_third_names_the_hosts(
    pattern: str, transport: str, address: str, damage: Damage
) -> None:
    _, session = train("two", lambda step: damage.arm(pattern, 2) if step == 1 else None, transports=transport)
    assert damage.count == 2
    session.close()
    message = r"between this host, '.+', and the shard server at 127\.0\.0\.1:\d+ was damaged 3 times in a row"
    with pytest.raises(CorruptDataError, match=message):
        train("three", lambda step: damage.arm(pattern, 1000) if step == 1 else None, transports=transport)


def test_damaged_initial_values_are_repeated(address: str, damage: Damage) -> None:
    expected, first = train("undamaged", transports="socket")
    first.close()
    weights, session = train(
        "damaged", lambda step: damage.arm("^initial values of") if step < 0 else None, transports="socket"
    )
    assert (damage.count, weights) == (1, expected)
    assert session.stats()["corrupt_transfer_count"] == 1


@pytest.mark.parametrize("pattern", [r"^partition of unit '\w+'$", r"^partition of .*, rank"], ids=["read", "stage"])
def test_damaged_optimizer_partitions_are_repeated(pattern: str, address: str, damage: Damage) -> None:
    def on_trainers(parameters: Any) -> Any:
        return shardwell.ClientSide(parameters, torch.optim.AdamW, lr=1e-3)

    expected, first = train("undamaged", transports="socket", optimizer=on_trainers)
    first.close()
    weights, session = train(
        "damaged",
        lambda step: damage.arm(pattern) if step == 2 else None,
        transports="socket",
        optimizer=on_trainers,
    )
    assert (damage.count, weights) == (1, expected)
    assert session.stats()["corrupt_transfer_count"] == 1


@pytest.mark.parametrize("pattern", [r"^state of unit", r"^step \d+ of the backup"], ids=["copy", "step"])
def test_damaged_streams_between_servers_are_repeated(pattern: str, address: str, damage: Damage) -> None:
    def disturb(step: int) -> None:
        if step >= 0:
            wait_in_sync(address, "damaged")
        if step == (-1 if "state" in pattern else 2):
            damage.arm(pattern)

    _, session = train("damaged", disturb, transports="socket", backups=1)
    assert session.step == STEPS
    wait_in_sync(address, "damaged")
    assert damage.count == 1
    assert not [event for event in events(address, "damaged") if event.kind in ("backups_delayed", "backups_lost")]
