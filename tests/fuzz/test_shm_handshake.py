"""The handshake of the shared-memory transport: only exact names and proofs open it, on both ends."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwell_server.serving import rpc
from shardwell_server.shard.memory.mapped_memory import SharedMemory
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
    own = connected.transport.session_id
    name = choice.draw(variants(own).filter(lambda text: text != own))
    error = error_of(lambda: connected.open_gradient_buffer(transport_id=name))
    assert isinstance(error, ConflictError | InvalidRequestError)
    nonce = own.partition(".")[2]
    assert nonce not in str(error).replace(repr(name), ""), "the error reveals the nonce"
    number = choice.draw(st.integers(0, (1 << 32) - 1))
    error = error_of(lambda: connected.reduce(number, transport_id=name))
    assert isinstance(error, ConflictError | InvalidRequestError)
    assert FAILURES.last == ""


def offers(offer: shard_pb2.SharedMemoryOffer, folder: Path) -> st.SearchStrategy[tuple[str, str, bytes]]:
    """Returns offers of a rogue server."""
    elsewhere = [
        "/proc/self/mem",
        "/dev/zero",
        "/dev/shm",
        "/etc/passwd",
        *(str(folder / name) for name in ("fifo", "link", "socket", "stream")),
        "",
    ]
    path = offer.socket
    beside = [f"{path}/", f"{path}/../socket", path.replace("/", "//"), str(Path(path).parent), f"{path}/../lock"]
    paths = st.one_of(st.sampled_from([*elsewhere, *beside]), variants(path)).filter(lambda found: found != path)
    files = variants(offer.file).filter(lambda found: found != offer.file)
    proofs = st.one_of(st.binary(max_size=64), st.integers(0, 31).map(lambda at: offer.proof[:at]))
    proofs = proofs.filter(lambda found: found != offer.proof)
    right = (st.just(path), st.just(offer.file), st.just(offer.proof))
    wrong = (paths, files, proofs)
    return st.one_of(
        st.tuples(*(bad if number & at else good for at, good, bad in zip((1, 2, 4), right, wrong, strict=True)))
        for number in range(1, 8)
    )


@OPTIONS
@given(choice=st.data())
def test_trainer_maps_only_the_file_with_the_proof(
    connected: ConnectedUnit, tmp_path_factory: pytest.TempPathFactory, choice: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "shardwell-rogue"
    if not folder.exists():
        folder.mkdir()
        os.mkfifo(folder / "fifo")
        (folder / "link").symlink_to("/etc/passwd")
        for name, kind in (("socket", socket.SOCK_SEQPACKET), ("stream", socket.SOCK_STREAM)):
            with socket.socket(socket.AF_UNIX, kind) as closed:
                closed.bind(f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}/{name}")
    shm = connected.server.shm
    honest, offer = shm.open, shard_pb2.SharedMemoryOffer()
    offer.CopyFrom(connected.transport.session.answer.shm)
    path, file, proof = choice.draw(offers(offer, folder))

    @asynccontextmanager
    async def rogue(*arguments: Any) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        async with honest(*arguments) as answer:
            answer.shm.socket, answer.shm.file, answer.shm.proof = path, file, proof
            yield answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shm, "open", rogue)
        error = error_of(partial(ConnectedUnit, connected.one))
    assert isinstance(error, ShardwellError)
    assert "shared memory" in str(error)
