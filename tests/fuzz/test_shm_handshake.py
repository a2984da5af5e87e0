"""The handshake of the shared-memory transport: only exact names and proofs open it, on both ends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwell_server import rpc
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_wire.errors import ConflictError, InvalidRequestError, ShardwellError
from shardwell_wire.v1 import shard_pb2
from tests.fuzz.handlers import FAILURES
from tests.support.shard_server import ShardServer, error_of, unit
from tests.support.shm_transport import ConnectedUnit

OPTIONS = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def connected() -> Iterator[ConnectedUnit]:
    rpc.logger.addHandler(FAILURES)
    with ExitStack() as stack:
        server = stack.enter_context(ShardServer(shared=stack.enter_context(closing(SharedMemory()))))
        yield stack.enter_context(ConnectedUnit(unit(server)))
    rpc.logger.removeHandler(FAILURES)


def variants(text: str) -> st.SearchStrategy[str]:
    """Returns texts that resemble a text, or not."""
    cuts = st.integers(0, len(text))
    return st.one_of(
        st.text(max_size=80),
        cuts.map(lambda at: text[:at]),
        st.tuples(cuts, st.characters()).map(lambda change: text[: change[0]] + change[1] + text[change[0] + 1 :]),
        st.text(max_size=3).map(lambda more: text + more),
    )


@OPTIONS
@given(choice=st.data())
def test_only_the_exact_name_opens_a_session(connected: ConnectedUnit, choice: st.DataObject) -> None:
    FAILURES.last = ""
    own = connected.transport._session
    name = choice.draw(variants(own).filter(lambda text: text != own))
    error = error_of(lambda: connected.open_gradient_buffer(transport_id=name))
    assert isinstance(error, ConflictError | InvalidRequestError)
    nonce = own.partition(".")[2]
    assert nonce in name or nonce not in str(error), "the error reveals the nonce"
    number = choice.draw(st.integers(0, (1 << 32) - 1))
    error = error_of(lambda: connected.reduce(number, transport_id=name))
    assert isinstance(error, ConflictError | InvalidRequestError)
    assert FAILURES.last == ""


def offers(offer: shard_pb2.SharedMemoryOffer, folder: Path) -> st.SearchStrategy[tuple[str, bytes]]:
    """Returns offers of a rogue server."""
    elsewhere = [
        "/proc/self/mem",
        "/dev/zero",
        "/dev/shm",
        "/etc/passwd",
        str(folder / "fifo"),
        str(folder / "link"),
        "",
    ]
    name = Path(offer.path).name
    beside = [f"{offer.path}/", f"{offer.path}/../{name}", offer.path.replace("/", "//"), str(Path(offer.path).parent)]
    paths = st.one_of(st.sampled_from([*elsewhere, *beside]), variants(offer.path))
    proofs = st.one_of(st.binary(max_size=64), st.integers(0, 31).map(lambda at: offer.proof[:at]))
    return st.one_of(
        st.tuples(paths.filter(lambda path: path != offer.path), st.just(offer.proof)),
        st.tuples(st.just(offer.path), proofs.filter(lambda proof: proof != offer.proof)),
        st.tuples(paths, proofs.filter(lambda proof: proof != offer.proof)),
    )


@OPTIONS
@given(choice=st.data())
def test_trainer_maps_only_the_file_with_the_proof(
    connected: ConnectedUnit, tmp_path_factory: pytest.TempPathFactory, choice: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "rogue"
    if not folder.exists():
        folder.mkdir()
        os.mkfifo(folder / "fifo")
        (folder / "link").symlink_to("/etc/passwd")
    shm = connected.server.shm
    honest, offer = shm.open, shard_pb2.SharedMemoryOffer()
    offer.CopyFrom(connected.transport._rpc.answer.shm)
    path, proof = choice.draw(offers(offer, folder))

    @asynccontextmanager
    async def rogue(*arguments: Any) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        async with honest(*arguments) as answer:
            answer.shm.path, answer.shm.proof = path, proof
            yield answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shm, "open", rogue)
        error = error_of(partial(ConnectedUnit, connected.one))
    assert isinstance(error, ShardwellError)
    assert "shared memory" in str(error)
