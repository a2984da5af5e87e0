"""Every transport gives the same bits, with and without shared memory, for every dtype and cache."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.processes.local_cluster import ServerProcess
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.processes import TrainerProcess
from tests.support.reference import ADAMW, sha256, train_plain
from tests.support.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
TRANSPORTS = ("grpc", "socket,grpc", "shm,grpc")
CLUSTERS = ("single", "triple", "mixed")
PLENTY = 1 << 30


def pairs(turn: int) -> list[tuple[str, str]]:
    """Returns pairs of a cluster and transports that have each of them once. Three turns have all pairs."""
    return [(where, TRANSPORTS[(turn + at) % len(TRANSPORTS)]) for at, where in enumerate(CLUSTERS)]


@pytest.fixture
def single(cluster_of_one: shardwell.LocalCluster) -> str:
    """Returns the address of a cluster with one server."""
    return cluster_of_one.address


@pytest.fixture
def triple(cluster_of_three: shardwell.LocalCluster) -> str:
    """Returns the address of a cluster with three servers."""
    return cluster_of_three.address


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns the address of a cluster with two servers, one of them without shared memory."""
    with shardwell.LocalCluster(num_shards=1, min_shard_bytes=4096) as running:
        arguments = ["shard", "--coordinator", running.address, "--token-file", str(running.token_file)]
        arguments += ["--listen", "127.0.0.1:0", "--shm-dir", "none"]
        log_path = tmp_path_factory.mktemp("mixed") / "log"
        without = ServerProcess("without", [*arguments, "--id", "without", "--exit-with-parent"], log_path)
        try:
            without.wait_ready(time.monotonic() + 60.0)
            yield running.address
        finally:
            without.kill()


@cache
def plain_hash(dp: int, steps: int = STEPS) -> str:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    train_plain(model, optimizer, transformer.batch, dp=dp, steps=steps)
    return sha256(model.state_dict())


def trained(address: str, *, dp: int = 2, steps: int = STEPS, clip: float | None = None, **options: Any) -> str:
    """Trains all ranks on one trainer and returns the hash of the weights."""
    with shardwell.join(
        address,
        run=uuid.uuid4().hex,
        world=shardwell.World(dp=dp),
        min_trainers=1,
        **join_options(**options),
    ) as session:
        return sha256(train(session, steps=steps, clip=clip)[1])


def trained_on_pairs(addresses: dict[str, str], turn: int, **options: Any) -> set[str]:
    """Trains on the pairs of a turn and returns the hashes of the weights."""
    return {trained(addresses[where], transports=transports, **options) for where, transports in pairs(turn)}


@pytest.fixture
def addresses(single: str, triple: str, mixed: str) -> dict[str, str]:
    """Returns the addresses of the clusters by name."""
    return {"single": single, "triple": triple, "mixed": mixed}


# Exact dtypes match plain PyTorch.


@pytest.mark.parametrize(
    ("where", "transports", "dp"),
    [(where, transports, 2 + turn % 2) for turn in range(3) for where, transports in pairs(turn)],
)
def test_every_transport_matches_plain_pytorch(
    request: pytest.FixtureRequest, where: str, transports: str, dp: int
) -> None:
    assert trained(request.getfixturevalue(where), dp=dp, transports=transports) == plain_hash(dp)


@pytest.mark.parametrize(
    ("where", "prefetch_bytes", "keep_bytes"),
    [("triple", 0, 0), ("triple", PLENTY, PLENTY), ("mixed", 0, PLENTY), ("mixed", PLENTY, 0)],
)
def test_keeping_and_prefetching_change_no_bit_in_shared_memory(
    request: pytest.FixtureRequest, where: str, prefetch_bytes: int, keep_bytes: int
) -> None:
    address = request.getfixturevalue(where)
    assert trained(address, transports="shm,grpc", prefetch_bytes=prefetch_bytes, keep_bytes=keep_bytes) == plain_hash(
        2
    )


def test_three_trainers_in_shared_memory_match_plain_pytorch(triple: str) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 3, "--steps", STEPS, "--transports", "shm,grpc")
    with (
        TrainerProcess(triple, run, *options, "--global-rank", 2) as third,
        TrainerProcess(triple, run, *options, "--global-rank", 1) as second,
        TrainerProcess(triple, run, *options, "--global-rank", 0) as first,
    ):
        results = [each.finish() for each in (first, second, third)]
    assert [result.get("sha256") for result in results] == [plain_hash(3)] * 3, results


def test_trainer_with_two_of_three_ranks_matches_plain_pytorch(triple: str) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 3, "--min-trainers", 2, "--steps", STEPS, "--transports", "shm,grpc")
    with (
        TrainerProcess(triple, run, *options) as second,
        TrainerProcess(triple, run, *options) as first,
    ):
        results = [each.finish() for each in (first, second)]
    assert [result.get("sha256") for result in results] == [plain_hash(3)] * 2, results
    assert sorted(len(result["losses"]) for result in results) == [STEPS, 2 * STEPS]


def test_trainers_on_different_transports_match_plain_pytorch(mixed: str) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        TrainerProcess(mixed, run, *options, "--transports", "shm,socket") as second,
        TrainerProcess(mixed, run, *options, "--transports", "grpc") as first,
    ):
        results = [each.finish() for each in (first, second)]
    assert [result.get("sha256") for result in results] == [plain_hash(2)] * 2, results


def test_clipping_gives_the_same_bits_on_every_transport_and_server_count(addresses: dict[str, str]) -> None:
    assert len(trained_on_pairs(addresses, 0, clip=0.05, steps=3)) == 1


# Lossy dtypes round in the same way everywhere.


@pytest.mark.parametrize(
    ("gather_dtype", "push_dtype", "turn"),
    [("bfloat16", "bfloat16", 0), ("float16", "float16", 1), ("int8", "int8", 2), ("float32", "int8", 0)],
)
def test_lossy_dtypes_give_the_same_bits_on_every_transport_and_server_count(
    addresses: dict[str, str], gather_dtype: str, push_dtype: str, turn: int
) -> None:
    hashes = trained_on_pairs(addresses, turn, steps=2, gather_dtype=gather_dtype, push_dtype=push_dtype)
    assert len(hashes) == 1
    assert hashes != {plain_hash(2, steps=2)}, "nothing was rounded"


@pytest.mark.parametrize(("push_dtype", "turn"), [("int8", 0), ("float8", 1), ("topk-1%", 2), ("lowrank-4", 3)])
def test_error_feedback_gives_the_same_bits_on_every_transport(
    addresses: dict[str, str], push_dtype: str, turn: int
) -> None:
    hashes = trained_on_pairs(addresses, turn, steps=3, push_dtype=push_dtype, push_error_feedback=True)
    assert len(hashes) == 1
    assert hashes != {plain_hash(2, steps=3)}, "nothing was rounded"


@pytest.mark.parametrize("transports", TRANSPORTS)
@pytest.mark.parametrize("where", ["triple", "mixed"])
def test_full_state_dict_is_exact_although_gathers_are_lossy(
    request: pytest.FixtureRequest, where: str, transports: str
) -> None:
    assert trained(request.getfixturevalue(where), dp=1, steps=0, transports=transports, gather_dtype="int8") == sha256(
        transformer.build().state_dict()
    )


def test_unit_is_in_shared_memory_if_all_its_servers_offer_it(triple: str, mixed: str) -> None:
    """Verifies that the tests of this file use the transports that they name."""
    peaks = {}
    for name, address, transports in (
        ("shm", triple, "shm,grpc"),
        ("mixed", mixed, "shm,grpc"),
        ("grpc", triple, "grpc"),
    ):
        with shardwell.join(
            address, run=uuid.uuid4().hex, transfers=shardwell.TransferOptions(transports=transports)
        ) as session:
            train(session, steps=1)
            peaks[name] = max(unit.own_bytes for unit in session.units)
            kinds = {server.transport.name for server in session.store.servers._connections.values()}
            vectors = [unit.vector for unit in session.store._units.values()]
            windows = [shard.address.window for unit in session.store._units.values() for shard in unit.shards]
        if name == "shm":
            assert (kinds, peaks[name]) == ({"shm"}, 0)
            assert all(vectors)
        elif name == "mixed":
            assert kinds == {"shm", "grpc"}
            assert any(windows) and not all(windows)
        else:
            assert kinds == {"grpc"}
            assert not any(vectors) and not any(windows)


# Gradients of any layout.


class Phase(nn.Module):
    """A complex factor. Autograd negates the gradient of the imaginary part lazily, without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.complex(self.real, self.imaginary).conj()).real


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_lazily_negated_gradients_match_plain_pytorch(single: str, transports: str) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    plain, sharded = Phase(), Phase()
    plain(values).sum().backward()
    assert plain.imaginary.grad is not None and plain.imaginary.grad.is_neg()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    options = shardwell.TransferOptions(transports=transports)
    with shardwell.join(single, run=uuid.uuid4().hex, world=shardwell.World(), transfers=options) as session:
        shardwell.fully_shard(sharded, session)
        optimizer = shardwell.optim.SGD(sharded.parameters(), lr=1.0)
        for step in session.steps(1):
            for batch in step.batches(lambda step, dp_rank: values):
                sharded(batch).sum().backward()
            optimizer.step()
        assert sha256(shardwell.full_state_dict(sharded)) == sha256(plain.state_dict())


# Broken transports.


@pytest.mark.parametrize(
    ("transports", "when"),
    [
        ("socket", "before the forward"),
        ("socket", "after the backward"),
        ("shm,grpc", "before the forward"),
        ("shm,grpc", "after the backward"),
        ("shm", "after the backward"),
    ],
)
def test_broken_transport_is_reopened(single: str, transports: str, when: str) -> None:
    with shardwell.join(
        single,
        run=uuid.uuid4().hex,
        world=shardwell.World(),
        transfers=shardwell.TransferOptions(transports=transports),
    ) as session:
        model = transformer.build()
        shardwell.fully_shard(model.blocks[0], session)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        (server,) = session.store.servers._connections.values()
        broken: list[Any] = []
        for step in session.steps(STEPS):
            for tokens in step.batches(transformer.batch):
                if when == "after the backward":
                    model(tokens).backward()
                broken.append(server.transport)
                broken[-1].session.cut()  # simulates a lost connection
                if when == "before the forward":
                    model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            # All pushes of this step may have ended before its transport broke. Those of the next step need another.
            assert server.transport not in broken[:-1]
        assert server.transport.name == transports.partition(",")[0]
        assert sha256(shardwell.full_state_dict(model)) == plain_hash(1)
