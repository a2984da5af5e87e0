"""Shows gradients to the other trainers of a reduction group, over TCP connections between them.

A connection starts with a hello: magic bytes, the secret of the accepting trainer and the position of the connecting
one. The accepting trainer answers with one byte. Then both sides send frames: kind (1 byte), size of the body (8 bytes,
little-endian), body, XXH3-64 of the body (8 bytes). The body of a frame is defined in ``peer_exchange.py``.

Note: [Frames between trainers]
    In every round, each member sends one frame to each other member: which gradient it shows, and the parts of the
    shards that the receiver adds. The rounds of a version are numbered in the order in which the members push units. A
    round takes place if all members have sent a frame for the same unit. A member that takes no part in further rounds
    of a version says so, with the number of the rounds in which it did. No sum of a later round can exist then, and
    every member pushes its own gradient. A member thus waits for slow members as long as they live, and no clock
    decides what is added.

    A frame is sent when its gradient is pushed, while earlier rounds may still wait for other members. A member can be
    ahead of the others by ``push_bytes`` at most: its pushes wait until their rounds have taken place. This also limits
    the memory for frames that arrive early.

    It is unknown whether a lost member has sent its last frames to all others. The attempts of all members are then
    void. See Note: [Sums among trainers] in ``gradient_sums.py``.
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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import xxhash

from shardwell.data_plane.shard import RemoteUnit
from shardwell.peers.gradient_sums import Shown, WholeGradient, adder_of
from shardwell.peers.node_group import MemberGoneError, Round
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import set_options
from shardwell_wire.encoding.chunk_streams import Buffer, memory_at
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.errors import CorruptDataError, UnavailableError
from shardwell_wire.model.layout import Segment
from shardwell_wire.security.tokens import PROOF_BYTES

SECRET_BYTES = 16
_MAGIC, _WELCOME = b"shrdpeer", b"\x01"
_HELLO = struct.Struct(f"<8s{SECRET_BYTES}sI")
_HEAD, _CHECKSUM = struct.Struct("<BQ"), struct.Struct("<Q")
_HELLO_LIMIT_S = 1.0
"""How long the accepting trainer waits for a hello. Others may connect to its port, too."""
_FLUSH_LIMIT_S = 5.0
_MAX_BUFFERS = 1024
"""Limit of Linux for one call of sendmsg."""

Body = Callable[[], Sequence[memoryview | bytes]]
"""Returns the body of a frame. Called by the thread that sends it, and may wait for the body."""


class Listener:
    """Accepts the connections of the members with higher positions.

    Args:
        host: Address of this host under which the other members reach it.
        position: Position of this member.
        size: Number of members.
    """

    def __init__(self, host: str, position: int, size: int) -> None:
        self._position, self._size = position, size
        self.secret = secrets.token_bytes(SECRET_BYTES)
        """What a connecting trainer has to know."""
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=size)
        self.port: int = self._socket.getsockname()[1]
        """The port."""

    def accept_all(self, deadline_s: float) -> dict[int, socket.socket]:
        """Returns the connections of all members with a higher position.

        Args:
            deadline_s: End of the wait, by ``time.monotonic``.

        Raises:
            UnavailableError: Not all of them have connected in time.
        """
        found: dict[int, socket.socket] = {}
        try:
            while len(found) < self._size - self._position - 1:
                self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
                connected, _ = self._socket.accept()
                position = self._identify(connected)
                if position is None or position in found:
                    connected.close()
                else:
                    found[position] = connected
        except OSError as error:
            for connected in found.values():
                connected.close()
            missing = sorted(set(range(self._position + 1, self._size)) - found.keys())
            raise UnavailableError(f"members {missing} have not connected: {error}") from error
        return found

    def _identify(self, connected: socket.socket) -> int | None:
        """Returns the position of the member that has connected. None: it is no member."""
        try:
            connected.settimeout(_HELLO_LIMIT_S)
            magic, secret, position = _HELLO.unpack(_receive_exactly(connected, _HELLO.size))
            if magic != _MAGIC or not hmac.compare_digest(secret, self.secret):
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


def connect(host: str, port: int, secret: bytes, position: int, deadline_s: float) -> socket.socket:
    """Connects this member to one with a lower position.

    Args:
        host: Host of the other member.
        port: Its port.
        secret: Its secret.
        position: Position of this member.
        deadline_s: End of the attempt, by ``time.monotonic``.

    Raises:
        UnavailableError: The member cannot be reached.
    """
    try:
        connected = socket.create_connection((host, port), timeout=max(0.001, deadline_s - time.monotonic()))
        try:
            connected.settimeout(max(0.001, deadline_s - time.monotonic()))
            connected.sendall(_HELLO.pack(_MAGIC, secret, position))
            _receive_exactly(connected, len(_WELCOME))
        except BaseException:
            connected.close()
            raise
    except OSError as error:
        raise UnavailableError(f"the trainer at {host}:{port} cannot be reached: {error}") from error
    return connected


class PeerLink:
    """The connection to one member. Sends and receives in threads of its own. Thread-safe.

    Args:
        connected: The connection.
        position: Position of the other member.
        owner: Receives the frames.
    """

    def __init__(self, connected: socket.socket, position: int, owner: PeerExchange) -> None:
        self._socket, self._position, self._owner = connected, position, owner
        self._frames: queue.SimpleQueue[tuple[int, Body, Callable[[], None]] | None] = queue.SimpleQueue()
        self._broken = threading.Event()
        connected.settimeout(None)
        set_options(connected)
        self._sender = threading.Thread(target=self._send_all, name="shardwell-peer-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name="shardwell-peer-receive", daemon=True)
        self._sender.start()
        self._receiver.start()

    def send(self, kind: int, body: Body, done: Callable[[], None] = lambda: None) -> None:
        """Starts to send a frame after those before. Does not wait.

        Args:
            kind: Kind of the frame.
            body: Returns the body.
            done: Called once when the frame is sent or dropped, because the connection has ended.
        """
        self._frames.put((kind, body, done))

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
            kind, body, done = frame
            try:
                if not self._broken.is_set():
                    self._send(kind, body())
            except Exception as error:  # as in `_receive_all`
                self._end(error)
            finally:
                del frame, body
                done()

    def _send(self, kind: int, body: Sequence[memoryview | bytes]) -> None:
        checksum = xxhash.xxh3_64()
        for piece in body:
            checksum.update(piece)
        size = sum(map(len, body))
        left: Sequence[Buffer] = [
            _HEAD.pack(kind, size),
            *body,
            _CHECKSUM.pack(checksum.intdigest()),
        ]
        while left:
            left = socket_frames.unsent(left, self._socket.sendmsg(left[:_MAX_BUFFERS]))

    def _receive_all(self) -> None:
        try:
            while True:
                kind, size = _HEAD.unpack(_receive_exactly(self._socket, _HEAD.size))
                body = memory_of(size)
                _receive_into(self._socket, body)
                (expected,) = _CHECKSUM.unpack(_receive_exactly(self._socket, _CHECKSUM.size))
                if xxhash.xxh3_64_intdigest(body) != expected:
                    raise CorruptDataError("a frame of another trainer has a wrong checksum")
                self._owner.note_frame(self._position, kind, body)
        except Exception as error:  # any failure ends the link, and the owner learns why
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Reports the end of the connection. The receiver reports as well; the first reason counts."""
        self.abort()
        self._owner.note_lost(self._position, str(error) or type(error).__name__)


def memory_of(size_bytes: int) -> memoryview:
    """Returns new memory, aligned for tensors."""
    buffer = torch.empty(max(1, size_bytes), dtype=torch.uint8)
    return memory_at(buffer.data_ptr(), size_bytes, buffer)


def _receive_exactly(connected: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    _receive_into(connected, memoryview(data))
    return bytes(data)


def _receive_into(connected: socket.socket, target: memoryview) -> None:
    while target:
        count = connected.recv_into(target)
        if not count:
            raise ConnectionResetError("the other trainer closed the connection")
        target = target[count:]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


logger = logging.getLogger(__name__)

GRADIENT, END = 1, 2
"""Kinds of frames: a gradient in a round, and the end of a version."""
_GRADIENT = struct.Struct(f"<7q{PROOF_BYTES}s")
"""Version, round, unit, epoch, attempt, cuts, number of parameters, proof of the lease. The indices of the parameters
and the segments follow, each aligned to 8 bytes."""
_END = struct.Struct("<2q")
"""Version, and number of the rounds in which the member took part. The rounds before are complete."""
_ALIGNMENT = 8
_FOR_GOOD = 1 << 62
"""Version that is ended by a member that leaves the group for good."""
_CHECK_INTERVAL_S = 1.0
_MAX_FAILURES = 3
"""Consecutive versions in which the members did not agree, after which the group is disabled."""


@dataclass(frozen=True, slots=True)
class _Received:
    """The parts of another member's gradient that this trainer adds. A ``Shown``."""

    unit: int
    epoch: int
    lease_proof: bytes
    attempt: int
    cuts: int
    indices: tuple[int, ...]
    content: memoryview
    """The segments, each aligned to 8 bytes."""
    parts: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Segments by parameter and first element, after ``place``."""

    def part(self, segment: Segment) -> torch.Tensor | None:
        return self.parts.get((segment.parameter_index, segment.start_element))

    def place(self, unit: RemoteUnit, numbers: Sequence[int]) -> None:
        """Finds the segments of this trainer's shards in the content.

        Raises:
            CorruptDataError: The content has another size.
        """
        start = 0
        segments = [segment for number in numbers for segment in unit.shards[number].segments_of(self.indices)]
        expected = sum(_aligned(segment.size_bytes) for segment in segments)
        if expected != len(self.content):
            raise CorruptDataError(
                f"the gradient of {unit.layout.unit} of another trainer has {len(self.content)} bytes, "
                f"expected {expected}"
            )
        for segment in segments:
            dtype = getattr(torch, unit.layout.parameters[segment.parameter_index].dtype)
            flat = bytes_tensor(self.content[start : start + segment.size_bytes]).view(dtype)
            self.parts[segment.parameter_index, segment.start_element] = flat
            start += _aligned(segment.size_bytes)


class PeerExchange:
    """An ``Exchange`` over TCP. See Note: [Frames between trainers].

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
        self._frames = defaultdict[Round, dict[int, _Received]](dict)
        self._ends = defaultdict[int, dict[int, int]](dict)
        """Number of rounds in which other members took part, by version and position, if they have ended it."""
        self._lost = self._left = self._stopped = False
        self._why_lost = ""
        self._version, self._count = -1, 0
        """The last version in which this member took part, and the number of its rounds."""
        self._ended_version = -1
        self._failed_version, self._num_failures = -1, 0
        self._links = {other: PeerLink(sock, other, self) for other, sock in sorted(connected.items())}

    @property
    def active(self) -> bool:
        """See ``Exchange``."""
        return not self._left

    # ---- the training thread ----

    def start_round(self, version: int) -> Round | None:
        """See ``Exchange``."""
        with self._changed:
            if self._version != version:
                self._start_version(version)
            if self._lost or self._ends.get(_FOR_GOOD):
                self._leave(self._why_lost or "another member pushes its own gradients from now on")
            if self._left or self._ended_version == version:
                return None
            return Round(version, self._count)

    def offer(
        self,
        this_round: Round,
        unit: RemoteUnit,
        own: WholeGradient,
        copied: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        """See ``Exchange``."""
        with self._changed:
            if self._left or self._ended_version == this_round.version:
                sent()
                return
            self._count += 1
            done = _Countdown(len(self._links), sent)
            for other, link in self._links.items():
                link.send(GRADIENT, partial(self._body, this_round, unit, own, copied, other), done)

    def skip(self, version: int) -> None:
        """See ``Exchange``. Frames that were offered are still sent, and their rounds take place."""
        self.finish_version(version)

    def finish_version(self, version: int) -> None:
        """See ``Exchange``."""
        with self._changed:
            if self._version != version:
                self._start_version(version)
            if not self._left and self._ended_version != version:
                self._ended_version = version
                self._send_end(version, self._count)
            self._changed.notify_all()

    def _start_version(self, version: int) -> None:
        self._version, self._count = version, 0
        for old in [at for at in self._frames if at.version < version]:
            del self._frames[old]
        for former in [at for at in self._ends if at < version]:
            del self._ends[former]

    def _send_end(self, version: int, count: int) -> None:
        for link in self._links.values():
            link.send(END, lambda: [_END.pack(version, count)])

    def _body(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, copied: Callable[[], None], other: int
    ) -> list[memoryview | bytes]:
        """Returns the body of a frame for one member. Called by the thread that sends it."""
        copied()
        indices = np.array(own.indices, np.int64)
        numbers = (this_round.version, this_round.number, unit.index, own.epoch, own.attempt, own.cuts, len(indices))
        head = _GRADIENT.pack(*numbers, own.lease_proof)
        body: list[memoryview | bytes] = [head + indices.tobytes()]
        for number in self._shards_of(unit, other):
            for segment in unit.shards[number].segments_of(own.indices):
                part = own.part(segment)
                assert part is not None
                body.append(memory_at(part.data_ptr(), part.nbytes, part))
                if rest := _aligned(part.nbytes) - part.nbytes:
                    body.append(bytes(rest))
        return body

    def _shards_of(self, unit: RemoteUnit, position: int) -> list[int]:
        """Returns the numbers of the shards that a member adds."""
        return [number for number in range(len(unit.shards)) if adder_of(unit, number, self._size) == position]

    # ---- the thread that adds ----

    def collect(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, is_over: Callable[[], bool]
    ) -> Sequence[Shown] | None:
        """See ``Exchange``."""
        received = self._await_frames(this_round, is_over)
        if received is None:
            return None
        if any((one.unit, one.cuts) != (unit.index, own.cuts) for one in received.values()):
            self._note_failure(this_round.version, "its trainers pushed different units")
            return None
        numbers = self._shards_of(unit, self._position)
        for one in received.values():
            one.place(unit, numbers)
        everyone: dict[int, Shown] = {**received, self._position: own}
        return [everyone[position] for position in range(self._size)]

    def _await_frames(self, this_round: Round, is_over: Callable[[], bool]) -> dict[int, _Received] | None:
        """Waits for the frames of all other members. None: the round does not take place."""
        deadline = time.monotonic() + self._wait_limit_s
        while True:
            with self._changed:
                found = self._frames.get(this_round, {})
                missing = [other for other in self._links if other not in found]
                if not missing:
                    return found
                if self._stopped or is_over() or not self._was_offered(this_round):
                    return None
                if ended := [other for other in missing if self._has_ended(other, this_round)]:
                    self._note_failure(this_round.version, f"member {ended[0]} of {self._size} takes no part")
                    return None
                if self._lost:
                    raise MemberGoneError(self._why_lost)
                if self._changed.wait(_CHECK_INTERVAL_S):
                    continue
            if why := self._find_lost():
                raise MemberGoneError(why)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"members {missing} of {self._size} have not pushed their gradients within {self._wait_limit_s:g} s"
                )

    def _was_offered(self, this_round: Round) -> bool:
        return this_round.version == self._version and this_round.number < self._count

    def _has_ended(self, other: int, this_round: Round) -> bool:
        """True if a member takes no part in a round. Frames of a member arrive in the order of its rounds."""
        rounds = self._ends.get(this_round.version, {}).get(other)
        return other in self._ends.get(_FOR_GOOD, {}) or (rounds is not None and rounds <= this_round.number)

    def _note_failure(self, version: int, why: str) -> None:
        """Records that a round did not take place. Leaves after ``_MAX_FAILURES`` versions in a row."""
        with self._changed:
            if self._failed_version == version:
                return
            self._num_failures = self._num_failures + 1 if self._failed_version == version - 1 else 1
            self._failed_version = version
            if self._ends.get(_FOR_GOOD) or self._num_failures >= _MAX_FAILURES:
                self._leave(f"in {self._num_failures} consecutive steps, not all gradients were added: {why}")
            else:
                logger.info("gradients of step %d are not added among the trainers: %s", version, why)

    def end_round(self, this_round: Round) -> None:
        """See ``Exchange``."""
        with self._changed:
            self._frames.pop(this_round, None)

    # ---- any thread ----

    def note_frame(self, position: int, kind: int, body: memoryview) -> None:
        """Called by a link's thread for each frame of a member, in the order in which it was sent."""
        with self._changed:
            if kind == END:
                version, count = _END.unpack(body)
                self._ends[version][position] = count
            elif kind == GRADIENT:
                version, number, received = _parse(body)
                at = Round(version, number)
                if version >= self._version and (not self._left or self._was_offered(at)):
                    self._frames[at][position] = received
            else:
                raise CorruptDataError(f"a frame of another trainer has the unknown kind {kind}")
            self._changed.notify_all()

    def note_lost(self, position: int, why: str) -> None:
        """Called by a link's thread, once, when the connection to a member has ended."""
        with self._changed:
            if not self._lost:
                self._lost, self._why_lost = True, f"member {position} of {self._size} is gone: {why}"
            self._changed.notify_all()

    def leave(self, reason: BaseException | str) -> None:
        """See ``Exchange``."""
        with self._changed:
            self._leave(reason)

    def _leave(self, reason: BaseException | str) -> None:
        if not self._left:
            why = str(reason).partition("\n")[0] or type(reason).__name__
            logger.warning("gradient group: this trainer pushes its own gradients from now on: %s", why)
            self._end_for_good()

    def _end_for_good(self) -> None:
        if not self._left:
            self._left = True
            if self._ended_version != self._version:
                self._send_end(self._version, self._count)
            self._send_end(_FOR_GOOD, 0)
            self._changed.notify_all()

    def stop(self) -> None:
        """See ``Exchange``."""
        with self._changed:
            self._stopped = True
            self._end_for_good()

    def close(self) -> None:
        """See ``Exchange``."""
        for link in self._links.values():
            link.close()


def _parse(body: memoryview) -> tuple[int, int, _Received]:
    """Returns version, round and content of a GRADIENT frame. Raises CorruptDataError if the frame is too short."""
    if len(body) < _GRADIENT.size:
        raise CorruptDataError(f"a frame of another trainer has {len(body)} bytes, expected at least {_GRADIENT.size}")
    version, number, unit, epoch, attempt, cuts, count, proof = _GRADIENT.unpack_from(body)
    start = _GRADIENT.size + count * np.dtype(np.int64).itemsize
    if not 0 <= count <= len(body) or start > len(body):
        raise CorruptDataError(f"a frame of another trainer names {count} parameters in {len(body)} bytes")
    indices = tuple(np.frombuffer(body, np.int64, count, _GRADIENT.size).tolist())
    return version, number, _Received(unit, epoch, proof, attempt, cuts, indices, body[start:])


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


class _Countdown:
    """Calls an action when it is called for the last time of a number of times. Thread-safe."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._lock, self._missing, self._action = threading.Lock(), count, action

    def __call__(self) -> None:
        with self._lock:
            self._missing -= 1
            is_last = not self._missing
        if is_last:
            self._action()
