"""A trainer's session: joins a run, leads it from step to step, and leaves it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Self
from weakref import WeakSet

from torch.distributed.device_mesh import DeviceMesh

from shardwell.credentials import find_credentials
from shardwell.memory.allocator import share_heaps
from shardwell.module import guards, torch_patches
from shardwell.module.memory_report import MemoryReport, measure
from shardwell.module.strategy import BackwardPrefetch
from shardwell.module.units import Units
from shardwell.seeds import derive_seed
from shardwell.session import open_sessions
from shardwell.session.config import JoinConfig, TransferOptions, WaitOptions
from shardwell.session.coordinator_client import CoordinatorClient
from shardwell.session.membership import Membership
from shardwell.session.mesh import device_mesh
from shardwell.session.private_cluster import open_private_cluster
from shardwell.session.progress import StepProgress
from shardwell.session.run_buffers import RunBuffers
from shardwell.session.run_state import TrackedObjects
from shardwell.session.run_store import RunStore
from shardwell.session.step import LoopPosition, Step
from shardwell.session.step_end import StepEnd, StepUpdate
from shardwell.session.step_in_flight import StepInFlight
from shardwell_wire.errors import UsageError
from shardwell_wire.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)


class Session:
    """One trainer's part in a run, from ``join``.

    Used by one training thread. A context manager; closed at exit of the process otherwise.

    Attributes:
        units: The sharded units of this process.
        world: The grid of logical ranks.
        seed: The run's seed.
        store: Where their values are.
        in_flight: The step that is computed now.
        optimizers: The optimizers of its units.
    """

    def __init__(self, config: JoinConfig) -> None:
        share_heaps()
        self.config = config
        self._cluster = None if config.address else open_private_cluster(config)
        address = config.address or (self._cluster.address if self._cluster else "")
        credentials = self._cluster.credentials if self._cluster else find_credentials(address, config.token_file)
        self._coordinator = CoordinatorClient(address, credentials)
        self._closed = False
        try:
            self._membership = Membership(config, self._coordinator)
        except BaseException:
            self._close_connections()
            raise
        joined = self._membership.joined
        self.world, self.seed = self._membership.world, self._membership.seed
        progress = StepProgress(joined.committed_step, joined.work.items)
        self.store = RunStore(self._membership, config, progress)
        self._membership.transport_reports = self.store.transport_reports
        self.units = Units(
            self.store,
            prefetch_bytes=config.transfers.prefetch_bytes,
            keep_bytes=config.transfers.keep_bytes,
            max_gathers_in_flight=config.transfers.max_gathers_in_flight,
            backward_prefetch=BackwardPrefetch(config.transfers.backward_prefetch),
            name_prefix=self._name_prefix(),
            init_seed=derive_seed(self.seed, "stage", self.pp_rank or 0),
        )
        self._tracked = TrackedObjects(joined.state.tracked_json)
        self._buffers = RunBuffers(lambda: self.units.named_modules, self.store.buffers, joined.state)
        self.in_flight = StepInFlight(
            StepEnd(self._membership), self.store, self.units, self._buffers, self._tracked, progress
        )
        self._loop: LoopPosition | None = None
        self.optimizers: WeakSet[Any] = WeakSet()
        open_sessions.note_opened(self)
        self._tell_place()

    # ---- who and where ----

    @property
    def trainer(self) -> str:
        """This trainer's name in the run."""
        return self._membership.trainer

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._membership.run

    @property
    def run_id(self) -> str:
        """Random id of the run: another run of the same name has another one."""
        return self._membership.identity.run_id

    @property
    def step(self) -> int:
        """Committed steps so far."""
        return self.in_flight.progress.number

    @property
    def global_rank(self) -> int | None:
        """The logical rank this trainer plays; the lowest of several; None for a spare."""
        return self._rank_assignments[0].global_rank if self._rank_assignments else None

    @property
    def dp_rank(self) -> int | None:
        """Its place along the data axis; None for a spare."""
        return self._rank_assignments[0].dp_rank if self._rank_assignments else None

    @property
    def tp_rank(self) -> int | None:
        """Its place along the tensor axis; None for a spare."""
        return self._rank_assignments[0].tp_rank if self._rank_assignments else None

    @property
    def pp_rank(self) -> int | None:
        """Its place along the pipeline axis; None for a spare."""
        return self._rank_assignments[0].pp_rank if self._rank_assignments else None

    @property
    def num_ranks(self) -> int:
        """Logical ranks this trainer plays: 0 for a spare."""
        return len(self._rank_assignments)

    @property
    def _rank_assignments(self) -> list[common_pb2.Coordinates]:
        return [rank_assignment.coordinates for rank_assignment in self._membership.rank_assignments]

    def _tell_place(self) -> None:
        if self._rank_assignments:
            logger.info(
                "trainer %r plays logical ranks %s",
                self.trainer,
                [rank_assignment.global_rank for rank_assignment in self._rank_assignments],
            )
        elif (former := open_sessions.trainer_of(self.run_id)) is not None:
            self.store.spare_hint = (
                f"this process has joined run {self.run!r} before, as trainer {former!r}. Use that session, or "
                "close it before you join again"
            )
            logger.warning("trainer %r is a spare: %s", self.trainer, self.store.spare_hint)
        else:
            logger.warning(
                "trainer %r is a spare: each of the %d logical ranks of run %r has a trainer. step.batches yields "
                "nothing here until one of them is lost",
                self.trainer,
                self.world.size,
                self.run,
            )

    def _name_prefix(self) -> str:
        """Ranks that differ in tp or pp hold different units of the same modules."""
        if self.world.tp == self.world.pp == 1 or not self._rank_assignments:
            return ""
        return f"pp{self.pp_rank}.tp{self.tp_rank}."

    # ---- the loop ----

    def steps(self, num_steps: int, *, optimizer_steps: int = 1) -> Iterator[Step]:
        """Yields the steps of the run up to ``num_steps`` in all, from the committed one on.

        A run that has so many already is not trained further, and a warning is logged.

        Args:
            num_steps: How often the loop body runs in the whole run, on one trainer that is never interrupted.
            optimizer_steps: How often the body calls ``step()`` of its optimizers. Each call is a commit of the run. A
                trainer that joins between two of them goes through the committed ones again: no batch comes, and
                ``optimizer.step()`` returns at once.

        Raises:
            UsageError: The loop body called ``optimizer.step()`` less or more often.
        """
        if optimizer_steps < 1:
            raise UsageError(f"steps(optimizer_steps={optimizer_steps!r}): expected at least 1")
        if self.step >= num_steps * optimizer_steps:
            logger.warning(
                "run %r has committed %d steps, so steps(%d) has none left to train: ask for more steps, or start a "
                "new run under another name",
                self.run,
                self.step,
                num_steps,
            )
        first = self.step - 1 if self._tracked.restored and self.step else self.step
        loop: LoopPosition | None = None
        try:
            for number in range(first // optimizer_steps, num_steps):
                loop = self._loop = LoopPosition(number, optimizer_steps)
                self.in_flight.enter()
                yield Step(self, loop)
                self.in_flight.settle()
                loop.require_end()
        finally:
            if self._loop is loop:  # else another loop has begun
                self._loop = None

    def track(self, **objects: Any) -> None:
        """Stores the state of objects (LR schedulers, counters) with every commit.

        Objects that the run already has state of are restored; ``steps`` then begins with the end of
        the last committed step: no batch comes, ``optimizer.step()`` returns at once, and what follows
        it in the loop body, such as ``scheduler.step()``, brings the objects up to date.

        Args:
            **objects: Anything with ``state_dict`` and ``load_state_dict`` whose state is made of
                numbers, strings, lists and maps, by a name of its own.

        Raises:
            UsageError: A state has something else in it.
        """
        self._tracked.track(objects)

    @property
    def loop_step(self) -> int:
        """The step that ``optimizer.step()`` is about: the committed one when it is only gone through."""
        return self.step if self._loop is None else self._loop.step

    def commit(self, update: StepUpdate) -> bool:
        """Commits the loop's step; returns whether parameters were updated. See ``StepInFlight.commit``."""
        loop = self._loop
        if loop is not None:
            loop.require_open()
        updated = self.in_flight.commit(self.loop_step, update)
        if loop is not None:
            loop.commits += 1
        return updated

    def note_buffers(self) -> None:
        """The model is complete: rank 0's buffers are what the run starts from; others take over their values."""
        guards.check_batch_norm([module for _, module in self.units.named_modules], self)
        progress = self.in_flight.progress
        self._buffers.declare(progress.number, has_work=bool(progress.items))

    # ---- looking and leaving ----

    def stats(self) -> dict[str, float]:
        """What this trainer moved and waited for since it joined.

        Returns:
            Counts, bytes and seconds: ``gather_count``, ``gathered_bytes`` (copied to here; what is read in
            place is not), ``gather_wait_s`` (training thread waiting for weights), ``push_count``,
            ``pushed_bytes``, ``push_wait_s``, ``received_bytes`` and ``sent_bytes`` (as they travelled),
            ``cache_hit_bytes`` (found in this host's cache, with ``host_cache_bytes``), ``node_shared_bytes`` (what
            others of the ``node_group`` fetched),
            ``finish_wait_s`` (for other trainers' work), ``commit_wait_s``, ``live_unit_bytes`` and
            ``peak_unit_bytes`` (weights held here).
        """
        return {
            **self.store.stats,
            **self.in_flight.wait_s,
            "live_unit_bytes": self.units.live_bytes,
            "peak_unit_bytes": self.units.peak_bytes,
        }

    def memory(self) -> MemoryReport:
        """What this trainer holds of its sharded modules now and held at most, unit by unit; prints as a table."""
        return measure(self.units, self.store.stats)

    def transports(self) -> list[dict[str, Any]]:
        """How this trainer reaches each shard server, one entry per server.

        Returns:
            ``server`` (host:port), ``transport`` (``shm``, ``socket`` or ``grpc``), ``bytes_per_s`` (measured when it
            was opened), ``received_bytes`` and ``sent_bytes`` (streamed, as they travelled).
        """
        return self.store.transports

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """A ``torch.distributed`` mesh with axes dp, tp, pp in the run's order; see ``mesh.device_mesh``."""
        return device_mesh(self, device_type)

    def exchange_address(self, name: str, address: str | None = None) -> str:
        """Publishes an address under a name, or waits until another trainer of the run does."""
        return self._membership.exchange_address(self.step, name, address)

    def explain_stall(self) -> list[str]:
        """What the run is waiting for, and on whom: one line each."""
        request = coordinator_pb2.ExplainStallRequest(run=self.run)
        return list(self._coordinator.call("ExplainStall", request).waiting_for)

    def close(self) -> None:
        """Leaves the run, so that its work goes to others at once; harmless to repeat."""
        if self._closed:
            return
        self._note_closed()
        self._membership.leave()
        self.store.close()
        self._close_connections()

    def disown(self) -> None:
        """This process was forked from the trainer that joined: here the session is closed, there it goes on."""
        self._note_closed()
        self._membership.disown()

    def _note_closed(self) -> None:
        self._closed = True
        open_sessions.note_closed(self)
        torch_patches.unwatch(self.units)

    def _close_connections(self) -> None:
        self._coordinator.close()
        if self._cluster is not None:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(
    address: str | None = None,
    *,
    run: str | None = None,
    world: World | None = None,
    seed: int | None = None,
    min_trainers: int | None = None,
    trainer: str | None = None,
    host: str | None = None,
    global_rank: int | None = None,
    num_layers: int | None = None,
    token_file: str | None = None,
    transfers: TransferOptions | None = None,
    waits: WaitOptions | None = None,
) -> Session:
    """Joins a run as a trainer; returns when enough trainers have joined.

    An argument that is not passed is read from the environment variable ``SHARDWELL_`` + its name in capitals, such as
    ``SHARDWELL_ADDRESS`` and ``SHARDWELL_RUN``; the world from ``SHARDWELL_DP``, ``SHARDWELL_TP``, ``SHARDWELL_PP`` and
    ``SHARDWELL_ORDER``. ``shardwell launch`` sets these variables. Without them, RANK and WORLD_SIZE of torchrun count.

    Args:
        address: The coordinator's host:port. Default: start a private local cluster that ends with this process.
        run: Name of the run. Default: ``default``.
        world: The grid of logical ranks. Default: one rank.
        seed: Seed of the data order and of dropout. Default: 0.
        min_trainers: Trainers that must have joined before the first step. Default: one per logical rank. With fewer
            trainers than ranks, some trainers play several ranks. Trainers beyond the ranks are spares.
        trainer: Name of this trainer. A restarted trainer with the same name gets its ranks back. Default: the
            coordinator chooses a name.
        host: Name of this host. Default: the machine's host name.
        global_rank: Logical rank to request. Default: any.
        num_layers: Number of layers to split over pipeline stages, checked against the world. Default: not checked.
        token_file: File with the cluster's token, readable by its user only. Default: the token of this user's local
            cluster at the address, else of the file in ``SHARDWELL_TOKEN_FILE``.
        transfers: How weights and gradients travel.
        waits: How long to wait for other processes.

    Raises:
        RunMismatchError: The run exists with another world, seed or min_trainers.
        WorldError: The world is invalid, or does not fit ``min_trainers``, ``num_layers`` or the launcher.
        DuplicateError: A live trainer has this name or plays the requested rank.
        DeadlineError: Too few trainers joined in time.
        UnavailableError: The coordinator cannot be reached.
        UnauthenticatedError: The cluster requires a token, and none or a wrong one was found.
        UsageError: An argument or variable has an invalid value.
    """
    return Session(JoinConfig.from_env(dict(locals())))
