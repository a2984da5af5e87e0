"""Shows gradients to the other trainers of a reduction group, over TCP connections between them.

A connection starts with a hello: magic bytes, the secret of the accepting trainer and the position of the connecting
one. The accepting trainer answers with one byte. Then both sides send frames: size of the body (8 bytes,
little-endian), body, XXH3-64 of the body (8 bytes). A body is a ``_Header``, the indices of the parameters that have a
gradient, and the segments that the receiver adds, each aligned to 8 bytes.

Note: [Rounds of an exchange]
    A round exchanges the gradients of one unit. It takes place for all members or for none: a member adds its shards
    only if the gradients of all members are there, and all members see that alike. If a round does not take place, each
    member pushes its own gradient to all shards.

Note: [Frames between trainers]
    Every member sends the same sequence of frames to all others: one for each gradient that it shows, and one for each
    version in which it shows no more. A round has one frame of each member. If all frames of a round are for the same
    unit and the same shards, the members add their gradients. All members see the same sequences, so all of them decide
    alike, and a member waits for slow members as long as they live: no clock decides what is added. If a member has
    ended a version, or is at a later one, the version is over for all. The frames of this version are then skipped.

    A frame is sent when its gradient is pushed, while earlier rounds may still wait for other members. A member can be
    ahead of the others by ``push_bytes`` at most: its pushes wait until their rounds have taken place. This also limits
    the memory for frames that arrive early.

    It is unknown whether a lost member has sent its last frames to all others. The attempts of all members are then
    void. See Note: [Sums among trainers] in ``store/sums.py``.

Note: [Connections instead of torch.distributed]
    A collective begins when its last member starts it, so a member that is ahead could not send while the others
    compute. With an all-to-all of gloo for each unit, steps of ``benchmarks.gradient_reduction`` took 1.26 to 1.33
    times as long. With ``send`` and ``recv`` they took 1.05 times as long: gloo sends a message only when the receiver
    has asked for it. Gloo also has no secrets and no checksums.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from shardwell.data_plane.shard import RemoteUnit
from shardwell.peers.node_group import MAX_FAILURES, MemberGoneError, Round
from shardwell_wire.connection.socket_frames import set_options, unsent
from shardwell_wire.encoding.chunk_streams import Buffer, memory_at
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.errors import CorruptDataError, UnavailableError
from shardwell_wire.model.layout import Segment
from shardwell_wire.security.tokens import PROOF_BYTES

logger = logging.getLogger(__name__)

SECRET_BYTES = 16
_MAGIC, _WELCOME = b"shrdpr-2", b"\x01"
_HELLO = struct.Struct(f"<8s{SECRET_BYTES}sI")
_SIZE = _CHECKSUM = struct.Struct("<Q")
_HELLO_LIMIT_S = 1.0
"""How long the accepting trainer waits for a hello. Others may connect to its port, too."""
_FLUSH_LIMIT_S = 5.0
_MAX_BUFFERS = 1024
"""Limit of Linux for one call of sendmsg."""
_ALIGNMENT = 8
_NOTHING = memoryview(b"")
_CHECK_INTERVAL_S = 1.0
_END = -1
"""Takes the place of a unit: the member shows no more gradients in the version."""
_FOR_GOOD = 1 << 62
"""Version that is ended by a member that leaves the group for good."""

Body = Callable[[], Sequence[memoryview | bytes]]
"""Returns the body of a frame. Called by the thread that sends it, and may wait for the body."""


class _Header(NamedTuple):
    """The start of a frame."""

    version: int
    unit: int = _END
    epoch: int = 0
    attempt: int = 0
    cuts: int = 0
    index_count: int = 0
    """Number of parameters that have a gradient."""
    lease_proof: bytes = bytes(PROOF_BYTES)


_HEADER = struct.Struct(f"<6q{PROOF_BYTES}s")


@dataclass(eq=False, slots=True)
class _Frame:
    """A frame of another member, or one that this member sends."""

    header: _Header
    indices: tuple[int, ...] = ()
    content: memoryview = _NOTHING
    """The segments. Empty if this member sends the frame."""
    is_decided: bool = False
    """True if ``shown`` has its final value."""
    shown: Sequence[_Frame | None] = ()
    """The frames of all members in the round, with None for this one. Empty: the round does not take place."""


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """The gradient of one unit of one member."""

    epoch: int
    """Epoch of the lease on the member's work item."""
    lease_proof: bytes
    """Proves this lease to shard servers. Zeros: the cluster has no key."""
    attempt: int
    """Attempt at the work item."""
    cuts: int
    """Identifies how the unit is cut into shards. Members with different cuts cannot share the work."""
    flats: Mapping[int, torch.Tensor]
    """Flattened gradients by parameter index. Each [numel]."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Parameters that have a gradient, by rising index."""
        return tuple(sorted(self.flats))

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Returns the gradient of a segment. None: its parameter has none. [numel]"""
        flat = self.flats.get(segment.parameter_index)
        return None if flat is None else flat[segment.start_element : segment.stop_element]


@dataclass(frozen=True, slots=True)
class ReceivedGradient:
    """The parts of another member's gradient that this trainer adds. The fields are those of ``WholeGradient``."""

    epoch: int
    lease_proof: bytes
    attempt: int
    cuts: int
    indices: tuple[int, ...]
    parts: Mapping[tuple[int, int], torch.Tensor]
    """Segments by parameter and first element. Each [numel]."""

    def part(self, segment: Segment) -> torch.Tensor | None:
        """See ``WholeGradient.part``."""
        return self.parts.get((segment.parameter_index, segment.start_element))


Shown = WholeGradient | ReceivedGradient
"""The gradient that one member shows to the others."""


def adder_of(unit: RemoteUnit, number: int, num_members: int) -> int:
    """Returns the member that adds and pushes a shard. The members take turns, also from unit to unit."""
    return (unit.index * len(unit.shards) + number) % num_members


def cuts_of(unit: RemoteUnit) -> int:
    """Returns a number that differs for different ranges of shards, with the bits of a positive int64."""
    return hash(tuple((shard.start_bytes, shard.stop_bytes) for shard in unit.shards)) & ((1 << 62) - 1)


def after(count: int, action: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls ``action`` when it is called for the ``count``-th time, in any thread."""
    lock, missing = threading.Lock(), count

    def call() -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        action()

    return call


class PeerExchange:
    """One member's view of the exchange, over TCP. See Note: [Rounds of an exchange].

    ``collect`` is called by the thread that adds, ``leave`` by any thread, and the other public methods by the training
    thread.

    Args:
        connected: Connections to the other members, by position. Closed with this object.
        position: Position of this member.
        find_lost: Returns why a member does not take part any more, although its connection has not ended. Empty: all
            members do. Called once per second of waiting.
        wait_limit_s: Longest wait for the other members.
    """

    def __init__(
        self,
        connected: Mapping[int, socket.socket],
        position: int,
        *,
        find_lost: Callable[[], str],
        wait_limit_s: float,
    ) -> None:
        self._position, self._size = position, len(connected) + 1
        self._find_lost, self._wait_limit_s = find_lost, wait_limit_s
        self._changed = threading.Condition()
        """Protects the fields below."""
        self._streams: list[deque[_Frame]] = [deque() for _ in range(self._size)]
        """Frames that wait for those of other members, by position."""
        self._offered: dict[Round, _Frame] = {}
        """The frames of this member that were not collected."""
        self._left = self._stopped = False
        self._why_lost = ""
        self._version, self._count = -1, 0
        """The last version in which this member took part, and the number of its rounds."""
        self._ended_version = -1
        """The last version that this member has ended."""
        self._closed_version = -1
        """The last version that is over for all members."""
        self._failed_version, self._num_failures = -1, 0
        """The last version in which a round did not take place, and the number of such versions in a row."""
        self._links = {other: PeerLink(sock, other, self) for other, sock in sorted(connected.items())}

    @property
    def active(self) -> bool:
        """False if this trainer has left the group for good."""
        return not self._left

    # ---- the training thread ----

    def start_round(self, version: int) -> Round | None:
        """Starts the next round of a version. None: this trainer pushes its own gradient."""
        with self._changed:
            if self._version != version:
                self._version, self._count = version, 0
            if self._why_lost:
                self._leave(self._why_lost)
            if self._left or max(self._ended_version, self._closed_version) >= version:
                return None
            self._count += 1
            return Round(version, self._count - 1)

    def offer(
        self,
        this_round: Round,
        unit: RemoteUnit,
        own: WholeGradient,
        copied: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        """Starts to show this trainer's gradient to the others. Does not wait.

        Args:
            this_round: The result of ``start_round``.
            copied: Waits until the gradient is complete.
            sent: Called once, in any thread, when the gradient is not read any more by this method's work.
        """
        indices = own.indices
        header = _Header(
            this_round.version, unit.index, own.epoch, own.attempt, own.cuts, len(indices), own.lease_proof
        )
        with self._changed:
            self._offered[this_round] = frame = _Frame(header, indices)
            done = after(len(self._links), sent)
            for other, link in self._links.items():
                link.send(partial(self._body, frame, unit, own, copied, other), done)
            self._note_frame(self._position, frame)

    def finish_version(self, version: int) -> None:
        """Called when this trainer shows no more gradients of a version. The other members expect no more.

        Gradients that were offered are still sent, and their rounds take place.
        """
        with self._changed:
            self._end_version(version)

    def _end_version(self, version: int) -> None:
        if version > self._ended_version:
            self._ended_version = version
            header = _Header(version)
            for link in self._links.values():
                link.send(lambda: [_HEADER.pack(*header)])
            self._note_frame(self._position, _Frame(header))

    def _body(
        self, frame: _Frame, unit: RemoteUnit, own: WholeGradient, copied: Callable[[], None], other: int
    ) -> list[memoryview | bytes]:
        """Returns the body of a frame for one member. Called by the thread that sends it."""
        copied()
        body: list[memoryview | bytes] = [_HEADER.pack(*frame.header) + np.array(frame.indices, np.int64).tobytes()]
        for segment in self._segments(unit, other, frame.indices):
            part = own.part(segment)
            assert part is not None
            body.append(memory_at(part.data_ptr(), part.nbytes, part))
            if rest := _aligned(part.nbytes) - part.nbytes:
                body.append(bytes(rest))
        return body

    def _segments(self, unit: RemoteUnit, position: int, indices: tuple[int, ...]) -> list[Segment]:
        """Returns what a member adds."""
        numbers = [number for number in range(len(unit.shards)) if adder_of(unit, number, self._size) == position]
        return [segment for number in numbers for segment in unit.shards[number].segments_of(indices)]

    # ---- the thread that adds ----

    def collect(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, is_over: Callable[[], bool]
    ) -> Sequence[Shown] | None:
        """Waits for the gradients of all members; returns them in the order of the members.

        Args:
            this_round: The round that was offered.
            own: This trainer's gradient, which is complete.
            is_over: Returns True if the gradient does not count any more.

        Returns:
            None: the round does not take place.

        Raises:
            Exception: A member is gone. It is unknown whether the round takes place for the others.
        """
        with self._changed:
            frame = self._offered.pop(this_round)
        deadline = time.monotonic() + self._wait_limit_s
        while True:
            with self._changed:
                if frame.is_decided:
                    break
                if self._stopped or is_over():
                    return None
                if self._why_lost:
                    raise MemberGoneError(self._why_lost)
                # Lost members are looked for only when nothing has arrived for a while, and without the lock.
                if self._changed.wait(_CHECK_INTERVAL_S):
                    continue
                missing = [position for position, stream in enumerate(self._streams) if not stream]
            if why := self._find_lost():
                raise MemberGoneError(why)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"members {missing} of {self._size} have not pushed their gradients within {self._wait_limit_s:g} s"
                )
        if not frame.shown:
            return None
        return [own if each is None else self._received(each, unit) for each in frame.shown]

    def _received(self, frame: _Frame, unit: RemoteUnit) -> ReceivedGradient:
        """Finds the segments that this trainer adds in a frame.

        Raises:
            CorruptDataError: The content has another size.
        """
        segments = self._segments(unit, self._position, frame.indices)
        expected, start = sum(_aligned(segment.size_bytes) for segment in segments), 0
        if expected != len(frame.content):
            raise CorruptDataError(
                f"the gradient of {unit.layout.unit} of another trainer has {len(frame.content)} bytes, "
                f"expected {expected}"
            )
        parts = {}
        for segment in segments:
            dtype = getattr(torch, unit.layout.parameters[segment.parameter_index].dtype)
            flat = bytes_tensor(frame.content[start : start + segment.size_bytes]).view(dtype)
            parts[segment.parameter_index, segment.start_element] = flat
            start += _aligned(segment.size_bytes)
        header = frame.header
        return ReceivedGradient(header.epoch, header.lease_proof, header.attempt, header.cuts, frame.indices, parts)

    # ---- any thread ----

    def note_body(self, position: int, body: memoryview) -> None:
        """Called by a link's thread with each frame of a member, in the order in which it was sent."""
        with self._changed:
            self._note_frame(position, _parse(body))

    def _note_frame(self, position: int, frame: _Frame) -> None:
        """Adds a frame of a member, and decides the rounds that are complete."""
        if frame.header.version <= self._closed_version:
            frame.is_decided = True
        else:
            self._streams[position].append(frame)
        while all(self._streams):
            self._decide([stream[0] for stream in self._streams])
        self._changed.notify_all()

    def _decide(self, frames: list[_Frame]) -> None:
        """Decides a round from the first frames of all members."""
        own, headers = frames[self._position], [frame.header for frame in frames]
        newest = max(header.version for header in headers)
        ended = [header.version for header in headers if header.unit == _END]
        # A member that is at a version has ended all earlier ones, so no round of them can take place.
        self._closed_version = max(newest - 1, *ended, -1)
        if self._closed_version < min(header.version for header in headers):
            takes_place = len({(header.unit, header.cuts) for header in headers}) == 1
            own.is_decided = True
            if takes_place:
                own.shown = [None if frame is own else frame for frame in frames]
            for stream in self._streams:
                stream.popleft()
            if not takes_place:
                self._note_failure(own.header.version, "its trainers pushed different units")
            return
        for stream in self._streams:
            while stream and stream[0].header.version <= self._closed_version:
                stream.popleft().is_decided = True
        if own.is_decided and own.header.unit != _END:
            absent = [(at.version, at.unit == _END) > (own.header.version, False) for at in headers]
            self._note_failure(own.header.version, f"member {absent.index(True)} of {self._size} takes no part")

    def _note_failure(self, version: int, why: str) -> None:
        """Records that a round did not take place. Leaves after ``MAX_FAILURES`` versions in a row."""
        if self._closed_version == _FOR_GOOD:
            self._leave("another member pushes its own gradients from now on")
        if self._failed_version == version:
            return
        self._num_failures = self._num_failures + 1 if self._failed_version == version - 1 else 1
        self._failed_version = version
        if self._num_failures >= MAX_FAILURES:
            self._leave(f"in {self._num_failures} consecutive steps, not all gradients were added: {why}")
        else:
            logger.info("gradients of step %d are not added among the trainers: %s", version, why)

    def note_lost(self, position: int, why: str) -> None:
        """Called by a link's thread when the connection to a member has ended. The first reason counts."""
        with self._changed:
            self._why_lost = self._why_lost or f"member {position} of {self._size} is gone: {why}"
            self._changed.notify_all()

    def leave(self, reason: BaseException | str) -> None:
        """Leaves the group for good."""
        with self._changed:
            self._leave(reason)

    def _leave(self, reason: BaseException | str) -> None:
        if not self._left:
            self._left = True
            why = str(reason).partition("\n")[0] or type(reason).__name__
            logger.warning("gradient group: this trainer pushes its own gradients from now on: %s", why)
            self._end_version(_FOR_GOOD)

    def stop(self) -> None:
        """Leaves the group at the end of the session. ``collect`` returns or raises soon."""
        with self._changed:
            self._stopped = self._left = True
            self._end_version(_FOR_GOOD)

    def close(self) -> None:
        """Releases memory and connections. Called after ``stop``, when ``collect`` is not called any more."""
        for link in self._links.values():
            link.close()


class PeerLink:
    """The connection to one member. Sends and receives in threads of its own. Thread-safe.

    Args:
        position: Position of the other member.
        owner: Receives the frames.
    """

    def __init__(self, connected: socket.socket, position: int, owner: PeerExchange) -> None:
        self._socket, self._position, self._owner = connected, position, owner
        self._frames: queue.SimpleQueue[tuple[Body, Callable[[], None]] | None] = queue.SimpleQueue()
        self._broken = threading.Event()
        connected.settimeout(None)
        set_options(connected)
        self._sender = threading.Thread(target=self._send_all, name="shardwell-peer-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name="shardwell-peer-receive", daemon=True)
        self._sender.start()
        self._receiver.start()

    def send(self, body: Body, done: Callable[[], None] = lambda: None) -> None:
        """Starts to send a frame after those before. Does not wait.

        Args:
            body: Returns the body.
            done: Called once when the frame is sent or dropped, because the connection has ended.
        """
        self._frames.put((body, done))

    def close(self) -> None:
        """Sends what is left, for a limited time, and closes the connection."""
        self._frames.put(None)
        self._sender.join(0.0 if self._broken.is_set() else _FLUSH_LIMIT_S)
        self.abort()
        self._sender.join(_FLUSH_LIMIT_S)
        self._receiver.join(_FLUSH_LIMIT_S)
        self._socket.close()

    def abort(self) -> None:
        """Ends the connection at once. Frames that are not sent are dropped."""
        self._broken.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        while (frame := self._frames.get()) is not None:
            body, done = frame
            try:
                if not self._broken.is_set():
                    self._send(body())
            except Exception as error:  # as in `_receive_all`
                self._end(error)
            finally:
                del frame, body
                done()

    def _send(self, body: Sequence[memoryview | bytes]) -> None:
        checksum = xxhash.xxh3_64()
        for piece in body:
            checksum.update(piece)
        left: Sequence[Buffer] = [_SIZE.pack(sum(map(len, body))), *body, _CHECKSUM.pack(checksum.intdigest())]
        while left:
            left = unsent(left, self._socket.sendmsg(left[:_MAX_BUFFERS]))

    def _receive_all(self) -> None:
        try:
            while True:
                (size,) = _SIZE.unpack(_receive(self._socket, _SIZE.size))
                body = _receive(self._socket, size)
                (expected,) = _CHECKSUM.unpack(_receive(self._socket, _CHECKSUM.size))
                if xxhash.xxh3_64_intdigest(body) != expected:
                    raise CorruptDataError("a frame of another trainer has a wrong checksum")
                self._owner.note_body(self._position, body)
        except Exception as error:  # any failure ends the link, and the owner learns why
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Reports the end of the connection. The receiver reports as well; the first reason counts."""
        self.abort()
        self._owner.note_lost(self._position, str(error) or type(error).__name__)


class PeerAddress(NamedTuple):
    """Where a member accepts connections."""

    host: str
    port: int
    secret: bytes
    """What a connecting trainer has to know."""


class Listener:
    """Accepts the connections of the members with higher positions.

    Args:
        host: Address of this host under which the other members reach it.
        position: Position of this member.
    """

    def __init__(self, host: str, position: int, size: int) -> None:
        self._position, self._size = position, size
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=size)
        self.address = PeerAddress(host, self._socket.getsockname()[1], secrets.token_bytes(SECRET_BYTES))

    def connect_all(self, address_of: Callable[[int], PeerAddress], deadline_s: float) -> dict[int, socket.socket]:
        """Connects this member to those with lower positions, and accepts those with higher ones.

        Args:
            address_of: Returns the address of a member. May wait for it.
            deadline_s: End of the attempt, by ``time.monotonic``.

        Returns:
            The connections by position.

        Raises:
            UnavailableError: Not all members can be connected in time.
        """
        found: dict[int, socket.socket] = {}
        try:
            for other in range(self._position):
                found[other] = connect(address_of(other), self._position, deadline_s)
            self._accept_all(found, deadline_s)
        except BaseException:
            for connected in found.values():
                connected.close()
            raise
        return found

    def _accept_all(self, found: dict[int, socket.socket], deadline_s: float) -> None:
        try:
            while len(found) < self._size - 1:
                self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
                connected, _ = self._socket.accept()
                position = self._identify(connected)
                if position is None or position in found:
                    connected.close()
                else:
                    found[position] = connected
        except OSError as error:
            missing = sorted(set(range(self._position + 1, self._size)) - found.keys())
            raise UnavailableError(f"members {missing} have not connected: {error}") from error

    def _identify(self, connected: socket.socket) -> int | None:
        """Returns the position of the member that has connected. None: it is no member."""
        try:
            connected.settimeout(_HELLO_LIMIT_S)
            magic, secret, position = _HELLO.unpack(_receive(connected, _HELLO.size))
            if magic != _MAGIC or not hmac.compare_digest(secret, self.address.secret):
                return None
            if not self._position < position < self._size:
                return None
            connected.sendall(_WELCOME)
        except OSError:
            return None
        return int(position)

    def close(self) -> None:
        """Stops accepting connections."""
        self._socket.close()


def connect(address: PeerAddress, position: int, deadline_s: float) -> socket.socket:
    """Connects this member to one with a lower position.

    Args:
        address: Address of the other member.
        deadline_s: End of the attempt, by ``time.monotonic``.

    Raises:
        UnavailableError: The member cannot be reached.
    """
    host, port, secret = address
    try:
        connected = socket.create_connection((host, port), timeout=max(0.001, deadline_s - time.monotonic()))
        try:
            connected.settimeout(max(0.001, deadline_s - time.monotonic()))
            connected.sendall(_HELLO.pack(_MAGIC, secret, position))
            _receive(connected, len(_WELCOME))
        except BaseException:
            connected.close()
            raise
    except OSError as error:
        raise UnavailableError(f"the trainer at {host}:{port} cannot be reached: {error}") from error
    return connected


def _receive(connected: socket.socket, size_bytes: int) -> memoryview:
    """Returns the next bytes of a connection, in new memory that is aligned for tensors."""
    buffer = torch.empty(max(1, size_bytes), dtype=torch.uint8)
    whole = left = memory_at(buffer.data_ptr(), size_bytes, buffer)
    while left:
        count = connected.recv_into(left)
        if not count:
            raise ConnectionResetError("the other trainer closed the connection")
        left = left[count:]
    return whole


def _parse(body: memoryview) -> _Frame:
    """Returns the frame with a body. Raises CorruptDataError if it is too short."""
    if len(body) < _HEADER.size:
        raise CorruptDataError(f"a frame of another trainer has {len(body)} bytes, expected at least {_HEADER.size}")
    header = _Header(*_HEADER.unpack_from(body))
    count = header.index_count
    start = _HEADER.size + count * np.dtype(np.int64).itemsize
    if not 0 <= count <= len(body) or start > len(body):
        raise CorruptDataError(f"a frame of another trainer names {count} parameters in {len(body)} bytes")
    return _Frame(header, tuple(np.frombuffer(body, np.int64, count, _HEADER.size).tolist()), body[start:])


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
