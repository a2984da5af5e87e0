"""A read-only session: reads the live weights of a run, without a logical rank and without the run's model code."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from types import TracebackType
from typing import IO, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from shardwell.find_credentials import find_credentials
from shardwell.memory.buffers import CAN_MAP
from shardwell.module.parameters import has_parts, inner_tensors
from shardwell.module.unit import owner_of
from shardwell.transport.service_client import CoordinatorClient
from shardwell.weights.digest import pinned_digest
from shardwell.weights.pinned_version import PinnedVersion, RunConnections, describe_weights, pinned_version
from shardwell.weights.stored_parameters import Chosen, Names, Slices, StoredParameter, ranges_of
from shardwell.weights.weight_files import Rename, differences, listed, map_tensors, write_file
from shardwell_wire.connection.channel import retry
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES
from shardwell_wire.errors import NotFoundError, ShardwellError, UnavailableError, UsageError, VersionGoneError
from shardwell_wire.host.variables import variables
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.tls import TlsOptions
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Tensors = dict[str, torch.Tensor]

_LEAVE_LIMIT_S = 2.0
"""How long a reader that is closed waits for the coordinator to note it."""


class Reader:
    """Reads committed versions of a run's weights. A context manager. Created by ``attach``.

    A reader has no rank, and training does not wait for it without ``hold_s``. It reads over the transports of a
    trainer: from shared memory on a shard server's host, otherwise over sockets or gRPC. One thread at a time may use
    it.

    Attributes:
        run: Name of the run.
        run_id: Random id of the run. A later run of the same name has another id.

    Args:
        coordinator: Client of the coordinator. Closed with the reader.
        timeout_s: Deadline of each read in seconds, which includes the time in which a shard server is replaced.
        run, gather_dtype, delta_cache_bytes, name, hold_s: As in ``attach``.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        run: str,
        timeout_s: float,
        *,
        gather_dtype: str = "float32",
        delta_cache_bytes: int = 0,
        name: str = "",
        hold_s: float = 0.0,
    ) -> None:
        self._coordinator, self._timeout_s, self.run = coordinator, timeout_s, run
        host = socket.gethostname()
        self._report = coordinator_pb2.ReaderReport(
            reader_id=uuid.uuid4().hex, name=name or f"{host}:{os.getpid()}", host=host, hold_s=hold_s
        )
        """What the coordinator is told with each request."""
        self._calls = common_pb2.CallPort()
        """Where the coordinator takes calls beside gRPC."""
        self.run_id = self._describe().run_id
        self._connections = RunConnections(
            RunIdentity(run, self.run_id),
            coordinator.credentials,
            gather_dtype=GATHER_NAMES[gather_dtype],
            delta_cache_bytes=delta_cache_bytes,
        )
        self._followed: weakref.WeakKeyDictionary[nn.Module, tuple[int, int, Names | None]] = (
            weakref.WeakKeyDictionary()
        )
        """The number of rollbacks and the version that each followed model contains, and of which names."""

    @property
    def version(self) -> int:
        """The newest committed version, which is the number of committed steps."""
        return self.newest()[0]

    def newest(self) -> tuple[int, str]:
        """Returns the newest committed version, and its history: after a rollback, it may have other weights."""
        run = self._describe()
        return run.version, f"{run.run_id}-{run.rollback_count}"

    def _describe(self, version: int | None = None, wait_s: float = 0.0) -> coordinator_pb2.DescribeWeightsResponse:
        """Describes a version without its units, and tells the coordinator what this reader has read."""
        found = describe_weights(
            self._coordinator, self.run, version=version, wait_s=wait_s, reader=self._report, without_units=True
        )
        if found.calls != self._calls:  # as at first, or after the coordinator has restarted
            self._calls = found.calls
            self._coordinator.use_calls(self._calls)
        return found

    def stats(self) -> dict[str, float]:
        """Returns what this reader has received over sockets and gRPC.

        Returns:
            ``received_bytes``, and as in ``Session.stats`` ``corrupt_transfer_count``, ``delta_cache_bytes``,
            ``delta_stream_bytes``, ``delta_received_bytes``, ``delta_reused_bytes`` and ``delta_ratio``.
        """
        return self._connections.stats()

    def wait_for(self, version: int, timeout_s: float) -> int:
        """Waits until a version or a later one is committed; returns the newest version.

        Raises:
            DeadlineError: The version was not committed within ``timeout_s`` seconds.
        """
        try:
            described = self._describe(version, timeout_s)  # of this version, if the run keeps it
            return described.newest or described.version
        except VersionGoneError as error:
            return int(error.data["newest"])

    @contextmanager
    def pin(self, version: int | str | None = None, *, at_least: int = 0) -> Iterator[PinnedVersion]:
        """Keeps a version readable while the block runs. Training continues.

        The shard servers copy what training overwrites. If training needs the memory of the copies, a server evicts
        them, and reads raise VersionGoneError. Versions that the run keeps (``join(keep_versions=...)``) are not
        evicted.

        Args:
            version: The version, which is waited for until it is committed, or the name of a published one. Several
                readers that name a version read the same values. Default: the newest.
            at_least: The newest version is waited for until it is this one or a later one.

        Yields:
            The pinned version: ``version``, ``values()``, ``parameters`` and ``buffers``.

        Raises:
            VersionGoneError: The version is not kept any more; ``data["kept"]`` lists those that are, separated by
                commas. Without ``version``: steps are committed faster than the servers can be asked.
            NotFoundError: No version is published under the name.
            DeadlineError: The version was not committed within the reader's timeout.
            UnavailableError: A shard server cannot be reached for the reader's timeout.
        """
        if at_least:
            self.wait_for(at_least, self._timeout_s)
        with pinned_version(
            self._coordinator,
            self.run,
            timeout_s=self._timeout_s,
            connections=self._connections,
            waits=True,
            version=version,
        ) as pinned:
            try:
                yield pinned
            finally:
                self._connections.note_read(pinned.version, pinned.rollback_count)
                self._report.received_bytes = int(self._connections.stats()["received_bytes"])
            self._report.version = pinned.version
        if self._report.hold_s:
            with suppress(ShardwellError):  # otherwise the run learns it from the next request
                self._describe()

    def digest(self, version: int | str | None = None) -> str:
        """Returns the digest of a version, as ``weights_digest`` does for tensors with the names of the model.

        Reads the whole version, and holds two units at a time. Raises as ``pin``.

        Args:
            version: The version or the name of a published one. Default: the newest.
        """
        with self.pin(version) as pinned:
            return pinned_digest(pinned)

    def read(
        self, version: int | str | None = None, *, names: Names | None = None, slices: Slices | None = None
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Reads a version, or a part of it, into CPU memory.

        Args:
            version: The version, which is waited for until it is committed, or the name of a published one. Default:
                the newest.
            names: As in ``PinnedVersion.values``. Default: all tensors.
            slices: As in ``PinnedVersion.values``. Default: whole tensors.

        Returns:
            The version, and its tensors by name, as ``PinnedVersion.values`` yields them.

        Raises:
            Exception: As ``pin`` and ``PinnedVersion.values``. Without ``version``, the read is repeated with a newer
                one, for the reader's timeout, if a version does not stay readable.
        """
        return self._reading(version, lambda pinned: (pinned.version, dict(pinned.values(names, slices=slices))))

    def _reading(self, version: int | str | None, use: Callable[[PinnedVersion], Result]) -> Result:
        """Returns ``use`` of a pinned version; raises as ``read``. Repeated if a shard server is lost."""

        def read() -> Result:
            with self.pin(version) as pinned:
                return use(pinned)

        def check(error: Exception) -> None:
            if self._report.leaving:  # another thread has closed the reader
                raise error

        passing = (UnavailableError, VersionGoneError) if version is None else UnavailableError
        return retry(read, limit_s=self._timeout_s, errors=passing, check=check)

    def follow(
        self,
        model: nn.Module,
        *,
        rename: Rename | None = None,
        cast: bool = False,
        names: Names | None = None,
        writing: AbstractContextManager[object] | None = None,
    ) -> int:
        """Loads the newest committed version into a plain model, in place.

        The first call loads everything. Later calls load the units that have changed since. All values are read before
        the first one is written, so the model has one version even if the call fails. This takes CPU memory of the size
        of the changed units.

        Args:
            model: A model on any device, with the names of the model that is trained: those in the module of the
                outermost ``fully_shard`` or ``auto_wrap`` call.
            rename: Maps these names to names in ``model``, or to None to skip a tensor. If several outermost
                modules were sharded by ``fully_shard``, names begin with those of the calls, such as ``Generator-0.``.
            cast: Whether to convert to floating-point dtypes of the model that differ from the run's.
            names: A glob pattern of names, or several, such as ``"*lora_*"``. Only these tensors are read, and others
                of the model keep their values. Default: all.
            writing: Context that is entered while values are written, such as a lock of the threads that use the model.

        Returns:
            The version that the model has now.

        Raises:
            UsageError: Names, shapes or dtypes of the model do not fit, or the model is sharded.
            VersionGoneError: No version stayed readable until it was read. The model is unchanged.
            UnavailableError: A shard server could not be reached for the reader's timeout. The model is unchanged.
        """
        return retry(
            lambda: self._follow(model, rename or (lambda name: name), cast, names, writing or nullcontext()),
            limit_s=self._timeout_s,
            errors=(UnavailableError, VersionGoneError),
        )

    def loaded_version(self, model: nn.Module) -> int:
        """Returns the version that ``follow`` has loaded into a model. -1: none, or its last write was interrupted."""
        return self._followed.get(model, (-1, -1, None))[1]

    def _follow(
        self, model: nn.Module, rename: Rename, cast: bool, names: Names | None, writing: AbstractContextManager[object]
    ) -> int:
        with self.pin() as pinned:
            chosen = pinned.choose(names)
            targets = _targets(model, pinned, chosen, rename, cast=cast, is_part=names is not None)
            former = self._version_in(model, pinned, names)
            if former == pinned.version:
                return former
            units = {part.unit_name: part.unit for stored, _ in targets for part in stored.parts}
            units = {name: unit for name, unit in units.items() if pinned.changed_at(unit) > former}
            read = pinned.read_units(units, None if names is None else ranges_of(chosen))
        with writing, torch.no_grad():
            self._followed.pop(model, None)  # an interrupt below leaves a mixture: the next call loads everything
            for stored, tensor in targets:
                if stored.is_reshaped and tensor.shape != stored.meta.shape:
                    tensor.data = tensor.new_empty(stored.meta.shape)
                for part in stored.parts:
                    if (flat := read.get(part.unit_name)) is not None:
                        part.copy_to(tensor, flat)
            self._followed[model] = pinned.rollback_count, pinned.version, names
        return pinned.version

    def _version_in(self, model: nn.Module, pinned: PinnedVersion, names: Names | None) -> int:
        """Returns the version that a model contains. -1: none of the pinned version's history, so nothing is reused."""
        rollback_count, version, followed_names = self._followed.get(model, (-1, -1, None))
        if (rollback_count, followed_names) != (pinned.rollback_count, names):
            return -1
        # A rollback between the description of the run and the pins has made the pinned version anew.
        newest = describe_weights(self._coordinator, self.run, without_units=True)
        return version if newest.rollback_count == rollback_count else -1

    def close(self) -> None:
        """Closes the connections. Harmless to repeat."""
        if not self._report.leaving:
            self._report.leaving = True
            with suppress(ShardwellError):  # otherwise `shardwell readers` lists this reader for some minutes
                request = coordinator_pb2.DescribeWeightsRequest(run=self.run, reader=self._report, without_units=True)
                self._coordinator.call("DescribeWeights", request, timeout_s=_LEAVE_LIMIT_S)
        self._connections.close()
        self._coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GroupReader:
    """Loads versions in all processes of a group, such as the workers of an inference engine. One per host reads.

    The other processes of the host map its memory, so a host receives and holds a version once. Processes that cannot
    map the memory of another one, such as those in other containers, read on their own. ``__init__``, ``update`` and
    ``in_any`` are collective: all processes call them in the same order.

    Args:
        attach: Attaches a reader. Called in the processes that read.
        group: A group of ``torch.distributed`` for CPU tensors.
        check: Called in each process with the first version, before it is loaded. Raises if it does not fit.
    """

    def __init__(
        self, attach: Callable[[], Reader], group: dist.ProcessGroup, check: Callable[[Tensors], object] | None = None
    ) -> None:
        self._attach, self._group, self._check = attach, group, check
        self._reader: Reader | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardwell-read")
        self._pending: tuple[int, Future[tuple[int, Tensors | IO[bytes]]]] | None = None
        self._dropped = Event()
        """Ends the pending read."""
        self._read: tuple[int, Tensors] | None = None
        """A version that all processes have read."""
        self._is_closed = False
        self._memory_name, own_rank = f"shardwell-{secrets.randbits(62):x}", dist.get_rank(group)
        with self._memory() as probe:
            offers = self._gather(os.getpid(), probe.fileno(), int(self._memory_name[10:], 16))
            self._source = next((rank for rank, offer in enumerate(offers) if _can_map(*offer)), own_rank)
            served = [rank for rank, [source] in enumerate(self._gather(self._source)) if source == own_rank]
        self._is_source, self._is_alone = bool(served), served == [own_rank]
        self._folder = f"/proc/{offers[self._source][0]}/fd"

    def update(self, version: int, load: Callable[[Tensors], object], until: str = "loaded") -> None:
        """Loads a version in all processes. If one cannot read it, nothing is loaded in any. May be repeated.

        Args:
            version: The version, which is waited for until it is committed.
            load: Loads the tensors, by name. Writes to them stay in this process.
            until: ``started``: the call only starts to read in the background. ``read``: it returns when all processes
                have the version in CPU memory. Another call with the same version continues, or raises why it failed.

        Raises:
            UnavailableError: Another process has failed, and its log has the reason, or is gone. Or the run was rolled
                back or deleted while hosts read the version.
            Exception: As ``Reader.read``, ``check`` and ``load``, in the process that has failed.
        """
        if type(version) is not int or until not in ("started", "read", "loaded") or self._is_closed:
            raise UsageError(
                f"{version=}, {until=}: expected an int, and 'started', 'read' or 'loaded', before close()"
            )
        if self._read is None or self._read[0] != version:
            self._read = None
            self._start(version)
            if until == "started":
                done = self._pending and self._pending[1].done() and self._pending[1]
                self._together(lambda: done and done.result())
                return
            self._read = version, self._take()
        if until == "loaded":
            (_, tensors), self._read = self._read, None
            self._together(lambda: load(tensors))

    def drop(self) -> None:
        """Releases a version that was read and not loaded. A read that is not finished fails, within a few seconds."""
        pending, self._pending, self._read = self._pending, None, None
        if pending and not pending[1].cancel() and not pending[1].done():
            self._dropped.set()
            self._close_reader()  # the next read attaches

    def in_any(self, value: bool) -> bool:
        """Returns whether a value is true in any process."""
        return [1] in self._gather(int(value))

    def close(self) -> None:
        """Closes the reader; a read that is not finished fails. Harmless to repeat."""
        self._is_closed = True
        self.drop()
        self._pool.shutdown()
        self._close_reader()  # also one that the thread has attached meanwhile

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _start(self, version: int) -> None:
        if self._pending and self._pending[0] != version:
            self.drop()
        if self._pending is None and self._is_source:
            self._dropped = Event()
            self._pending = version, self._pool.submit(self._fetch, version, self._dropped)

    def _fetch(self, version: int, dropped: Event) -> tuple[int, Tensors | IO[bytes]]:
        """Reads a version. Returns a hash of it and its history, and its tensors, or a file that others map."""
        if (reader := self._reader) is None:
            reader = self._reader = self._attach()
        if dropped.is_set():  # while there was no reader yet that `drop` could close
            raise UsageError(f"the read of version {version} was dropped")

        def use(pinned: PinnedVersion) -> tuple[int, Tensors | IO[bytes]]:
            history = f"{reader.run_id}-{pinned.rollback_count}"
            if reader.newest()[1] != history:  # the values may be those before or after
                raise UnavailableError("the run was rolled back or deleted when the version was pinned")
            number = int.from_bytes(sha256(f"{history}-{version}".encode()).digest()[:7])
            return number, dict(pinned.values()) if self._is_alone else self._share(pinned)

        found = reader._reading(version, use)
        with suppress(ShardwellError):
            reader.newest()  # so that `shardwell readers` shows the version
        return found

    def _share(self, pinned: PinnedVersion) -> IO[bytes]:
        shared = self._memory()
        try:
            write_file(shared, {stored.name: stored.meta for stored, _ in pinned.choose(None)}, pinned.values(), {})
            shared.flush()
        except BaseException:
            shared.close()  # the error's traceback refers to it
            raise
        return shared

    def _take(self) -> Tensors:
        """Returns what was read."""
        pending = self._pending
        number, own = self._together(lambda: pending[1].result() if pending else (0, None))
        self._pending = None
        shared = None if own is None or isinstance(own, dict) else own

        def take() -> Tensors:
            if len({number for _, number in offers if number}) > 1:
                raise UnavailableError("hosts have read different histories of the run: update again")
            tensors = own if isinstance(own, dict) else map_tensors(Path(f"{self._folder}/{offers[self._source][0]}"))
            if self._check:
                self._check(tensors)
            return tensors

        with shared or nullcontext():
            offers = self._gather(shared.fileno() if shared else -1, number)
            tensors = self._together(take)  # also a barrier: then the file is closed, and the mapping remains
        self._check = None
        return tensors

    def _together(self, function: Callable[[], Result]) -> Result:
        """Returns ``function()`` if it succeeds in all processes. Otherwise raises in all of them."""
        failure: BaseException | None = None
        try:
            result = function()
        except BaseException as error:  # also Ctrl-C: the others wait in the same call
            logger.error("the version was not loaded: %s", error)
            failure = error
        if self.in_any(failure is not None):
            self.drop()
            raise failure or UnavailableError("another process could not load the version: its log says why")
        return result

    def _memory(self) -> IO[bytes]:
        """Returns a file in memory, which other processes of this user can map, and which ends with this process."""
        return os.fdopen(os.memfd_create(self._memory_name), "wb") if CAN_MAP else TemporaryFile()

    def _gather(self, *values: int) -> list[list[int]]:
        """Returns the values of all processes, by rank."""
        own = torch.tensor(values)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(gathered, own, group=self._group)
        except RuntimeError as error:
            raise UnavailableError("a process of the group is gone or late: start the group again") from error
        return [each.tolist() for each in gathered]


def _can_map(pid: int, descriptor: int, token: int) -> bool:
    """Returns whether this process can map a file of a process. On another host, the pid may be another process's."""
    try:
        path = f"/proc/{pid}/fd/{descriptor}"
        return f"shardwell-{token:x}" in os.readlink(path) and os.access(path, os.R_OK)
    except OSError:
        return False


def attach(
    address: str | None = None,
    run: str | None = None,
    *,
    token_file: str | None = None,
    tls: TlsOptions | None = None,
    timeout_s: float = 60.0,
    gather_dtype: str = "float32",
    delta_cache_bytes: int = 0,
    name: str = "",
    hold_s: float = 0.0,
) -> Reader:
    """Attaches to a run to read its weights during training, without joining it.

    >>> with shardwell.attach("localhost:50051", run="gpt") as reader:
    ...     version = reader.follow(model)

    Args:
        address: The coordinator's host:port, or those of all coordinators with commas. Default:
            ``SHARDWELL_ADDRESS``, else localhost:50051.
        run: Name of the run. Default: ``SHARDWELL_RUN``, else the only run of the cluster.
        token_file: File with the cluster's key or a token. Default: as in ``join``.
        tls: TLS of the connections to the cluster. Default: as in ``join``.
        timeout_s: Deadline of each read in seconds.
        gather_dtype: Dtype in which 32-bit weights travel, which rounds them: ``float32``, ``bfloat16``, ``float16``,
            ``int8`` or ``float8``. Buffers are never rounded.
        delta_cache_bytes: Bytes of memory in which the reader keeps 16-bit weights, so that the servers send only what
            has changed since it read them.
        name: Name of the reader in ``shardwell readers``. Default: this host and process.
        hold_s: Seconds for which a run with ``join(max_reader_lag=...)`` waits for this reader to read a version, at
            most 86400. Longer than any time between two reads. Default: the run does not wait for it.

    Raises:
        NotFoundError: The run does not exist.
        StepStateError: The run has no weights yet.
        UnavailableError: The coordinator cannot be reached.
        UsageError: An argument is invalid, or the cluster has several runs and none is named.
    """
    if not timeout_s > 0:
        raise UsageError(f"attach(timeout_s={timeout_s!r}): expected more than 0")
    if gather_dtype not in GATHER_NAMES:
        raise UsageError(f"attach(gather_dtype={gather_dtype!r}): expected one of {', '.join(GATHER_NAMES)}")
    if not 0 <= hold_s <= 86400:
        raise UsageError(f"attach(hold_s={hold_s!r}): expected 0 to 86400 seconds")
    if delta_cache_bytes < 0:
        raise UsageError(f"attach(delta_cache_bytes={delta_cache_bytes!r}): expected at least 0")
    address = address or variables().get("SHARDWELL_ADDRESS") or "localhost:50051"
    coordinator = CoordinatorClient(address, find_credentials(address, token_file, tls))
    try:
        return Reader(
            coordinator,
            run or variables().get("SHARDWELL_RUN") or _only_run(coordinator, timeout_s),
            timeout_s,
            gather_dtype=gather_dtype,
            delta_cache_bytes=delta_cache_bytes,
            name=name,
            hold_s=hold_s,
        )
    except BaseException:
        coordinator.close()
        raise


def _only_run(coordinator: CoordinatorClient, timeout_s: float) -> str:
    """Returns the name of the only run of a cluster."""
    answer = coordinator.call("ListRuns", coordinator_pb2.ListRunsRequest(), timeout_s=timeout_s)
    names: list[str] = [summary.run for summary in answer.runs]
    if not names:
        raise NotFoundError("the cluster has no run: start the training first")
    if len(names) > 1:
        raise UsageError(
            f"the cluster has {len(names)} runs: pass attach(run=), such as {listed([repr(name) for name in names])}"
        )
    return names[0]


def _targets(
    model: nn.Module, pinned: PinnedVersion, chosen: Sequence[Chosen], rename: Rename, *, cast: bool, is_part: bool
) -> list[tuple[StoredParameter, torch.Tensor]]:
    """Pairs chosen tensors of the run with those of a model that have their names; see ``Reader.follow``.

    Raises UsageError if names, shapes or dtypes differ. If ``is_part``, the model may have other tensors.
    """
    tensors, stored = _named_tensors(model), [each for each, _ in chosen]
    wanted = [(each, map(rename, each.names)) for each in stored]
    pairs, problems = _paired(tensors, wanted, cast=cast, is_part=is_part)
    if problems:  # `rename` may be for the names in the run, which readers had before they had those in the model
        wanted = [(each, map(rename, each.names_in_run)) for each in stored]
        by_run, others = _paired(tensors, wanted, cast=cast, is_part=is_part)
        if not others:
            return by_run
        raise UsageError(f"the model does not fit run {pinned.run!r}: {problems}")
    return pairs


def _paired(
    tensors: Mapping[str, torch.Tensor],
    wanted: Iterable[tuple[StoredParameter, Iterable[str | None]]],
    *,
    cast: bool,
    is_part: bool,
) -> tuple[list[tuple[StoredParameter, torch.Tensor]], str]:
    """Pairs what a run stores with the tensors of a model. Returns the pairs, and what differs, or an empty text."""
    pairs, unknown, differing, found = [], [], [], set[str]()
    sources = dict[int, StoredParameter]()
    for stored, renamed in wanted:
        known = [name for name in renamed if name is not None]
        names = [name for name in known if name in tensors]
        found.update(names)
        if known and not names:
            unknown.append(repr(stored.name))
        for tensor in {id(tensors[name]): tensors[name] for name in names}.values():
            pairs.append((stored, tensor))
            if sources.setdefault(id(tensor), stored) is not stored:
                differing.append(_separate(sources[id(tensor)].name, stored.name))
            shape = tensor.shape if stored.is_reshaped else stored.meta.shape
            how = differences(shape, stored.meta.dtype, tensor, "run", cast=cast)
            differing += [f"{names[0]!r} is {each}" for each in how]
    missing = [repr(name) for name in tensors if name not in found and not is_part]
    problems = [
        *([f"the model lacks {listed(unknown)}"] if unknown else []),
        *([f"the run lacks {listed(missing)}"] if missing else []),
        *([listed(differing)] if differing else []),
    ]
    advice = ". To use other names than the run's, pass rename=" if unknown and missing else ""
    return pairs, "; ".join(problems) + advice


def _separate(first: str, second: str) -> str:
    return (
        f"{first!r} and {second!r} are one tensor in the model and two in the run, which trained them apart (pipeline "
        "stages keep a tie if split_model or ModelSplit.from_modules makes them)"
    )


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers by all their names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state, which the run does not store
        if owner_of(tensor) is not None:
            raise UsageError(f"parameter {name!r} is sharded: pass a plain model, built without fully_shard")
        if is_lazy(tensor) or tensor.is_meta:
            raise UsageError(f"{name!r} has no memory yet: build the model on a device, not on meta or lazily")
        parts = inner_tensors(tensor) if has_parts(tensor) else ()
        tensors |= {f"{name}.{part}": getattr(*held) for part, *held in parts} or {name: tensor}
    return tensors
