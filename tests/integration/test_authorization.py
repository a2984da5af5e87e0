"""Every rpc admits the roles that need it, for their own run and in their own name, and no other caller."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import shardwell
from shardwell.transport.grpc_transport import GrpcTransport, ShardClient
from shardwell.transport.service_client import CoordinatorClient
from shardwell.transport.socket_transport import SocketTransport
from shardwell_server.serving.authorization import check_session
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.errors import AccessError, UnauthenticatedError
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import Credentials, new_key
from shardwell_wire.security.tokens import Identity, Role
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.cluster import small_run

SERVICES = [
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    shard_pb2.DESCRIPTOR.services_by_name["ShardService"],
]
METHODS = [method for service in SERVICES for method in service.methods]

COORDINATOR, SERVER, OPERATOR = "coordinator", "server", "operator"
MEMBER, TRAINER, READER = "member", "trainer", "reader"
"""Callers. A member has a token of its run from Join, a trainer one to join with."""

MEMBER_RPCS = """
    Heartbeat KeepMembership Leave DeclareUnit PublishInitialUnit DeclareParallelPlan ResetWork FinishWork
    PrepareGradients CommitStep ExchangeAddress FindRelay AddResiduals InitializeUnit OpenGradientBuffer
    CloseSharedBuffers RelayUnit ReadRelayed SkipRelay
    ReduceGradientBuffer ReduceBatch ReadPartition StagePartition OpenStagingBuffer StageStagingBuffer
"""
STORE_RPCS = "StoreSet StoreGet StoreAdd StoreCheck StoreDelete"
READER_RPCS = """
    DescribeWorld DescribeRun DescribePerformance DescribeWeights ListReaders ExplainStall WatchEvents GatherBatch
    PinVersion
    OpenTransport LocateShard DescribeShard DescribeStep Peek
"""
OPEN_RPCS = "ListRuns DescribeServer MeasureTransport"
ADMITTED = {
    "RegisterServer HeartbeatServer DeregisterServer KeepServerMembership": {SERVER},
    "ReceiveShardState ReplicateStep ConfirmBackups": {SERVER},
    """ReserveUnit ReleaseUnit PublishUnit Fence PrepareStep ConfirmPartitions PrepareUpdate Update CopyShard
    PromoteShards ReleaseShards HashShards DropRun BeginCheckpoint DescribeCheckpoint AbortCheckpoint BeginRestore
    LoadShards""": {COORDINATOR},
    "DeleteRun ForgetServer SetBackups RebalanceRun VerifyRun ListServers DescribeCluster": {OPERATOR},
    "DrainServer": {OPERATOR, SERVER},
    "Join SaveCheckpoint PublishVersion": {OPERATOR, MEMBER, TRAINER},
    MEMBER_RPCS: {MEMBER},
    STORE_RPCS: {MEMBER, OPERATOR},
    READER_RPCS: {READER, TRAINER, MEMBER, OPERATOR},
    "ListUnits Gather": {READER, TRAINER, MEMBER, OPERATOR, SERVER},  # a relay is a server
    "ListShards": {READER, TRAINER, MEMBER, OPERATOR, COORDINATOR},
    "ReduceScatter": {MEMBER, SERVER},
    OPEN_RPCS: {READER, TRAINER, MEMBER, OPERATOR, SERVER, COORDINATOR},
}
CALLERS = {name: callers for names, callers in ADMITTED.items() for name in names.split()}
"""The callers that each rpc admits."""


@dataclass
class Live:
    """A run with weights, and another one."""

    cluster: shardwell.LocalCluster
    run: str
    run_id: str
    other: str
    tokens: dict[str, str]
    """Tokens by caller."""
    of_other: dict[str, str]
    """Tokens for the other run."""
    channels: dict[str, grpc.Channel]

    def status(self, method: Any, request: Message | bytes, token: str | None) -> grpc.StatusCode:
        """Calls an rpc; returns its status, OK after the first message of an endless stream."""
        is_shard = method.containing_service.name == "ShardService"
        channel = self.channels[self.cluster.shards[0].address if is_shard else self.cluster.address]
        path = f"/{method.containing_service.full_name}/{method.name}"
        data = request if isinstance(request, bytes) else request.SerializeToString()
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            if method.client_streaming:
                channel.stream_unary(path)(iter([data]), metadata=metadata, timeout=20)
            elif method.server_streaming:
                stream = channel.unary_stream(path)(data, metadata=metadata, timeout=20)
                next(stream, None)
                stream.cancel()
            else:
                channel.unary_unary(path)(data, metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def digest(self) -> str:
        """Returns a digest of the run's weights and of what the coordinator says about both runs."""
        digest = hashlib.sha256()
        with shardwell.attach(self.cluster.address, self.run) as reader, reader.pin() as pinned:
            for name, values in sorted(pinned.values()):
                digest.update(name.encode() + values.numpy().tobytes())
        with closing(CoordinatorClient(self.cluster.address)) as client:
            for run in (self.run, self.other):
                described = client.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run))
                summary = described.summary
                members = [(each.trainer, each.epoch, each.live) for each in described.trainers]
                digest.update(f"{summary.run_id} {summary.committed_step} {members}".encode())
            listed = client.call("ListServers", coordinator_pb2.ListServersRequest())
            digest.update(str([(each.server_id, each.epoch, each.live) for each in listed.servers]).encode())
        return digest.hexdigest()


@pytest.fixture(scope="module")
def live(cluster: shardwell.LocalCluster) -> Iterator[Live]:
    run, other, key = f"run.{time.time_ns()}", f"other.{time.time_ns()}", cluster.key
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(small_run(cluster.address, name)) for name in (run, other)}
        servers = (cluster.coordinator, *cluster.shards)
        channels = {each.address: stack.enter_context(open_channel(each.address)) for each in servers}

        run_ids = {name: session._membership.identity.run_id for name, session in sessions.items()}

        def tokens(name: str) -> dict[str, str]:
            return {
                MEMBER: sessions[name]._membership.credentials.token,
                TRAINER: key.mint(Role.TRAINER, run=name, run_id=run_ids[name]),
                READER: key.mint(Role.READER, run=name, run_id=run_ids[name]),
            }

        of_cluster = {str(role): key.mint(role) for role in (Role.COORDINATOR, Role.SERVER, Role.OPERATOR)}
        yield Live(cluster, run, run_ids[run], other, {**of_cluster, **tokens(run)}, tokens(other), channels)


def request_for(method: Any, live: Live, **changes: Any) -> Message:
    """Returns a request that names the live run, its trainer and nothing else."""
    request = GetMessageClass(method.input_type)()
    fields = {"run": live.run, "run_id": live.run_id, "trainer": "tester", **changes}
    _fill(request, fields)
    return request


def _fill(message: Message, fields: dict[str, Any]) -> None:
    for name in ("header", "context", "partition", "chunk"):
        if name in message.DESCRIPTOR.fields_by_name:
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), fields)
    for name, value in fields.items():
        if name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, value)


def test_the_table_of_this_test_is_complete() -> None:
    assert CALLERS.keys() == {method.name for method in METHODS}


def test_every_rpc_refuses_callers_without_a_valid_token(live: Live) -> None:
    before, key, stranger = live.digest(), live.cluster.key, new_key()
    expired = {role: key.mint(role, lifetime_s=0) for role in (Role.COORDINATOR, Role.SERVER, Role.OPERATOR)}
    invalid = {
        "none": None,
        "key": key.secret,
        "empty": "",
        **{f"expired {role}": token for role, token in expired.items()},
        "expired member": key.mint(Role.TRAINER, run=live.run, run_id=live.run_id, member="tester", lifetime_s=-1),
        "expired reader": key.mint(Role.READER, run=live.run, run_id=live.run_id, lifetime_s=0),
        **{f"stranger's {role}": stranger.mint(role) for role in expired},
        "promoted": live.tokens[READER].replace("reader", "operator"),
    }
    for method in METHODS:
        for name, token in invalid.items():
            for request in (b"\xff", request_for(method, live)):
                found = live.status(method, request, token)
                assert found is grpc.StatusCode.UNAUTHENTICATED, (method.name, name)
    assert live.digest() == before


def test_every_rpc_admits_exactly_the_roles_that_need_it(live: Live) -> None:
    before = live.digest()
    for method in METHODS:
        for caller, token in live.tokens.items():
            found = live.status(method, b"\xff", token)
            admitted = caller in CALLERS[method.name]
            # The role is checked before the bytes are decoded, which is impossible.
            wanted = grpc.StatusCode.INVALID_ARGUMENT if admitted else grpc.StatusCode.PERMISSION_DENIED
            assert found is wanted, (method.name, caller, found)
    assert live.digest() == before


def test_token_of_another_run_is_refused(live: Live) -> None:
    before = live.digest()
    for method in METHODS:
        if method.name in OPEN_RPCS.split():
            continue
        for caller, token in live.of_other.items():
            found = live.status(method, request_for(method, live), token)
            assert found is grpc.StatusCode.PERMISSION_DENIED, (method.name, caller, found)
    assert live.digest() == before


def test_token_of_a_deleted_run_does_not_open_its_successor(live: Live) -> None:
    key = live.cluster.key
    before = live.digest()
    for caller, role, member in (
        (MEMBER, Role.TRAINER, "tester"),
        (TRAINER, Role.TRAINER, ""),
        (READER, Role.READER, ""),
    ):
        former = key.mint(role, run=live.run, run_id="f" * 16, member=member)
        for method in METHODS:
            if caller in CALLERS[method.name] and method.name not in OPEN_RPCS.split():
                for changes in ({}, {"run_id": ""}):
                    found = live.status(method, request_for(method, live, **changes), former)
                    assert found is grpc.StatusCode.PERMISSION_DENIED, (method.name, caller, changes, found)
    assert live.digest() == before
    for token, count in ((former, 0), (live.tokens[READER], 1)):
        credentials = Credentials(text=token)
        with (
            closing(CoordinatorClient(live.cluster.address, credentials)) as coordinator,
            closing(ShardClient(live.cluster.shards[0].address, credentials=credentials)) as shard,
        ):
            assert len(coordinator.call("ListRuns", coordinator_pb2.ListRunsRequest()).runs) == count
            assert len(shard.call("DescribeServer", shard_pb2.DescribeServerRequest()).runs) == count


def test_trainer_acts_in_its_own_name_only(live: Live) -> None:
    key = live.cluster.key
    rogue = key.mint(Role.TRAINER, run=live.run, run_id=live.run_id, member="rogue")
    before = live.digest()
    named = [method for method in METHODS if method.name in f"{MEMBER_RPCS} {STORE_RPCS}".split()]
    for method in named:
        if "trainer" in method.input_type.fields_by_name:
            found = live.status(method, request_for(method, live), rogue)
            assert found is grpc.StatusCode.PERMISSION_DENIED, (method.name, found)
    join = SERVICES[0].methods_by_name["Join"]
    for token in (rogue, live.tokens[TRAINER]):
        found = live.status(join, request_for(join, live, replaced_epoch=1), token)
        assert found is grpc.StatusCode.PERMISSION_DENIED, "takes the place of a trainer without its token"
    assert live.digest() == before


# Leases. Epochs are public, so each push proves that the coordinator gave the epoch to its sender.


def forged_push(live: Live) -> tuple[shard_pb2.ReduceScatterHeader, str]:
    """Returns the header of an empty gradient of rank 0, which lacks the proof only, and the address of its shard."""
    with closing(CoordinatorClient(live.cluster.address)) as client:
        described = client.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=live.run))
        units = client.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=live.run)).units
    (work,) = described.work
    assert work.item.lease_proof == b"", "a description has no secrets"
    shard = units[0].shards[0]
    step = described.summary.committed_step
    header = shard_pb2.ReduceScatterHeader(
        context=common_pb2.RequestContext(run=live.run, run_id=live.run_id, epoch=work.item.epoch, step=step),
        unit=units[0].unit,
        dp_rank=0,
        attempt=work.item.attempt,
        start_bytes=shard.start_bytes,
        stop_bytes=shard.stop_bytes,
    )
    return header, shard.address


def test_push_in_the_name_of_another_trainer_is_refused(live: Live) -> None:
    key = live.cluster.key
    rogue = Credentials(text=key.mint(Role.TRAINER, run=live.run, run_id=live.run_id, member="rogue"))
    before = live.digest()
    header, address = forged_push(live)
    epoch = header.context.epoch
    forged = {
        "none": b"",
        "random": b"\1" * 16,
        "another rank": key.lease_proof(live.run_id, 1, epoch),
        "another epoch": key.lease_proof(live.run_id, 0, epoch + 1),
        "another run": key.lease_proof("f" * 16, 0, epoch),
    }
    with (
        closing(ShardClient(address, credentials=rogue)) as client,
        closing(SocketTransport(client, RunIdentity(live.run, live.run_id), timeout_s=20.0)) as socket,
    ):
        for transport in (socket, GrpcTransport(client)):
            for name, proof in forged.items():
                header.context.lease_proof = proof
                with pytest.raises(AccessError, match="does not prove that rank 0 was leased to the sender"):
                    transport.push_stream(header, [], timeout_s=20.0)
                assert live.digest() == before, name
            header.context.lease_proof = key.lease_proof(live.run_id, 0, epoch)
            response = transport.push_stream(header, [], timeout_s=20.0)
            assert response.duplicate == (transport is not socket), "the forged pushes lacked the proof only"


def test_sum_needs_the_leases_of_all_its_ranks(live: Live) -> None:
    key = live.cluster.key
    header, address = forged_push(live)
    header.context.lease_proof = key.lease_proof(live.run_id, 0, header.context.epoch)
    for dp_rank in (0, 1):
        header.summed.add(dp_rank=dp_rank, epoch=header.context.epoch, lease_proof=header.context.lease_proof)
    with (
        closing(ShardClient(address, credentials=Credentials(text=live.tokens[MEMBER]))) as client,
        pytest.raises(AccessError, match="does not prove that rank 1 was leased to the sender"),
    ):
        GrpcTransport(client).push_stream(header, [], timeout_s=20.0)


LEASED = {"InitializeUnit", "ReadPartition", "StagePartition", "OpenStagingBuffer", "StageStagingBuffer"}


def test_initial_values_and_partitions_need_a_lease(live: Live) -> None:
    before = live.digest()
    for method in SERVICES[1].methods:
        if method.name in LEASED:
            found = live.status(method, request_for(method, live), live.tokens[MEMBER])
            assert found is grpc.StatusCode.PERMISSION_DENIED, method.name
    assert live.digest() == before


def test_session_of_a_reader_reads_only(live: Live) -> None:
    header, address = forged_push(live)
    header.context.lease_proof = live.cluster.key.lease_proof(live.run_id, 0, header.context.epoch)
    before = live.digest()
    with (
        closing(ShardClient(address, credentials=Credentials(text=live.tokens[READER]))) as client,
        closing(SocketTransport(client, RunIdentity(live.run, live.run_id), timeout_s=20.0)) as socket,
    ):
        for transport in (socket, GrpcTransport(client)):
            with pytest.raises(
                AccessError, match="ReduceScatter is for the roles server, trainer, but the token is of a reader"
            ):
                transport.push_stream(header, [], timeout_s=20.0)
    assert live.digest() == before


def test_session_ends_with_the_token_of_a_reader() -> None:
    caller = Identity(role=Role.READER, run="r", expires_s=int(time.time()) - 1)
    with pytest.raises(UnauthenticatedError, match="has expired: open another session"):
        check_session(caller, "Gather")
    check_session(dataclasses.replace(caller, expires_s=int(time.time()) + 60), "Gather")
    # The sessions of a trainer last as long as its leases.
    check_session(dataclasses.replace(caller, role=Role.TRAINER, member="tester"), "ReduceScatter")
