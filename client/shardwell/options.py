"""Options of ``shardwell.join``, from arguments, ``SHARDWELL_*`` variables and the launcher of the process.

The fields of three dataclasses have the name of each option, its type, from which its variable follows, its default,
and what it excludes. ``docs/join-options.md`` and the arguments of ``join`` are compared with them.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from shardwell.module.strategy import BackwardPrefetch
from shardwell.peers.node_group import BACKENDS
from shardwell.transport.base import DIRECT, ROUTES
from shardwell.transport.server_connection import TRANSPORT_NAMES, parse_transports
from shardwell_wire.checkpoints.storage import absolute
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.wire_dtypes import FEEDBACK_NAMES, GATHER_NAMES, PUSH_NAMES
from shardwell_wire.errors import InvalidRequestError, UsageError, WorldError
from shardwell_wire.host.variables import variables
from shardwell_wire.model.names import check_name
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency, World, checked_groups
from shardwell_wire.security.tls import TlsOptions
from shardwell_wire.v1 import coordinator_pb2

DEFAULT_RUN = "default"
"""Name of the run of a script that names none, on a private cluster."""
ADAPTIVE = "adaptive"
"""Value of ``TransferOptions.gradient_reduction`` that chooses a route for each unit."""
LATEST = "latest"
"""Value of ``resume`` for the newest checkpoint of the run."""
_ONLY_ARGUMENT = {"environment": False}
"""Metadata of a field that no environment variable sets."""
_ONE_VERSION = "one_version"
"""Key in the metadata of a field: why another value than the default needs that all ranks read the same version."""


class _Options:
    """Base class of the option groups that ``join`` takes.

    Records the fields that were passed to the constructor, because these fields take precedence over the environment.
    """

    __slots__ = ("_passed",)
    _passed: frozenset[str]

    def __new__(cls, **passed: Any) -> Self:
        options = super().__new__(cls)
        object.__setattr__(options, "_passed", frozenset(passed))
        return options

    @classmethod
    def from_env(cls, passed: Self | None = None, environment: Mapping[str, str] | None = None) -> Self:
        """Returns the options of the environment, overridden by the fields that were passed to ``passed``.

        Args:
            passed: Options whose constructor arguments take precedence.
            environment: Variables to read. Default: those of the process and of its configuration file.

        Raises:
            UsageError: A variable has an invalid value.
        """
        values = read_environment(cls, variables() if environment is None else environment)
        if passed is not None:
            values |= {name: getattr(passed, name) for name in passed._passed}
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOptions(_Options):
    """How weights and gradients travel between this trainer and the shard servers.

    A field that is not passed is read from the variable ``SHARDWELL_`` + its name in capitals, such as
    ``SHARDWELL_GATHER_DTYPE``. Without the variable it has the default.

    Raises:
        UsageError: A value is out of range.
    """

    transports: str = ",".join(TRANSPORT_NAMES)
    """Transports to use, in order of preference: ``shm`` (shared memory on one host), ``socket`` (plain TCP) and
    ``grpc``. A transport that a server cannot open is skipped. The default is the order of their speed."""
    chunk_bytes: int = chunk_streams.DEFAULT_CHUNK_BYTES
    """Bytes of payload per message, at most 4 MiB. The default is the fastest of the measured sizes."""
    gather_dtype: str = "float32"
    """Dtype in which 32-bit weights travel: ``float32``, ``bfloat16``, ``float16``, or ``int8`` or ``float8`` (E4M3)
    with one scale per 256 values. The servers store and update unrounded values. The default loses nothing."""
    push_dtype: str = "float32"
    """Dtype in which 32-bit gradients travel: one of the above, or one that leaves out most of a gradient and needs
    ``push_error_feedback``: ``topk-1%`` or ``topk-10%``, which push the largest values of every 1024, or ``lowrank-1``,
    ``lowrank-4`` or ``lowrank-16``, which push a matrix as a product of two factors of this rank. The servers add
    gradients in float32."""
    push_error_feedback: bool = field(
        default=False, metadata={_ONE_VERSION: "residuals belong to consecutive versions"}
    )
    """Add what each pushed gradient lost to the next gradient. Needs a lossy ``push_dtype``."""
    prefetch_bytes: int = 128 << 20
    """Bytes of weights that may be fetched before they are used. The same amount of freed memory is kept for reuse.
    The default holds one float32 layer of a GPT with 1.5 billion parameters."""
    push_bytes: int = 64 << 20
    """Bytes of gradients that may be in flight before the backward waits. The default is
    enough for 64 messages of ``chunk_bytes``."""
    keep_bytes: int | None = None
    """Bytes of weights that may stay in memory between two uses in one step, instead of being fetched again. None:
    what prefetched weights leave free of ``prefetch_bytes``. That is most of it at the end of a forward, so the units
    that the backward needs first are not fetched again. 0: every unit is freed."""
    max_gathers_in_flight: int = 0
    """Units that may be fetched at the same time, like ``limit_all_gathers`` of FSDP1. Weights that are read in place
    do not count. 0: limited by ``prefetch_bytes`` only."""
    backward_prefetch: str = BackwardPrefetch.PRE
    """When a backward gathers the next unit: ``pre``, ``post`` or ``none``, as in FSDP1."""
    host_cache_bytes: int = field(default=0, metadata={_ONE_VERSION: "the trainers of a host read different versions"})
    """Bytes of shared memory in which the relay of this host caches weights of remote servers for the run's trainers.
    Each weight is then fetched once per host and step. All trainers of a host must use the same value. 0 by default,
    because the cache never returns its memory during the run. Without a relay (a shard server on this host, or
    ``shardwell-server relay``), every trainer fetches by itself."""
    delta_cache_bytes: int = 0
    """Bytes of memory in which this trainer keeps weights as they travelled, so that the servers send only what has
    changed since. Needs a ``gather_dtype`` of 16 bits. Weights in the host cache are not kept again. The weights are
    bit-identical. 0 by default, because it takes 2 bytes per value, and CPU time that only pays on a slow network."""
    node_group: str = field(default="none", metadata={_ONE_VERSION: "the trainers of a node read different versions"})
    """Backend over which the run's trainers of this host exchange weights, so that each fetches only a part:
    ``gloo`` (CPU) or ``nccl`` (GPU; select the device first). All trainers of a host must use the same value.
    ``none`` by default: each trainer fetches whole units."""

    gradient_reduction: str = field(
        default=DIRECT, metadata={_ONE_VERSION: "the gradient of each rank is applied by itself"}
    )
    """Where gradients are added first: ``direct`` (on the servers: each trainer pushes its own), ``hierarchical`` (by
    the relay of this host, if the host has all trainers of a reduction group of the run), ``allreduce`` (among the
    trainers of the largest complete reduction group, on any hosts: each adds and pushes a part of the sum), or
    ``adaptive`` (one of these for each unit). All trainers of a run should use the same value. The weights are
    bit-identical."""

    def __post_init__(self) -> None:
        parse_transports(self.transports)
        for option in fields(self):
            check_type(option, getattr(self, option.name))
        if not 1 <= self.chunk_bytes <= chunk_streams.MAX_CHUNK_BYTES:
            raise UsageError(f"chunk_bytes={self.chunk_bytes!r}: expected 1 to {chunk_streams.MAX_CHUNK_BYTES}")
        choices = {"gather_dtype": GATHER_NAMES, "push_dtype": PUSH_NAMES, "node_group": ("none", *BACKENDS)}
        choices["gradient_reduction"] = (*ROUTES, ADAPTIVE)
        if self.gradient_reduction == "ring":
            raise UsageError(
                "gradient_reduction='ring': a ring adds each part of a gradient in another order than the run's "
                "reduction_groups, so the weights would differ. Use 'allreduce', with which trainers send as many bytes"
            )
        for name, known in {**choices, "backward_prefetch": list(BackwardPrefetch)}.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        for name in ("prefetch_bytes", "keep_bytes", "max_gathers_in_flight", "host_cache_bytes", "delta_cache_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected at least 0")
        _require_positive(self, "push_bytes")
        if self.gradient_reduction != DIRECT and self.push_dtype != "float32":
            raise UsageError(
                f"gradient_reduction={self.gradient_reduction!r} with push_dtype={self.push_dtype!r}: the sums of "
                "trainers would be rounded instead of their gradients, which changes the weights. Use "
                f"push_dtype='float32', or gradient_reduction={DIRECT!r}"
            )

    @property
    def transport_names(self) -> tuple[str, ...]:
        """``transports`` as a tuple."""
        return parse_transports(self.transports)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitOptions(_Options):
    """How long a trainer waits for other processes.

    A field that is not passed is read from the variable ``SHARDWELL_`` + its name in capitals, such as
    ``SHARDWELL_WAIT_LIMIT_S``. Without the variable it has the default.

    Raises:
        UsageError: A value is not a positive, finite number.
    """

    wait_limit_s: float = 600.0
    """Seconds to wait for other trainers and for servers before ``DeadlineError`` or ``UnavailableError``. The default
    leaves time to restart a lost process by hand."""
    rpc_timeout_s: float = 30.0
    """Deadline in seconds of one rpc to the coordinator. The default is far above the duration of a normal
    call."""
    warn_after_s: float = 5.0
    """Seconds of waiting after which a warning is logged. A restart of the coordinator takes less than the
    default."""

    def __post_init__(self) -> None:
        for option in fields(self):
            check_type(option, getattr(self, option.name))
            _require_positive(self, option.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """All options of one trainer: the arguments of ``join``, which describes them, and what the launcher says.

    None, 0 or an empty text stands for the default that ``join`` describes.
    """

    address: str | None = None
    token_file: str | None = field(default=None, metadata=_ONLY_ARGUMENT)
    tls: TlsOptions | None = field(default=None, metadata=_ONLY_ARGUMENT)
    run: str = ""
    world: World = field(default_factory=World)
    seed: int = 0
    reduction_groups: tuple[int, ...] = field(
        default=(), metadata={_ONE_VERSION: "the gradient of each rank is applied by itself"}
    )
    min_trainers: int | None = None
    trainer: str = ""
    host: str = field(default_factory=socket.gethostname)
    global_rank: int | None = None
    num_layers: int = 0
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    backups: int | None = None
    keep_versions: int = 0
    max_reader_lag: int | None = None
    consistency: Consistency = SYNCHRONOUS
    resume: str = ""
    rewrap: bool = False
    allow_gradient_differences: bool = False
    transfers: TransferOptions = field(default_factory=TransferOptions)
    waits: WaitOptions = field(default_factory=WaitOptions)

    world_size: int = 0
    """Number of trainers that the launcher started, checked against the world. 0: unknown."""
    launcher: LauncherPlace | None = None
    """Position of this process among those of its launcher. None: it has no launcher, or is the only process."""

    def __post_init__(self) -> None:
        self._check_names()
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed={self.seed!r}: expected 0 <= seed < 2**63")
        object.__setattr__(self, "reduction_groups", checked_groups(self.world.dp, self.reduction_groups))
        self._check_error_feedback()
        if self.transfers.gradient_reduction != DIRECT and self.world.replica_size > 1:
            raise UsageError(
                f"gradient_reduction={self.transfers.gradient_reduction!r} needs a world with cp=1, tp=1 and pp=1, got "
                f"{self.world}: the trainers that add gradients meet once, when they join, and a replica is formed "
                f"again with others when one is lost. Use gradient_reduction={DIRECT!r}"
            )
        self._check_durability()
        self._check_consistency()
        if self.min_trainers is not None and not 1 <= self.min_trainers <= self.world.size:
            raise WorldError(
                f"min_trainers={self.min_trainers}: expected 1 to {self.world.size}, the size of {self.world}"
            )

    def _check_error_feedback(self) -> None:
        dtype, has_feedback = self.transfers.push_dtype, self.transfers.push_error_feedback
        if has_feedback and self.world.cp > 1:
            raise UsageError(
                f"push_error_feedback=True needs a world with cp=1, got {self.world}: use push_dtype='bfloat16' or "
                "'float32' without push_error_feedback"
            )
        if has_feedback and dtype == "float32":
            raise UsageError(
                "push_error_feedback=True with push_dtype='float32': float32 gradients are not rounded. Set push_dtype "
                f"to {', '.join(name for name in PUSH_NAMES if name != dtype)}, or leave push_error_feedback out"
            )
        if not has_feedback and dtype in FEEDBACK_NAMES:
            raise UsageError(
                f"push_dtype={dtype!r} without push_error_feedback: most of each gradient would never be pushed. Set "
                "push_error_feedback=True"
            )

    def _check_durability(self) -> None:
        for name in ("checkpoint_every", "keep", "backups", "keep_versions", "max_reader_lag"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not 0 <= value < 1 << 32):
                raise UsageError(f"{name}={value!r}: expected an integer from 0 to 2**32 - 1")
        if self.resume == LATEST and not self.checkpoint_dir:
            raise UsageError(f"resume={LATEST!r} needs checkpoint_dir: name the folder with the run's checkpoints")
        if self.rewrap and not self.resume:
            raise UsageError("rewrap=True needs resume: name the checkpoint whose model is wrapped into other units")
        # The coordinator and the servers have other working directories.
        if self.checkpoint_dir:
            object.__setattr__(self, "checkpoint_dir", absolute(self.checkpoint_dir))
        if self.resume and self.resume != LATEST:
            object.__setattr__(self, "resume", absolute(self.resume))

    def _check_consistency(self) -> None:
        """Raises UsageError for options that assume that all ranks read the same version."""
        if not self.consistency.asynchronous:
            return
        conflicts = {}
        if self.world.replica_size > 1:
            conflicts[f"world={self.world}"] = "the trainers of a replica commit together"
        for options in (self, self.transfers):
            for option in fields(options):
                value = getattr(options, option.name)
                if _ONE_VERSION in option.metadata and value != option.default:
                    conflicts[f"{option.name}={value!r}"] = option.metadata[_ONE_VERSION]
        for conflict, reason in conflicts.items():
            raise UsageError(
                f"consistency={self.consistency} contradicts {conflict}: {reason}. Leave one of the two options out"
            )

    def _check_names(self) -> None:
        try:
            for what, value in (("run", self.run), ("trainer", self.trainer), ("host", self.host)):
                if value:
                    check_name(what, value)
        except InvalidRequestError as error:
            raise UsageError(str(error)) from error

    def run_config(self) -> coordinator_pb2.RunConfig:
        """Returns the options that concern the whole run. The coordinator compares or changes those of the run."""
        return coordinator_pb2.RunConfig(
            world=self.world.to_proto(),
            seed=self.seed,
            min_trainers=self.min_trainers or 0,
            num_layers=self.num_layers,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_every=self.checkpoint_every,
            checkpoint_keep=self.keep,
            backups=self.backups,
            keep_versions=self.keep_versions,
            max_reader_lag=self.max_reader_lag,
            reduction_groups=self.reduction_groups,
            **self.consistency.to_fields(),
        )

    @classmethod
    def from_env(cls, explicit: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> JoinConfig:
        """Returns the configuration for the arguments of ``join``.

        A field is taken from the first source that sets it: an argument, the variable ``SHARDWELL_`` + the field's name
        in capitals, the launcher, the default. The fields of the world are DP, CP, TP, PP and ORDER (``dp,tp,pp``).

        Args:
            explicit: Arguments by field name; None stands for an argument that was not passed.
            environment: Variables to read. Default: those of the process and of its configuration file.

        Raises:
            UsageError: A value is invalid.
            WorldError: The world is invalid, has fewer ranks than ``min_trainers``, or does not fit the reduction
                groups.
        """
        source = variables() if environment is None else environment
        for option in fields(cls):
            check_type(option, explicit.get(option.name))
        for where, address in (
            ("join(address='')", explicit.get("address")),
            ("SHARDWELL_ADDRESS", source.get(_ADDRESS)),
        ):
            if address == "" and not explicit.get("address"):
                raise UsageError(
                    f"{where} is empty: name the coordinator's HOST:PORT, or leave it out to train on a private cluster"
                )
        if explicit.get("run") == "":
            raise UsageError("run is '': name the run, or leave it out")
        values = read_environment(cls, source)
        if axes := read_environment(World, source):
            values["world"] = World(**axes)
        values.update({name: value for name, value in explicit.items() if value is not None})
        if (place := LauncherPlace.from_env(source)) is not None:
            values |= {"launcher": place, **place.defaults(values)}
        if not values.keys() & {"trainer", "global_rank"} and (name := _name_of_slurm_task(source)):
            values["trainer"] = name
        values["transfers"] = TransferOptions.from_env(values.get("transfers"), source)
        values["waits"] = WaitOptions.from_env(values.get("waits"), source)
        return cls(**values)


_TYPES: dict[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    "str": ((str, os.PathLike), "a text"),
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "World": (World, "a World, such as shardwell.World(dp=2)"),
    "Consistency": (Consistency, "shardwell.SYNCHRONOUS, shardwell.ASYNCHRONOUS or shardwell.BOUNDED_STALENESS(2)"),
    "TlsOptions": (TlsOptions, "shardwell.TlsOptions(...)"),
    "TransferOptions": (TransferOptions, "shardwell.TransferOptions(...)"),
    "WaitOptions": (WaitOptions, "shardwell.WaitOptions(...)"),
    "tuple[int, ...]": ((tuple, list), "a tuple of integers"),
}


def check_type(option: Field[Any], value: Any) -> None:
    """Raises UsageError unless a value has the type of an option. None stands for an option that was not passed."""
    kind = _type_of(option)
    if value is None or kind not in _TYPES:
        return
    types, expected = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        example = ", such as 'localhost:50051'" if option.name == "address" else ""
        raise UsageError(f"{option.name}={value!r}: expected {expected}{example}")


def run_of_script(path: str | Path) -> str:
    """Returns the name of a script's run, if none is named: the script's name without its suffix."""
    return Path(path).stem


def _require_positive(options: Any, name: str) -> None:
    value = getattr(options, name)
    if not 0 < value < math.inf:
        raise UsageError(f"{name}={value!r}: expected a positive number")


_PREFIX = "SHARDWELL_"
_ADDRESS = f"{_PREFIX}ADDRESS"


def read_environment(options: type[Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of a dataclass that ``SHARDWELL_<FIELD>`` variables set.

    Fields of other types than text, numbers, booleans and tuples of text or integers have no variable, and neither have
    those with the metadata ``environment=False``. An empty variable counts as not set.
    """
    values: dict[str, Any] = {}
    for option in fields(options):
        variable = variable_of(option)
        if variable is not None and (text := environment.get(variable)):
            values[option.name] = _parse(_type_of(option), variable, text)
    return values


def variable_of(option: Field[Any]) -> str | None:
    """Returns the variable that sets a field of the options. None: there is none. See ``read_environment``."""
    has_variable = _item_type(_type_of(option)) in _PARSERS and option.metadata.get("environment", True)
    return f"{_PREFIX}{option.name.upper()}" if has_variable else None


def _item_type(kind: str) -> str:
    return kind.removeprefix("tuple[").removesuffix(", ...]")


def _type_of(option: Field[Any]) -> str:
    return str(option.type).removesuffix(" | None")


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "text"),
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "bool": ({"0": False, "1": True}.__getitem__, "0 or 1"),
    "Consistency": (Consistency.parse, "a consistency"),
}
"""Functions of a variable's text, or of each of its parts, and what they expect, by the type of the field."""


def _parse(kind: str, variable: str, text: str) -> Any:
    if kind.startswith("tuple"):
        return tuple(_parse(_item_type(kind), variable, part) for part in text.split(","))
    parse, expected = _PARSERS[kind]
    try:
        return parse(text)
    except InvalidRequestError as error:
        raise UsageError(f"{variable}: {error}") from None
    except (ValueError, KeyError):
        raise UsageError(f"{variable}={text!r}: expected {expected}") from None


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables in which a launcher tells each process its place."""

    rank: str
    """Index of the process, from 0, over all hosts."""
    size: str
    """Number of processes on all hosts."""
    local_rank: str
    """Index of the process among those of its host."""
    local_size: str | None
    """Number of processes on its host. None: the launcher does not say it as one number."""


_SRUN = _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None)
"""A batch script has a SLURM_PROCID, too. Only tasks of srun have SLURM_STEP_NUM_TASKS."""

_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _SRUN,
)
"""torchrun, mpirun of Open MPI, mpiexec of MPICH, and srun. The first whose variables are set counts: in a job of
Slurm, mpirun starts its daemons with srun, and its processes inherit the variables of these."""

LAUNCHER_VARIABLES = frozenset(name for launcher in _LAUNCHERS for name in (launcher.rank, launcher.size))
"""Variables without which a process has no launcher."""


def _find_launcher(environment: Mapping[str, str]) -> _Launcher | None:
    found = (each for each in _LAUNCHERS if environment.get(each.rank) and environment.get(each.size))
    return next(found, None)


def local_rank_variable(environment: Mapping[str, str]) -> str | None:
    """Returns the name of the variable with the index of this process on its host. None: there is none.

    ``shardwell launch`` sets LOCAL_RANK without the other variables of torchrun.
    """
    launcher = _find_launcher(environment)
    names = ["LOCAL_RANK", *([] if launcher is None else [launcher.local_rank])]
    return next((name for name in names if environment.get(name)), None)


def _name_of_slurm_task(environment: Mapping[str, str]) -> str | None:
    """Returns a name that a task of srun has again when Slurm has requeued its job. None: this is no task of srun.

    In a shell of ``srun --pty``, several processes may be trainers.
    """
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    if not job or not step or environment.get("SLURM_PTY_PORT") or _find_launcher(environment) is not _SRUN:
        return None
    return f"slurm-{job}.{step}-{environment[_SRUN.rank]}"


@dataclass(frozen=True, slots=True)
class LauncherPlace:
    """The position of this process among those that ``torchrun``, ``srun`` or ``mpirun`` started."""

    rank: int
    """RANK of torchrun: index of this process, from 0, over all hosts."""
    world_size: int
    """WORLD_SIZE: number of processes on all hosts; at least 2."""
    local_world_size: int
    """LOCAL_WORLD_SIZE: number of processes on this host. Equals ``world_size`` if the launcher does not set it."""
    dp_rank: int | None = None
    """SHARDWELL_DP_RANK: the launcher started the trainers of the replica with this dp rank. None: of all replicas."""
    variables: tuple[str, str] = ("RANK", "WORLD_SIZE")
    """The names of the launcher's variables for the first two."""

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads the variables of the launcher, and SHARDWELL_DP_RANK.

        Returns:
            None without a launcher or with a single process.

        Raises:
            UsageError: A variable is not a valid number.
        """
        launcher = _find_launcher(environment)
        if launcher is None:
            return None
        rank, world_size = (_launcher_number(environment, name) for name in (launcher.rank, launcher.size))
        if world_size < 2:
            return None
        if rank >= world_size:
            raise UsageError(
                f"{launcher.rank}={rank}, {launcher.size}={world_size}: expected {launcher.rank} below {launcher.size}"
            )
        local_size = launcher.local_size
        local = _launcher_number(environment, local_size) if local_size and environment.get(local_size) else world_size
        dp_rank = read_environment(cls, environment).get("dp_rank")
        return cls(rank, world_size, local, dp_rank, (launcher.rank, launcher.size))

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of ``JoinConfig`` that follow from the launcher and are not in ``given``.

        The world is ``dp=world_size``. If the world has this size, each process plays the logical rank ``rank`` under a
        name that survives a restart by the launcher. With SHARDWELL_DP_RANK, each process plays the rank with number
        ``rank`` in this replica.

        Args:
            given: Fields that arguments or SHARDWELL_* variables set.

        Raises:
            UsageError: The number of processes is not that of a replica.
            WorldError: The world has no such dp rank.
        """
        found: dict[str, Any] = {}
        if "world" not in given:
            found["world"] = World(dp=self.world_size)
        world: World = given.get("world") or found["world"]
        if self.dp_rank is not None and self.world_size != world.replica_size:
            raise UsageError(
                f"SHARDWELL_DP_RANK={self.dp_rank}, {self.variables[1]}={self.world_size}: the launcher must start all "
                f"trainers of one replica, which are {world.replica_formula} = {world.replica_size} in {world}"
            )
        ranks = range(world.size) if self.dp_rank is None else world.replica_ranks(self.dp_rank)
        if len(ranks) == self.world_size and not given.keys() & {"trainer", "global_rank"}:
            found["global_rank"], found["trainer"] = ranks[self.rank], f"rank-{ranks[self.rank]}"
        if not given.get("address") and not given.keys() & {"world_size", "min_trainers"}:
            found["world_size"] = self.world_size  # no other process can join a private cluster
        return found


def _launcher_number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: expected an integer of at least 0, as the launcher sets it")
    return int(text)
