"""The exception tree and the one table between exceptions and gRPC statuses.

::

    ShardwellError
    +-- InvalidRequestError            INVALID_ARGUMENT     malformed, wrong shape, dtype or range
    |   +-- ChunkError                 INVALID_ARGUMENT     gap, overlap, excess or short stream
    |   +-- WorldError                 INVALID_ARGUMENT     a world that does not fit (a ValueError)
    +-- NotFoundError                  NOT_FOUND            unknown run, unit, parameter, ...
    |   +-- RunDeletedError            NOT_FOUND            the run was deleted; its name may be another's
    +-- ConflictError                  FAILED_PRECONDITION  contradicts what the run already is
    |   +-- RunMismatchError           FAILED_PRECONDITION  same run name, another world or seed
    |   +-- UnitMismatchError          FAILED_PRECONDITION  same unit name, another layout
    |   +-- HyperparameterMismatchError  FAILED_PRECONDITION  ranks disagree
    |   +-- StepStateError             FAILED_PRECONDITION  not in this phase of the step
    |   +-- IncompleteStepError        FAILED_PRECONDITION  contributions are missing
    +-- NonFiniteError                 FAILED_PRECONDITION  NaN or infinity in values or gradients
    +-- DuplicateError                 ALREADY_EXISTS       request id, trainer or rank taken
    +-- StaleEpochError                ABORTED              lease or term is over
    +-- VersionGoneError               OUT_OF_RANGE         overwritten by a newer version
    +-- CapacityError                  RESOURCE_EXHAUSTED   does not fit the memory budget
    +-- CorruptDataError               DATA_LOSS            checksum mismatch
    +-- DeadlineError                  DEADLINE_EXCEEDED    waited too long; names for what
    +-- UnavailableError               UNAVAILABLE          peer is gone or not there yet
    +-- AccessError                    PERMISSION_DENIED    not allowed
    |   +-- UnauthenticatedError       UNAUTHENTICATED      the cluster's token is missing or wrong
    +-- InternalError                  INTERNAL             a defect; details in the server's log
    +-- UsageError                     (client only)        a mistake in training code
        +-- FreedParameterError        (client only)        a parameter used while it is freed
        +-- TiedParameterError         (client only)        one parameter in two units

An exception crosses the wire as its status, its message, and a ``google.rpc.ErrorInfo`` whose
reason is the class name and whose metadata are the exception's data, so both ends see the same
class with the same attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "shardwell"
"""``ErrorInfo.domain`` of every error of this project."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key under which gRPC tools look for a ``google.rpc.Status``."""

MAX_MESSAGE_LENGTH = 1200
MAX_FACT_LENGTH = 200
"""Characters of a message, and of each of an error's data, that cross the wire. gRPC may refuse trailing metadata of
more than 8 KiB: the caller would learn that instead, and a connection over which far more came would be closed."""


class ShardwellError(Exception):
    """Base of every error that Shardwell raises.

    Args:
        message: What happened, to which thing, expected and got, and what to do about it.
        **data: Facts for programs, such as ``unit="blocks.0"``; kept in ``data``, crossing the
            wire as strings.
    """

    status: ClassVar[grpc.StatusCode | None] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data: dict[str, str] = {key: str(value) for key, value in data.items()}


class InvalidRequestError(ShardwellError):
    """A request is malformed or names impossible values."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class ChunkError(InvalidRequestError):
    """A chunk stream has a gap, an overlap, too many or too few bytes."""


class WorldError(InvalidRequestError, ValueError):
    """A world is impossible or does not fit the trainers or the layers."""


class NotFoundError(ShardwellError):
    """A run, unit, parameter, trainer or server is not known."""

    status = grpc.StatusCode.NOT_FOUND


class RunDeletedError(NotFoundError):
    """The run that a request names was deleted; another run may have its name now."""


class ConflictError(ShardwellError):
    """A request contradicts what is already settled."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class RunMismatchError(ConflictError):
    """A run of that name exists with another world, seed or number of trainers."""


class UnitMismatchError(ConflictError):
    """A unit of that name exists with another layout."""


class HyperparameterMismatchError(ConflictError):
    """Two ranks handed in different hyper-parameters for one step."""


class StepStateError(ConflictError):
    """The step is in a phase in which the request makes no sense."""


class IncompleteStepError(ConflictError):
    """Contributions that the step needs are missing."""


class NonFiniteError(ShardwellError):
    """Values or gradients contain NaN or infinity."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class DuplicateError(ShardwellError):
    """A request id, trainer name or rank is taken by something else."""

    status = grpc.StatusCode.ALREADY_EXISTS


class StaleEpochError(ShardwellError):
    """A lease or a coordinator's term is over; its holder may change nothing any more."""

    status = grpc.StatusCode.ABORTED


class VersionGoneError(ShardwellError):
    """The version asked for has been overwritten by a newer one."""

    status = grpc.StatusCode.OUT_OF_RANGE


class CapacityError(ShardwellError):
    """A request does not fit a memory budget."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class CorruptDataError(ShardwellError):
    """Bytes arrived that do not match their checksum."""

    status = grpc.StatusCode.DATA_LOSS


class DeadlineError(ShardwellError, TimeoutError):
    """A wait took too long; the message names what was waited for."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(ShardwellError, ConnectionError):
    """A peer cannot be reached or is not ready."""

    status = grpc.StatusCode.UNAVAILABLE


class AccessError(ShardwellError):
    """The caller may not do this."""

    status = grpc.StatusCode.PERMISSION_DENIED


class UnauthenticatedError(AccessError):
    """The caller did not show the cluster's token."""

    status = grpc.StatusCode.UNAUTHENTICATED


class InternalError(ShardwellError):
    """A defect in Shardwell; the peer's log has the details."""

    status = grpc.StatusCode.INTERNAL


class UsageError(ShardwellError, RuntimeError):
    """A mistake in training code; never crosses the wire."""

    status = None


class FreedParameterError(UsageError):
    """A parameter was used while its unit is freed."""


class TiedParameterError(UsageError, ValueError):
    """One parameter was put into two units."""


def _subclasses(root: type[ShardwellError]) -> list[type[ShardwellError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


BY_REASON: dict[str, type[ShardwellError]] = {cls.__name__: cls for cls in _subclasses(ShardwellError) if cls.status}
"""Every error that crosses the wire, by the reason it crosses under."""

BY_STATUS: dict[grpc.StatusCode, type[ShardwellError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: ConflictError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateError,
    grpc.StatusCode.ABORTED: StaleEpochError,
    grpc.StatusCode.OUT_OF_RANGE: VersionGoneError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.DATA_LOSS: CorruptDataError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequestError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}
"""What a status without a reason means: it came from gRPC itself or from another program."""

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def wire_message(error: ShardwellError) -> str:
    """What peers are told; an overlong message, as of what names very many ranks, has lost its middle."""
    return _shortened(str(error), MAX_MESSAGE_LENGTH)


def _shortened(text: str, length: int) -> str:
    gap = " [...] "
    kept = (length - len(gap)) // 2
    return text if len(text) <= length else text[:kept] + gap + text[-kept:]


def to_status_details(error: ShardwellError) -> bytes:
    """Serialises an error as the ``google.rpc.Status`` that gRPC tools print."""
    facts = {key: _shortened(value, MAX_FACT_LENGTH) for key, value in error.data.items()}
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=facts)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = (error.status or grpc.StatusCode.INTERNAL).value[0]
    status = status_pb2.Status(code=code, message=wire_message(error), details=[detail])
    serialized: bytes = status.SerializeToString()
    return serialized


def from_status_details(serialized: bytes, peer: str) -> ShardwellError:
    """Rebuilds the exception that ``to_status_details`` serialised.

    Args:
        serialized: A ``google.rpc.Status``.
        peer: Who sent it, for errors that another program made.
    """
    status = status_pb2.Status.FromString(serialized)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _named(status, status.message) or _unnamed(code, status.message, peer)


def from_rpc_error(error: grpc.RpcError, peer: str) -> ShardwellError:
    """Rebuilds the exception that a peer raised.

    Args:
        error: What grpc raised on the client; it is also a ``grpc.Call``.
        peer: Who was called, for errors that come from gRPC itself.
    """
    message: str = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and (named := _named(status_pb2.Status.FromString(value), message)):
            return named
    return _unnamed(error.code(), message, peer)


def _named(status: status_pb2.Status, message: str) -> ShardwellError | None:
    """The exception whose class the details name."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in BY_REASON:
            return BY_REASON[info.reason](message, **dict(info.metadata))
    return None


def _unnamed(code: grpc.StatusCode, message: str, peer: str) -> ShardwellError:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message = "what listens there does not serve this: is it the address of another server?"
    return BY_STATUS.get(code, InternalError)(f"{peer}: {message or code.name}", peer=peer)
