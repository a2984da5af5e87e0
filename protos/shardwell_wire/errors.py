"""The exceptions of Shardwell, and the table that maps them to gRPC statuses.

::

    ShardwellError
    +-- InvalidRequestError            INVALID_ARGUMENT     malformed request or impossible value
    |   +-- ChunkError                 INVALID_ARGUMENT     gap, overlap, or wrong stream size
    |   +-- WorldError                 INVALID_ARGUMENT     impossible world (also a ValueError)
    +-- NotFoundError                  NOT_FOUND            unknown run, unit, parameter or server
    |   +-- RunDeletedError            NOT_FOUND            the run was deleted
    +-- ConflictError                  FAILED_PRECONDITION  contradicts the current state
    |   +-- RunMismatchError           FAILED_PRECONDITION  same run name, another world or seed
    |   +-- UnitMismatchError          FAILED_PRECONDITION  same unit name, another layout
    |   +-- HyperparameterMismatchError  FAILED_PRECONDITION  ranks propose different hyper-parameters
    |   +-- StepStateError             FAILED_PRECONDITION  wrong phase of the step
    |   |   +-- StepRestartedError     FAILED_PRECONDITION  the step's work must be computed again
    |   +-- IncompleteStepError        FAILED_PRECONDITION  contributions are missing
    +-- NonFiniteError                 FAILED_PRECONDITION  NaN or infinity in values or gradients
    +-- DuplicateError                 ALREADY_EXISTS       request id, trainer or rank already in use
    +-- StaleEpochError                ABORTED              lease or coordinator term has ended
    +-- VersionGoneError               OUT_OF_RANGE         version overwritten by a newer one
    +-- CapacityError                  RESOURCE_EXHAUSTED   memory budget exceeded
    |   +-- TooManyRequestsError       RESOURCE_EXHAUSTED   caller or run above its share of requests
    +-- CorruptDataError               DATA_LOSS            checksum mismatch
    +-- DeadlineError                  DEADLINE_EXCEEDED    a wait took too long
    +-- UnavailableError               UNAVAILABLE          peer unreachable or not ready
    +-- AccessError                    PERMISSION_DENIED    caller is not allowed to do this
    |   +-- UnauthenticatedError       UNAUTHENTICATED      the token is missing, wrong or expired
    +-- InternalError                  INTERNAL             a defect; the server's log has details
    +-- TlsError                       (client only)        no connection: one end's TLS does not suit the other's
    +-- ReplicaLostError               (client only)        another trainer of this trainer's replica was lost
    +-- MissingTorchError              (never sent)         PyTorch is not installed (also an ImportError)
    +-- UsageError                     (client only)        a mistake in training code
        +-- FreedParameterError        (client only)        a freed parameter was used
        +-- TiedParameterError         (client only)        one parameter in two units

An exception is sent as its status, its message, and a ``google.rpc.ErrorInfo`` whose reason is the name of the class
and whose metadata is the exception's data. Both ends therefore see the same class with the same attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    "AccessError", "CapacityError", "ChunkError", "ConflictError", "CorruptDataError", "DeadlineError",
    "DuplicateError", "FreedParameterError", "HyperparameterMismatchError", "IncompleteStepError", "InternalError",
    "InvalidRequestError", "MissingTorchError", "NonFiniteError", "NotFoundError", "ReplicaLostError",
    "RunDeletedError", "RunMismatchError", "ShardwellError", "StaleEpochError", "StepRestartedError", "StepStateError",
    "TiedParameterError", "TlsError", "TooManyRequestsError", "UnauthenticatedError", "UnavailableError",
    "UnitMismatchError", "UsageError", "VersionGoneError", "WorldError",
]  # fmt: skip

DOMAIN = "shardwell"
"""``ErrorInfo.domain`` of every error of this project."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key under which gRPC tools look for a ``google.rpc.Status``."""

MAX_MESSAGE_LENGTH = 1200
MAX_FACT_LENGTH = 200
"""Maximum number of characters of a message and of a data value that are sent. gRPC may reject trailing metadata of
more than 8 KiB: the caller would get that error instead, or lose the connection."""


class ShardwellError(Exception):
    """Base of every error that Shardwell raises.

    Args:
        message: What happened, to which object, expected and actual values, and what to do.
        **data: Facts for programs, such as ``unit="blocks.0"``. Stored in ``data`` and sent as strings.
    """

    status: ClassVar[grpc.StatusCode | None] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data: dict[str, str] = {key: str(value) for key, value in data.items()}


class InvalidRequestError(ShardwellError):
    """A request is malformed or contains impossible values."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class ChunkError(InvalidRequestError):
    """A chunk stream has a gap, an overlap, or too many or too few bytes."""


class WorldError(InvalidRequestError, ValueError):
    """A world is impossible, or contradicts the number of trainers or layers."""


class NotFoundError(ShardwellError):
    """A run, unit, parameter, trainer or server does not exist."""

    status = grpc.StatusCode.NOT_FOUND


class RunDeletedError(NotFoundError):
    """The run of a request was deleted. A new run may have the same name."""


class ConflictError(ShardwellError):
    """A request contradicts the current state."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class RunMismatchError(ConflictError):
    """A run of the same name exists with another world, seed, parallel plan or number of trainers."""


class UnitMismatchError(ConflictError):
    """A unit of the same name exists with another layout."""


class HyperparameterMismatchError(ConflictError):
    """Two ranks proposed different hyper-parameters for one step."""


class StepStateError(ConflictError):
    """The request is not possible in the current phase of the step."""


class StepRestartedError(StepStateError):
    """The step's work was restarted, so that its gradients must be computed again.

    A loop over ``step.batches`` never sees this error. Any other loop runs the forward and the backward of the step
    again, then ``optimizer.step()``.
    """


class IncompleteStepError(ConflictError):
    """Contributions to the step are missing."""


class NonFiniteError(ShardwellError):
    """Values or gradients contain NaN or infinity."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class DuplicateError(ShardwellError):
    """A request id, trainer name or rank is already in use."""

    status = grpc.StatusCode.ALREADY_EXISTS


class StaleEpochError(ShardwellError):
    """A lease or a coordinator's term has ended. Its holder can no longer change anything."""

    status = grpc.StatusCode.ABORTED


class VersionGoneError(ShardwellError):
    """The requested version was overwritten by a newer one."""

    status = grpc.StatusCode.OUT_OF_RANGE


class CapacityError(ShardwellError):
    """A request exceeds a memory budget."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class TooManyRequestsError(CapacityError):
    """A caller or a run sends too many requests, or too many at once."""


class CorruptDataError(ShardwellError):
    """Received bytes do not match their checksum."""

    status = grpc.StatusCode.DATA_LOSS


class DeadlineError(ShardwellError, TimeoutError):
    """A wait took too long. The message says what was waited for."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(ShardwellError, ConnectionError):
    """A peer cannot be reached or is not ready."""

    status = grpc.StatusCode.UNAVAILABLE


class AccessError(ShardwellError):
    """The caller is not allowed to do this."""

    status = grpc.StatusCode.PERMISSION_DENIED


class UnauthenticatedError(AccessError):
    """The caller did not send a valid token."""

    status = grpc.StatusCode.UNAUTHENTICATED


class InternalError(ShardwellError):
    """A defect in Shardwell. The log of the peer has details."""

    status = grpc.StatusCode.INTERNAL


class TlsError(ShardwellError):
    """No connection is possible, because the TLS of one end does not suit the other. Never sent.

    For example, a certificate has expired, an authority is not trusted, or only one end uses TLS.
    """

    status = None


class ReplicaLostError(ShardwellError, RuntimeError):
    """Another trainer of this trainer's replica was lost while they computed together. Never sent.

    The work item is computed by another replica, or again by this one when its place is taken.
    """

    status = None


class MissingTorchError(ShardwellError, ModuleNotFoundError):
    """PyTorch is not installed. Coordinators and the commands that inspect a cluster do without it."""

    status = None


class UsageError(ShardwellError, RuntimeError):
    """A mistake in training code. Raised on the client only, never sent."""

    status = None


class FreedParameterError(UsageError):
    """A parameter was used while its unit was freed."""


class TiedParameterError(UsageError, ValueError):
    """A parameter belongs to two units."""


def _subclasses(root: type[ShardwellError]) -> list[type[ShardwellError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


BY_REASON: dict[str, type[ShardwellError]] = {cls.__name__: cls for cls in _subclasses(ShardwellError) if cls.status}
"""Every error that can be sent, by its reason in ``ErrorInfo``."""

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
"""Error class of a status without a reason, which comes from gRPC itself or from another program."""

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def wire_message(error: ShardwellError) -> str:
    """Returns the message that is sent. The middle of an overlong message is omitted."""
    return _shortened(str(error), MAX_MESSAGE_LENGTH)


def _shortened(text: str, length: int) -> str:
    gap = " [...] "
    kept = (length - len(gap)) // 2
    return text if len(text) <= length else text[:kept] + gap + text[-kept:]


def to_status_details(error: ShardwellError) -> bytes:
    """Serializes an error as a ``google.rpc.Status``, which gRPC tools print."""
    facts = {key: _shortened(value, MAX_FACT_LENGTH) for key, value in error.data.items()}
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=facts)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = (error.status or grpc.StatusCode.INTERNAL).value[0]
    status = status_pb2.Status(code=code, message=wire_message(error), details=[detail])
    serialized: bytes = status.SerializeToString()
    return serialized


def from_status_details(serialized: bytes, peer: str) -> ShardwellError:
    """Returns the exception that ``to_status_details`` serialized.

    Args:
        serialized: A ``google.rpc.Status``.
        peer: Name of the sender, for errors of other programs.
    """
    status = status_pb2.Status.FromString(serialized)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _named(status, status.message) or _unnamed(code, status.message, peer)


def import_with_torch(name: str) -> ModuleType:
    """Imports a module that may need torch.

    Raises:
        MissingTorchError: The module needs torch, which is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingTorchError(
            f"{name} needs PyTorch, which is not installed: install the build for this machine, or run "
            "pip install 'shardwell[train]'"
        ) from None


def import_on_use(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` of a package that imports its public names when they are first used.

    Args:
        package: Name of the package. Its ``__all__`` is what ``dir`` lists.
        names: Public names, with spaces between, by the module that has them. A module may be a name by itself.
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}

    def get(name: str) -> Any:
        if name not in modules:
            # Python finds a similar name in `dir` of the package, and asks whether it was meant.
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = import_with_torch(modules[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)


def from_rpc_error(error: grpc.RpcError, peer: str) -> ShardwellError:
    """Returns the exception that a peer raised.

    Args:
        error: The error from grpc, which is also a ``grpc.Call``.
        peer: Name of the peer, for errors from gRPC itself.
    """
    message: str = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and (named := _named(status_pb2.Status.FromString(value), message)):
            return named
    return _unnamed(error.code(), message, peer)


def _named(status: status_pb2.Status, message: str) -> ShardwellError | None:
    """Returns an exception of the class in the details; None if they have no such class."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in BY_REASON:
            return BY_REASON[info.reason](message, **dict(info.metadata))
    return None


def _unnamed(code: grpc.StatusCode, message: str, peer: str) -> ShardwellError:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message = "the server does not implement this rpc: check that the address belongs to the right kind of server"
    return BY_STATUS.get(code, InternalError)(f"{peer}: {message or code.name}", peer=peer)
