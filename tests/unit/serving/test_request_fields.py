"""Every field of a request that may name a file, an address or a size is known here, with what guards it.

A new string, number of bytes or port in a request makes these tests fail. Look at what the servers do with it, mend
what is open, and then add it. What trainers may send must open nothing, connect nowhere and allocate nothing by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from shardwell_server.serving.authorization import COORDINATOR_RPCS, SHARD_RPCS
from shardwell_wire.model.names import _BY_FIELD, _BY_MESSAGE_AND_FIELD
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

SERVICES = (
    (coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"], COORDINATOR_RPCS),
    (shard_pb2.DESCRIPTOR.services_by_name["ShardService"], SHARD_RPCS),
)
MEMBERS = {Role.TRAINER, Role.READER, Role.OPERATOR}
"""Roles that hold neither the cluster's key nor a server's certificate."""

PLACES = {
    "Join": {
        "checkpoint_dir": "CheckpointRoots.open, before the run is created; test_checkpoint_roots.py",
        "resume": "CheckpointRoots.open, after the token's run is checked; test_checkpoint_roots.py",
    },
    "AddResiduals": {"file_json": "FileRecord: the plain name of a file in the checkpoint's folder; read_index"},
    "Heartbeat": {
        "address": "compared with addresses of servers and shown, at most 300 characters",
        "corrupt_count": "only shown in an event",
        **dict.fromkeys(("model_bytes", "peak_gathered_bytes"), "numbers that are only shown"),
    },
    "DescribePerformance": {"logged_count": "at most the steps that are kept"},
    "ExchangeAddress": {"address": "check_name; given to trainers of the same run"},
    "RegisterServer": {"address": "from servers only", "budget_bytes": "from servers only"},
    "HeartbeatServer": dict.fromkeys(("reserved_bytes", "used_bytes", "replicated_bytes"), "from servers only"),
    "KeepServerMembership": dict.fromkeys(("port", "grpc_port"), "from servers only"),
    "OpenTransport": {"rollback_count": "compared with that of other trainers"},
    "RelayUnit": {"budget_bytes": "a lower limit than the relay's own memory budget"},
    "CopyShard": {"target_address": "from the coordinator only"},
    "PromoteShards": {"address": "from the coordinator only"},
    "BeginCheckpoint": {"url": "from the coordinator only; CheckpointRoots.open of the server, too"},
    "LoadShards": {"url": "from the coordinator only; CheckpointRoots.open of the server, too"},
    "ReplicateStep": {"path": "from servers only; shared_files.server_folder and open_in_folder"},
    "Gather": {"chunk_bytes": "chunk_streams.MAX_CHUNK_BYTES"},
    "GatherBatch": {"chunk_bytes": "chunk_streams.MAX_CHUNK_BYTES"},
    "MeasureTransport": dict.fromkeys(("size_bytes", "chunk_bytes"), "measurement_chunks: 64 MiB, MAX_CHUNK_BYTES"),
    "Peek": {"count": "MAX_PEEK_COUNT"},
    "DeclareParallelPlan": dict.fromkeys(
        ("size_bytes", "element_count", "bytes_per_step", "count", "omitted_row_count"), "numbers that are only shown"
    ),
    "DescribeWeights": {"received_bytes": "only shown"},
}
"""Fields that name a place or a size, by rpc, and what guards them. Ranges ``[start_bytes, stop_bytes)`` are checked
against the unit."""

OTHER_TEXTS = {
    "algorithm": "one of the table of optimizers",
    "cached_request_id": "compared with a request id",
    "checkpoint_id": "compared with the id of a checkpoint; a file has the coordinator's id",
    "data_position": "stored, and sent to trainers of the run only; at most 32 KiB",
    "error": "shown, at most 500 characters",
    "expected": "KeyValueStore: at most 8 MiB",
    "id": "of a device: shown, and compared with those of other trainers; at most 300 characters",
    "insecure": "shown; from servers only",
    "key": "KeyValueStore: at most 1 KiB; keys of hyper-parameters and tracked state are compared",
    "keys": "KeyValueStore: at most 1 KiB each",
    "lease_proof": "compared with a MAC",
    "nonce": "part of a MAC",
    "payload": "ChunkStream: the size of the range",
    "process": "process_identity.has_ended: a number below /proc",
    "reason": "shown, at most 300 characters",
    "refused": "compared with ids of servers",
    "rendezvous": "_torchrun_store: a name of an operator's store",
    "request_id": "RequestLog: at most 128 characters",
    "secret": "compared; from servers only",
    "client_id": "sent back to the server; from servers only",
    "shardwell_version": "not used",
    "stream": "the bytes of a part, or the name of a random stream",
    "value": "KeyValueStore: at most 8 MiB; tracked state: the message",
    **dict.fromkeys(("class_name", "first_layer", "kind", "last_layer", "model", "part", "style"), "only shown"),
    **dict.fromkeys(("advice", "finding", "severity"), "check_step_report: shown, at most 1000 printable characters"),
    **dict.fromkeys(
        ("name", "operation", "phase", "published_name", "reader_id", "schedule"), "a name that is shown or compared"
    ),
    **dict.fromkeys(("run_ids", "target_server_id"), "names of runs and servers"),
}
"""Other strings and bytes, by field, and what is done with them."""

_PLACE = re.compile(r"path|url|uri|dir|folder|file|address|host|port$|resume|bytes|size|count$|budget|limit_bytes")
_RANGE = {"start_bytes", "stop_bytes", "offset_bytes", "shard_start_bytes", "start", "stop", "step_count", "part_count"}
_NUMBERS = {getattr(FieldDescriptor, f"TYPE_{kind}") for kind in ("INT32", "INT64", "UINT32", "UINT64")}
_TEXTS = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}


def leaves(message: Descriptor, above: frozenset[str] = frozenset()) -> Iterator[FieldDescriptor]:
    for field in message.fields:
        if field.message_type is None:
            yield field
        elif field.message_type.full_name not in above:
            yield from leaves(field.message_type, above | {message.full_name})


def is_name(field: FieldDescriptor) -> bool:
    """Whether ``check_names`` checks the field: it has no slash that leads anywhere, and at most 1000 characters."""
    return (field.containing_type.name, field.name) in _BY_MESSAGE_AND_FIELD or field.name in _BY_FIELD


def test_every_place_and_size_in_a_request_has_a_guard() -> None:
    for service, rules in SERVICES:
        for method in service.methods:
            found = {
                field.name
                for field in leaves(method.input_type)
                if _PLACE.search(field.name)
                and field.name not in _RANGE | {"checkpoint_id", "world_size", "global_rank"}
                and not (is_name(field) and field.type in _TEXTS)
                and field.type in _TEXTS | _NUMBERS
            }
            assert found == PLACES.get(method.name, {}).keys(), f"{method.name}: see the top of this file"
            guards = PLACES.get(method.name, {})
            if any("only" in guard and "shown" not in guard for guard in guards.values()):
                assert not rules[method.name].roles & MEMBERS, (
                    f"{method.name}: a trainer, reader or operator can call it"
                )


def test_every_other_text_in_a_request_is_known() -> None:
    named = {name for guards in PLACES.values() for name in guards}
    for service, _ in SERVICES:
        for method in service.methods:
            for field in leaves(method.input_type):
                if field.type in _TEXTS and not is_name(field):
                    assert field.name in OTHER_TEXTS.keys() | named, f"{method.name}: {field.full_name}"


def test_the_tables_have_no_fields_that_are_gone() -> None:
    found = {field.name for service, _ in SERVICES for method in service.methods for field in leaves(method.input_type)}
    assert OTHER_TEXTS.keys() <= found
    assert {name for guards in PLACES.values() for name in guards} <= found
