"""Errors keep their class over the wire, and every status maps to an error."""

import grpc
import pytest
from google.rpc import status_pb2

from shardwell_wire import errors


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        super().__init__()
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata


@pytest.mark.parametrize("cls", errors.BY_REASON.values(), ids=lambda cls: cls.__name__)
def test_error_keeps_class_message_and_data_over_the_wire(cls: type[errors.ShardwellError]) -> None:
    sent = cls("unit 'a' is missing", unit="a", step=3)
    assert cls.status is not None
    metadata = ((errors.STATUS_DETAILS_KEY, errors.to_status_details(sent)),)
    received = errors.from_rpc_error(FakeRpcError(cls.status, str(sent), metadata), "peer")
    assert type(received) is cls
    assert str(received) == str(sent)
    assert received.data == {"unit": "a", "step": "3"}


def test_overlong_error_keeps_start_end_and_class() -> None:
    ranks = ",".join(map(str, range(4096)))
    sent = errors.NonFiniteError(f"the gradient of ranks {ranks} has NaN: skip the step", dp_ranks=ranks, unit="a")
    received = errors.from_status_details(errors.to_status_details(sent), "peer")
    assert type(received) is errors.NonFiniteError
    assert str(received) == errors.wire_message(sent)
    assert len(str(received)) <= errors.MAX_MESSAGE_LENGTH
    assert str(received).startswith("the gradient of ranks 0,1,") and str(received).endswith("NaN: skip the step")
    assert received.data["unit"] == "a" and len(received.data["dp_ranks"]) <= errors.MAX_FACT_LENGTH


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_without_reason_maps_to_an_error(code: grpc.StatusCode) -> None:
    received = errors.from_rpc_error(FakeRpcError(code, "from grpc itself"), "ShardService at host:1")
    assert type(received) is errors.BY_STATUS[code]
    assert "ShardService at host:1" in str(received)


def test_docstring_draws_the_actual_tree() -> None:
    def lines(cls: type[errors.ShardwellError]) -> list[str]:
        return [cls.__name__, *(line for child in cls.__subclasses__() for line in lines(child))]

    documented = [word for word in (errors.__doc__ or "").split() if word.endswith("Error")]
    assert sorted(documented) == sorted(lines(errors.ShardwellError))


def test_errors_are_builtin_exceptions_where_python_has_them() -> None:
    assert issubclass(errors.WorldError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.UnavailableError, ConnectionError)


@pytest.mark.parametrize("cls", errors.BY_REASON.values(), ids=lambda cls: cls.__name__)
def test_error_round_trips_through_serialized_status(cls: type[errors.ShardwellError]) -> None:
    received = errors.from_status_details(errors.to_status_details(cls("unit 'a' is missing", unit="a")), "peer")
    assert (type(received), str(received), received.data) == (cls, "unit 'a' is missing", {"unit": "a"})


@pytest.mark.parametrize(("code", "cls"), [(5, errors.NotFoundError), (99, errors.InternalError)])
def test_status_of_another_program_maps_by_its_code(code: int, cls: type[errors.ShardwellError]) -> None:
    received = errors.from_status_details(status_pb2.Status(code=code, message="no").SerializeToString(), "peer")
    assert (type(received), str(received)) == (cls, "peer: no")
