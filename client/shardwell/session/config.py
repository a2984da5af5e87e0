"""What ``join`` is told, by arguments or by a launcher's environment."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwell.data_plane.node_group import BACKENDS
from shardwell.module.strategy import BackwardPrefetch
from shardwell.session.torchrun import TorchrunPlace
from shardwell.transport.base import KINDS, parse_kinds
from shardwell_wire import codec
from shardwell_wire.errors import InvalidRequestError, UsageError, WorldError
from shardwell_wire.names import check_name
from shardwell_wire.topology import AXES, World
from shardwell_wire.wire_dtypes import NAMES

ENVIRONMENT_PREFIX = "SHARDWELL_"
_TEXTS = ("ADDRESS", "RUN", "TRAINER", "HOST", "TRANSPORTS", "GATHER_DTYPE", "PUSH_DTYPE", "NODE_GROUP")
_CHOICES = (("gather_dtype", NAMES), ("push_dtype", NAMES), ("node_group", ("none", *BACKENDS)))


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """Everything a trainer needs to take part in a run."""

    address: str | None = None
    """The coordinator's host:port. None: a private local cluster, for this process and the other ranks of torchrun."""
    token_file: str | None = None
    """File with the cluster's token. None: looked up, see ``find_credentials``."""
    run: str = "default"
    """Name of the run; trainers that name the same run train together."""
    world: World = field(default_factory=World)
    """The grid of logical ranks."""
    seed: int = 0
    """Data order and dropout derive from it."""
    min_trainers: int | None = None
    """Trainers that must be there before the first step. None: one per logical rank."""
    trainer: str = ""
    """A name that stays the same when this trainer is started again, so that it gets its ranks
    back. Empty: the coordinator makes one up."""
    host: str = field(default_factory=socket.gethostname)
    """Trainers of one host are kept in one tensor group where possible."""
    global_rank: int | None = None
    """A logical rank to ask for. None: any."""
    world_size: int = 0
    """Trainers that the launcher started; checked against the world. 0: not known."""
    num_layers: int = 0
    """Layers to split over pipeline stages; checked against the world. 0: not known."""
    wait_limit_s: float = 600.0
    """The longest wait for others (trainers to join, a step to finish) before DeadlineError."""
    transports: tuple[str, ...] = KINDS
    """Ways to the shard servers, the preferred one first; what cannot be opened is passed over."""
    chunk_bytes: int = codec.DEFAULT_CHUNK_BYTES
    """Payload per message on the data plane."""
    gather_dtype: str = "float32"
    """How 32-bit weights travel: float32 (as they are), bfloat16, float16 or int8; what is computed with
    is rounded alike."""
    push_dtype: str = "float32"
    """How 32-bit gradients travel."""
    push_error_feedback: bool = False
    """Whether what rounding left out of a gradient is added to the next one."""
    prefetch_bytes: int = 128 << 20
    """Weights that may be fetched ahead of their use; so much memory of freed weights is kept for the next ones."""
    push_bytes: int = 64 << 20
    """Gradients that may be on their way to the servers before the backward waits; with error feedback as encoded."""
    keep_bytes: int = 0
    """Weights that may stay here between their uses in a step, so that they are fetched once."""
    max_gathers_in_flight: int = 0
    """Units whose weights may be on their way at once. 0: as many as ``prefetch_bytes`` allows."""
    backward_prefetch: str = BackwardPrefetch.PRE
    """When the weights of the next unit are gathered in a backward: pre, post or none."""
    host_cache_bytes: int = 0
    """Weights that the run's trainers of this host may keep in shared memory together, so that they are
    fetched once for all. 0: none, because they take the memory for good."""
    node_group: str = "none"
    """What the run's trainers of this host exchange weights over, of which each fetches a part: ``gloo`` between
    CPUs, ``nccl`` between GPUs. ``none``: each fetches everything."""
    torchrun: TorchrunPlace | None = None
    """This process among those that torchrun started. None: it started none."""

    def _check_names(self) -> None:
        try:
            check_name("run", self.run)
            for what, value in (("trainer", self.trainer), ("host", self.host)):
                if value:
                    check_name(what, value)
        except InvalidRequestError as error:
            raise UsageError(str(error)) from error

    def __post_init__(self) -> None:
        self._check_names()
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed={self.seed!r}: expected 0 <= seed < 2**63")
        if not 1 <= self.chunk_bytes <= codec.MAX_CHUNK_BYTES:
            raise UsageError(f"chunk_bytes={self.chunk_bytes!r}: expected 1 to {codec.MAX_CHUNK_BYTES}")
        for name, known in _CHOICES:
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        if self.push_error_feedback and self.push_dtype == "float32":
            raise UsageError("push_error_feedback=True: nothing is left out with push_dtype='float32'")
        for name in ("prefetch_bytes", "keep_bytes", "max_gathers_in_flight", "host_cache_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected at least 0")
        for name in ("wait_limit_s", "push_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected a positive number")
        if self.backward_prefetch not in list(BackwardPrefetch):
            modes = ", ".join(BackwardPrefetch)
            raise UsageError(f"backward_prefetch={self.backward_prefetch!r}: expected one of {modes}")
        if self.min_trainers is not None and not 1 <= self.min_trainers <= self.world.size:
            raise WorldError(
                f"min_trainers={self.min_trainers}: expected 1 to {self.world.size}, the size of {self.world}"
            )

    @classmethod
    def from_env(cls, explicit: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> JoinConfig:
        """Reads SHARDWELL_* once; arguments that are given (not None) win.

        ADDRESS, RUN, TRAINER, HOST, SEED, MIN_TRAINERS, RANK, WORLD_SIZE, TRANSPORTS (such as ``shm,grpc``),
        GATHER_DTYPE, PUSH_DTYPE, KEEP_BYTES, HOST_CACHE_BYTES, NODE_GROUP, and DP, TP, PP, ORDER (such as
        ``dp,tp,pp``) for the world. Where neither says otherwise, torchrun's RANK and WORLD_SIZE count.
        """
        source = os.environ if environment is None else environment
        env = {
            key.removeprefix(ENVIRONMENT_PREFIX): value
            for key, value in source.items()
            if key.startswith(ENVIRONMENT_PREFIX) and value
        }
        values: dict[str, Any] = {key.lower(): env[key] for key in _TEXTS if key in env}
        for key, name in (
            ("SEED", "seed"),
            ("MIN_TRAINERS", "min_trainers"),
            ("RANK", "global_rank"),
            ("KEEP_BYTES", "keep_bytes"),
            ("HOST_CACHE_BYTES", "host_cache_bytes"),
        ):
            if key in env:
                values[name] = _integer(key, env[key])
        if "WORLD_SIZE" in env:
            values["world_size"] = _integer("WORLD_SIZE", env["WORLD_SIZE"])
        if any(key in env for key in ("DP", "TP", "PP", "ORDER")):
            dp, tp, pp = (_integer(axis.upper(), env.get(axis.upper(), "1")) for axis in AXES)
            values["world"] = World(dp, tp, pp, tuple(env["ORDER"].split(",")) if "ORDER" in env else AXES)
        values.update({name: value for name, value in explicit.items() if value is not None})
        if (place := TorchrunPlace.from_env(source)) is not None:
            values |= {"torchrun": place, **place.defaults(values)}
        if isinstance(values.get("transports"), str):
            values["transports"] = parse_kinds(values["transports"])
        return cls(**values)


def _integer(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{ENVIRONMENT_PREFIX}{key}={text!r}: expected an integer") from None
