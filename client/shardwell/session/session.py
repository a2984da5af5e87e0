"""``join``, and the session of a trainer in a run: yields the steps of the training loop, and leaves."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from shardwell.find_credentials import find_credentials
from shardwell.grid import replica
from shardwell.grid.devices import choose_device
from shardwell.grid.process_group import is_lost_peer
from shardwell.grid.replica import ReplicaGroup, import_first_uses
from shardwell.membership.membership import Membership
from shardwell.memory.buffers import share_heaps
from shardwell.module import guards, torch_patches
from shardwell.monitor.report import PerformanceReport, make_report
from shardwell.options import DEFAULT_RUN, JoinConfig, TransferOptions, WaitOptions
from shardwell.session.joining import announce, check_process, check_reachable, check_variables, describe_join, name_run
from shardwell.session.memory_report import MemoryReport, measure
from shardwell.session.private_cluster import open_private_cluster
from shardwell.step.step_commit import StepCommitter
from shardwell.step.step_state import StepState
from shardwell.store.model_names import model_names
from shardwell.store.run_store import RunStore
from shardwell.training.step_in_flight import StepInFlight
from shardwell.training.training import Training
from shardwell.training.training_step import Step, TrainingLoop
from shardwell.training.work_items import preemption
from shardwell.transport import service_client
from shardwell.transport.service_client import CoordinatorClient, save_checkpoint
from shardwell_wire.errors import ReplicaLostError, RunDeletedError, ShardwellError, StaleEpochError, UsageError
from shardwell_wire.model.topology import Consistency, World
from shardwell_wire.security.tls import TlsOptions
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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
    tls: TlsOptions | None = None,
    checkpoint_dir: str | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    backups: int | None = None,
    keep_versions: int | None = None,
    max_reader_lag: int | None = None,
    consistency: Consistency | None = None,
    resume: str | None = None,
    rewrap: bool | None = None,
    allow_gradient_differences: bool | None = None,
    reduction_groups: tuple[int, ...] | None = None,
    transfers: TransferOptions | None = None,
    waits: WaitOptions | None = None,
) -> Session:
    """Joins a run as a trainer; returns when enough trainers have joined.

    An argument that is not passed is read from the environment variable ``SHARDWELL_`` + its name in capitals, such as
    ``SHARDWELL_ADDRESS`` and ``SHARDWELL_RUN``; the world from ``SHARDWELL_DP``, ``SHARDWELL_CP``, ``SHARDWELL_TP``,
    ``SHARDWELL_PP`` and ``SHARDWELL_ORDER``. ``shardwell launch`` sets these variables. Without them, RANK and
    WORLD_SIZE of torchrun count, or the variables of mpirun or srun.

    Args:
        address: The coordinator's host:port, or those of all coordinators with commas. Default: start a private local
            cluster that ends with this process.
        run: Name of the run. A name that exists continues its run. Default: the name of the script without its suffix;
            on a private cluster ``default``.
        world: The grid of logical ranks. Default: one rank.
        seed: Seed of the data order and of dropout. Default: 0.
        min_trainers: Trainers that must have joined before the first step. Default: one per logical rank. With fewer
            trainers than ranks, some trainers play several ranks. Trainers beyond the ranks are spares.
        trainer: Name of this trainer. A restarted trainer with the same name gets its ranks back. Default: the
            coordinator chooses a name.
        host: Name of this host. Default: the machine's host name.
        global_rank: Logical rank to request. Default: any.
        num_layers: Number of layers to split over pipeline stages, checked against the world. Default: not checked.
        token_file: File with the cluster's key or a token of a trainer, readable by its user only. Default: the key of
            this user's local cluster at the address, else the token in ``SHARDWELL_TOKEN``, else the file in
            ``SHARDWELL_TOKEN_FILE``.
        tls: TLS of the connections to the cluster. Default: as ``SHARDWELL_TLS_CA``, ``SHARDWELL_TLS_CERT``,
            ``SHARDWELL_TLS_KEY``, ``SHARDWELL_TLS_SERVER_NAME`` and ``SHARDWELL_ENCRYPT`` say; without an authority,
            connections are not encrypted.
        checkpoint_dir: Folder of checkpoints: a path, or a URL such as ``s3://bucket/folder``. The coordinator and all
            shard servers must reach it, and their operator must allow it (``--checkpoint-root``). Checkpoints are
            written to ``checkpoint_dir/RUN/``. The newest value that a trainer passes counts. Default: unchanged; a new
            run writes no checkpoints.
        checkpoint_every: Number of commits between two checkpoints. 0: only on request. Default: as checkpoint_dir.
        keep: Number of checkpoints to keep; older ones are deleted. 0: all. Default: as checkpoint_dir.
        backups: Number of other servers that keep a copy of every shard, so that the loss of a server costs no step.
            The newest value that a trainer passes counts. Default: unchanged; a new run has none.
        keep_versions: Number of versions besides the newest that readers can read (``Reader.pin(version)``). Each takes
            memory of the size of the parameters on the shard servers, and a copy of them per step. Default: 0.
        max_reader_lag: How many versions a reader with ``attach(hold_s=...)`` may be behind when a step is committed:
            the commit waits for it. Default: training does not wait for readers.
        consistency: When gradients are applied: ``shardwell.SYNCHRONOUS`` (one commit for all ranks),
            ``shardwell.ASYNCHRONOUS`` (one commit per work item) or ``shardwell.BOUNDED_STALENESS(s)`` (likewise, with
            no rank more than ``s`` items ahead of the slowest). Only the first gives reproducible weights. Default:
            SYNCHRONOUS.
        resume: Checkpoint from which to create the run, if it does not exist: ``latest`` for the newest one of this
            run in ``checkpoint_dir`` (without any, the run starts at step 0), or the path or URL of one checkpoint.
            The world and the numbers of trainers and servers may differ from those at the time of the checkpoint.
        rewrap: Whether the model may be wrapped into other units than those of the checkpoint. With another ``cp``,
            ``tp`` or ``pp`` it always may. Default: False.
        allow_gradient_differences: Whether tensor-parallel ranks may compute different gradients of a parameter that
            all of them hold; that of rank 0 counts. Only for ranks on different hardware, or kernels that are not
            deterministic. Default: False, a difference is an error.
        reduction_groups: Order in which the gradients of data ranks are added: sizes of groups, innermost first, that
            multiply to dp. With ``(4, 2)``, the gradients of ranks 0 to 3 are added in rank order, then those of 4 to
            7, and then the two sums. Default: all gradients are added in rank order.
        transfers: How weights and gradients travel.
        waits: How long to wait for other processes.

    Raises:
        RunMismatchError: The run exists with another world, seed, min_trainers, consistency, reduction_groups,
            keep_versions or max_reader_lag; or the checkpoint has another seed, or the same dp and other
            reduction_groups. Or one of the two runs is asynchronous and the other is not.
        NotFoundError: The folder for checkpoints cannot be made.
        AccessError: The cluster's operator does not allow the folder of checkpoints or the checkpoint, or the servers
            have no permission to write there.
        InvalidRequestError: The servers do not support the folder for checkpoints.
        CapacityError: The disk for checkpoints is full.
        CorruptDataError: The checkpoint to resume from is damaged or does not exist.
        WorldError: The world is invalid, or does not fit ``min_trainers``, ``num_layers``, ``reduction_groups`` or the
            launcher.
        DuplicateError: A live trainer has this name or plays the requested rank.
        DeadlineError: Too few trainers joined in time.
        UnavailableError: The coordinator cannot be reached.
        TlsError: A certificate is refused, or only one end uses TLS.
        UnauthenticatedError: The cluster requires a token, and none or a wrong one was found.
        UsageError: An argument or variable has an invalid value.
    """
    given = dict(locals())
    check_process()
    check_variables()
    return Session(JoinConfig.from_env(given))


class Session:
    """One trainer's session in a run, from ``join``. A context manager. Without ``with``, closed at process exit.

    Used by one training thread.

    Attributes:
        world: The grid of logical ranks.
        seed: The run's seed.
        coordinator: Client of the coordinator, with this trainer's credentials.
        store: Stores the units on the shard servers.
        units: The sharded units of this process.
        optimizers: Optimizers of the session's parameters.
        state_owners: Which of them the optimizer state on the servers belongs to.
        monitor: Measures the steps.
        in_flight: The step in flight.
        loop: The training loop.
    """

    def __init__(self, config: JoinConfig) -> None:
        share_heaps()
        if not config.run:
            config = replace(config, run=name_run() if config.address else DEFAULT_RUN)
        self.config = config
        self._cluster = None if config.address else open_private_cluster(config)
        address = config.address or (self._cluster.address if self._cluster else "")
        credentials = (
            self._cluster.credentials if self._cluster else find_credentials(address, config.token_file, config.tls)
        )
        self.coordinator = CoordinatorClient(address, credentials)
        self._closed = False
        self._loop_thread: threading.Thread | None = None
        """The thread that has called ``steps``."""
        import_first_uses(config.world)
        self._collections = ExitStack()
        if config.world.replica_size > 1:  # before anything that refers to a model
            self._collections.enter_context(short_collections())
        try:
            self._membership = Membership(config, self.coordinator, partial(check_reachable, address))
        except BaseException:
            self._collections.close()
            self._close_connections()
            raise
        if self._cluster is not None:
            self._cluster.note_joined()
        joined = self._membership.joined
        self._replica = ReplicaGroup(self._membership, wait_limit_s=config.waits.wait_limit_s)
        self.world, self.seed = self._membership.world, self._membership.seed
        self.consistency = Consistency.from_proto(joined.config)
        self._state = StepState(
            joined.work.step,
            joined.work.items,
            position=joined.work.position,
            asynchronous=self.consistency.asynchronous,
            spare_hint=self._spare_hint(),
        )
        self.store = RunStore(self._membership, config, self._state)
        self._committer = StepCommitter(self._membership, allow_gradient_differences=config.allow_gradient_differences)
        self._start_training()
        service_client.watch(_disown_all)
        _open_sessions.add(self)
        atexit.register(self._leave_at_exit)
        self._log_ranks()
        announce(describe_join(joined, self.run, self.world))

    def _start_training(self) -> None:
        """Starts a training without a model, at the run's step."""
        transfers = self.config.transfers
        training = self._training = Training(
            self._membership, transfers, self._state, self.store, self._committer, self._replica
        )
        self.units, self.optimizers, self.state_owners = training.units, training.optimizers, training.state_owners
        self.monitor = training.monitor
        self.in_flight = StepInFlight(training)
        self.loop = TrainingLoop(self.in_flight, training)
        preemption.add(self.in_flight.items)

    def _end_training(self) -> None:
        """Ends what this process does for the model outside of the training thread."""
        preemption.remove(self.in_flight.items)
        torch_patches.unwatch(self.units.passes)

    # ---- this trainer ----

    def __repr__(self) -> str:
        ranks = [at.global_rank for at in self._ranks]
        state = "closed" if self._closed else f"step={self.step}"
        return f"Session(run={self.run!r}, trainer={self.trainer!r}, ranks={ranks}, {state}, world={self.world})"

    @property
    def trainer(self) -> str:
        """Name of this trainer in the run."""
        return self._membership.trainer

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._membership.run

    @property
    def run_id(self) -> str:
        """Random id of the run. A later run of the same name has another id."""
        return self._membership.identity.run_id

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._state.number

    @property
    def global_rank(self) -> int | None:
        """Logical rank of this trainer, or its lowest one; None for a spare."""
        return self._ranks[0].global_rank if self._ranks else None

    @property
    def dp_rank(self) -> int | None:
        """Coordinate of ``global_rank`` on the data axis; None for a spare."""
        return self._ranks[0].dp_rank if self._ranks else None

    @property
    def tp_rank(self) -> int | None:
        """Coordinate of ``global_rank`` on the tensor axis; None for a spare."""
        return self._ranks[0].tp_rank if self._ranks else None

    @property
    def pp_rank(self) -> int | None:
        """Coordinate of ``global_rank`` on the pipeline axis; None for a spare."""
        return self._ranks[0].pp_rank if self._ranks else None

    @property
    def cp_rank(self) -> int | None:
        """Coordinate of ``global_rank`` on the context axis; None for a spare."""
        return self._ranks[0].cp_rank if self._ranks else None

    @property
    def num_ranks(self) -> int:
        """Number of logical ranks that this trainer plays; 0 for a spare."""
        return len(self._ranks)

    @property
    def _ranks(self) -> list[common_pb2.Coordinates]:
        return [assignment.coordinates for assignment in self._membership.rank_assignments]

    def _spare_hint(self) -> str:
        """Returns advice for a spare whose process plays ranks of the same run in another session."""
        if self._ranks or (former := _trainer_of(self.run_id)) is None:
            return ""
        return (
            f"this process has joined run {self.run!r} before, as trainer {former!r}. Use that session, or "
            "close it before you join again"
        )

    def _log_ranks(self) -> None:
        if self._ranks:
            logger.info("trainer %r plays logical ranks %s", self.trainer, [at.global_rank for at in self._ranks])
        elif hint := self._spare_hint():
            logger.warning("trainer %r is a spare: %s", self.trainer, hint)
        else:
            logger.warning(
                "trainer %r is a spare: each of the %d logical ranks of run %r has a trainer. step.batches yields "
                "nothing until a trainer is lost, so a loss that is computed in it is unset: print step.means",
                self.trainer,
                self.world.size,
                self.run,
            )

    # ---- the loop ----

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(Step, name) and not hasattr(Session, name):
                raise AttributeError(f"a Session has no {name!r}: use step.{name} in `for step in session.steps(...)`")
            return object.__getattribute__(self, name)  # raises the error that led here

    def steps(
        self, num_steps: int | DataLoader[Any], *, epochs: int | None = None, optimizer_steps: int = 1
    ) -> Iterator[Step]:
        """Yields the steps of the run from the committed step up to step ``num_steps``.

        >>> for step in session.steps(loader, epochs=3):
        ...     for batch in step.batches(loader):

        Yields nothing and logs a warning if the run has committed that many steps. Yields a step again if a shard
        server or this trainer's membership was lost between the loop over ``step.batches`` and the commit. Tracked
        objects then have the state with which the iteration began.

        Args:
            num_steps: Iterations of the loop body in the whole run, counted for a trainer that is never interrupted. A
                ``DataLoader`` stands for all steps of its epochs; ``batch_size`` counts samples of one data rank.
            epochs: Epochs of the loader in the whole run. ``step.epoch`` and ``step.ends_epoch`` count them.
            optimizer_steps: Calls of ``optimizer.step()`` in the loop body. Each call is a commit of the run. A trainer
                that joins between two calls repeats the iteration: gradients of the committed part are dropped, and
                ``optimizer.step()`` returns its commit.

        Raises:
            UsageError: The loop body called ``optimizer.step()`` less or more often; the loader has no known length; or
                this trainer is a spare, and this thread trains for a trainer with a rank.
            RunMismatchError: Another trainer of the run divides its model differently (schedule, stages, styles).
        """
        if self._closed:
            self._membership.check()
        self._loop_thread = threading.current_thread()
        has_steps = not isinstance(num_steps, int) or self.step < num_steps * optimizer_steps
        if not self._ranks and any(
            other.run_id == self.run_id and other.num_ranks and other._loop_thread is self._loop_thread and has_steps
            for other in list(_open_sessions)
        ):
            raise UsageError(f"trainer {self.trainer!r} is a spare and would wait forever: {self._spare_hint()}")
        while not self._training.plan_report.send(self.step):
            self.in_flight.rejoining.join_again()
        return self.loop.steps(num_steps, epochs, optimizer_steps)

    def track(self, **objects: Any) -> None:
        """Stores the state of objects, such as LR schedulers and counters, with every commit.

        At the end of the loop body, the state is stored again. If the run has stored state of an object, the object is
        restored. If the run was interrupted between ``optimizer.step()`` and the end of the loop body, ``steps`` then
        starts with the last committed step: gradients are dropped, ``optimizer.step()`` restores the objects and
        returns the commit, and the rest of the loop body, such as ``scheduler.step()``, updates them.

        Args:
            **objects: Objects with ``state_dict`` and ``load_state_dict``, by a unique name. Their state consists of
                numbers, strings, lists and maps.

        Raises:
            UsageError: The state of an object has values of another type.
        """
        if self.consistency.asynchronous:
            raise UsageError(
                f"track({', '.join(objects)}) in a run with consistency={self.consistency}: each work item is "
                "committed by itself, so no commit has the state of all trainers. Compute such state from step.number"
            )
        self._training.tracked.track(objects)

    def tracks_scheduler_of(self, optimizer: Any) -> bool:
        """True if a tracked object belongs to an optimizer, such as its LR scheduler."""
        return self._training.tracked.has_owner(optimizer)

    def declare_buffers(self) -> None:
        """Declares the buffers of the complete model, and the names in it of everything that the run stores.

        The run starts with rank 0's buffers, which all others load.
        """
        guards.check_batch_norm([module for _, module in self.units.named_modules], self)
        buffers = self._training.buffers
        self.store.outlasting_lapses(lambda: buffers.declare(self._state.number, has_work=bool(self._state.items)))
        buffers.find_model_names = partial(model_names, self.units)
        names = model_names(self.units)
        self.units.set_model_names(names)
        self.store.set_model_names(names)

    # ---- inspection ----

    def stats(self) -> dict[str, float]:
        """Returns counts, bytes and seconds since this trainer joined.

        Returns:
            ``gather_count``, ``gathered_bytes`` (copied to this trainer), ``in_place_bytes`` (read in place),
            ``gather_wait_s`` (the training thread waited for weights), ``push_count``, ``pushed_bytes``,
            ``push_wait_s``, ``push_copy_s`` (started pushes, which copies gradients to shared memory),
            ``received_bytes`` and ``sent_bytes`` (in wire dtypes), ``corrupt_transfer_count`` (transfers whose bytes
            arrived with a wrong checksum, and were repeated), ``cache_hit_bytes`` (found in the host cache),
            ``delta_cache_bytes`` (memory of the kept streams), ``delta_stream_bytes`` and ``delta_received_bytes``
            (streams that were fetched with deltas: their size, and what was received), ``delta_ratio`` (of these two, 1
            without deltas), ``delta_reused_bytes`` (found in kept streams),
            ``node_shared_bytes`` (fetched by other trainers of the node group), ``node_summed_bytes`` (gradients of
            other trainers that this one has added), ``finish_wait_s`` (waited for other trainers' work),
            ``norm_wait_s``, ``commit_wait_s``, ``partition_update_s`` (part of ``commit_wait_s``: updated optimizer
            partitions), ``live_unit_bytes``, ``peak_unit_bytes`` and ``freed_unit_bytes`` (memory of gathered weights).
        """
        return self._training.stats()

    def report(self, last: int = 50) -> PerformanceReport:
        """Returns where the time of the last steps went, what slows them down, and advice. Prints as text.

        The first step after ``join`` is not measured.

        Args:
            last: Number of steps to report. The session remembers 1024 steps.

        Raises:
            UsageError: ``last`` is not positive.
        """
        if last < 1:
            raise UsageError(f"report(last={last!r}): expected at least 1")
        return make_report(self.monitor.steps(last), self._training.describe_setup())

    def count(self, *, tokens: int = 0, samples: int = 0) -> None:
        """Counts tokens or samples that this trainer computes in the step in flight, for the rates in ``report``.

        Samples of a dataset, ``step.batches(dataset, batch_size=...)``, are counted without this call.

        Raises:
            UsageError: A number is negative.
        """
        self.monitor.count(tokens=tokens, samples=samples)

    def memory(self) -> MemoryReport:
        """Returns the current and the peak memory of the sharded modules by unit. Prints as a table."""
        return measure(self.units, self.store.stats)

    def transports(self) -> list[dict[str, Any]]:
        """Returns the transport to each shard server.

        Returns:
            ``server`` (host:port), ``transport`` (``shm``, ``socket`` or ``grpc``), ``bytes_per_s`` (measured when the
            transport was opened), ``received_bytes`` and ``sent_bytes`` (streamed, in wire dtypes).
        """
        return self.store.servers.describe()

    def save_checkpoint(self, *, wait: bool = False) -> str:
        """Saves a checkpoint of the newest committed version. Training goes on while the servers write it.

        Args:
            wait: Return when the checkpoint is complete. Otherwise it is complete later, or an event and a warning of
                the coordinator say why it failed.

        Returns:
            Path or URL of the checkpoint, for ``join(resume=)`` and ``open_checkpoint``.

        Raises:
            StepStateError: The run has no ``checkpoint_dir``, or no values yet.
            UnavailableError: The checkpoint could not be written, as far as this was known; or an earlier checkpoint
                was still being written after ``wait_limit_s``.
        """
        call = partial(self._membership.call, member=False)  # a rollback ends the membership, not the run
        *_, progress = save_checkpoint(call, self.run, run_id=self.run_id, wait=wait)
        return progress.url

    def publish(self, name: str, *, version: int | None = None) -> int:
        """Names a version. It stays readable under the name until ``shardwell publish --remove``.

        Needs ``join(keep_versions=...)``: published versions use the memory of the kept ones, so with each of them one
        unpublished older version less is kept.

        Args:
            name: The name, for ``Reader.pin(name)``. May stand for another version already, which loses it.
            version: Number of committed steps: the newest version, or one that the run keeps. Default: the newest.

        Returns:
            The version.

        Raises:
            VersionGoneError: The run does not keep the version any more.
            CapacityError: All versions that the run keeps are published under other names.
        """
        request = coordinator_pb2.PublishVersionRequest(run=self.run, name=name, version=version)
        return int(self.coordinator.call("PublishVersion", request).version)

    def explain_stall(self) -> list[str]:
        """Returns what the run waits for, one line per reason."""
        request = coordinator_pb2.ExplainStallRequest(run=self.run)
        return list(self.coordinator.call("ExplainStall", request).waiting_for)

    # ---- devices and process groups ----

    def device(self, device_type: str | None = None, *, shared: bool = False) -> torch.device:
        """Chooses the device that this trainer computes on, makes it current, and returns it.

        The index is LOCAL_RANK, which ``shardwell launch`` and torchrun set, or that of srun or mpirun. A trainer that
        sees one GPU only takes this one, and a current device that the script has set before stays. Without such a
        variable, it is the first GPU that no other trainer of the run uses. The trainer reports its GPU, and
        ``shardwell world RUN`` shows it.
        ``replica_mesh`` and ``device_mesh`` choose the device likewise.

        Args:
            device_type: ``cuda``, ``cpu`` or another type of torch. Default: ``cuda`` if there is a GPU, else ``cpu``.
            shared: True if several trainers may use the device. All of them pass True.

        Raises:
            UsageError: There is no such device, or another trainer of the run uses it.
        """
        if device_type is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return choose_device(self._membership, device_type, position=self.global_rank or 0, shared=shared)

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Returns a mesh with the axes ``dp``, ``tp``, ``pp`` in the run's order, and ``cp`` if it is above 1.

        Creates the default process group of ``torch.distributed`` if there is none. The trainer of logical rank 0 hosts
        its store, at ``join(host=)`` if this is an address of its machine, or else at the address from which it reaches
        the coordinator.

        Args:
            device_type: Device type of the mesh. ``cpu`` uses gloo, ``cuda`` NCCL. The device is that of ``device``.

        Raises:
            UsageError: This trainer plays no logical rank or several; the default process group does not consist of
                the run's logical ranks, such as that of ``replica_mesh``; or as ``device``.
            DeadlineError: Other trainers did not call in time.
        """
        wait_limit_s = self.config.waits.wait_limit_s
        return replica.device_mesh(self._membership, self.step, device_type=device_type, wait_limit_s=wait_limit_s)

    def replica_mesh(self, device_type: str = "cpu", *, backend: str | None = None) -> DeviceMesh:
        """Returns a mesh of this trainer's replica, with the axes ``tp`` and ``pp`` of tensor and pipeline parallelism.

        With context parallelism, the mesh has the axes ``cp``, ``tp`` and ``pp``.

        Creates the default process group of ``torch.distributed``, which spans the trainers of one replica: no group
        spans the world, so a lost trainer breaks its own replica only. All trainers of the replica call it. If they
        have changed since the last call, the group is formed again, and modules that use the old mesh are unusable.
        ``run_replica`` calls the function that builds the modules again.

        Args:
            device_type: Device type of the mesh. The device is that of ``device``.
            backend: Backend of the process group. Default: ``nccl`` for ``cuda``, otherwise ``gloo``. With ``gloo`` on
                ``cuda``, such as in tests, several trainers may share one GPU.

        Raises:
            UsageError: This trainer plays no logical rank or several, a default process group exists, or the backend
                does not serve the device type; or as ``device``.
            DeadlineError: The other trainers of the replica did not call in ``wait_limit_s``.
        """
        while True:
            epoch, mesh = self._replica.epoch, self._replica.mesh(device_type, backend)
            if self._replica.epoch == epoch:
                return mesh
            self.in_flight.rejoining.refresh()

    def run_replica(self, train: Callable[[Session], Result]) -> Result:
        """Calls ``train(session)``, and calls it again whenever the replica of this trainer must be formed again.

        ``train`` builds the stages on ``session.replica_mesh()``, makes the optimizer, and runs the loop over
        ``session.steps``. It ends with an error if another trainer of the replica is lost, if the run is rolled back to
        a checkpoint, or if this trainer loses its lease. This trainer then joins the run again under its name. The next
        call of ``train`` waits in ``replica_mesh`` until the replica is complete, and its loop continues at the run's
        step with the run's weights.

        A trainer may get another place in the grid: read ``pp_rank`` and the like in ``train``. The memory of the
        former model is released before the next call, unless the script refers to the model from elsewhere.

        After the run's last step, a trainer that joins does not wait for the others of its replica: ``train`` builds
        the model, finds no steps left, and returns.

        Args:
            train: Trains the model. Its result is returned.

        Raises:
            DeadlineError: The replica was not complete in ``wait_limit_s``.
            ReplicaLostError: Another trainer of the replica has left with an error of its own, which the message names,
                and no other trainer has taken its place in 10 s.
            StaleEpochError: The replica was lost again and again without a commit in between.
        """
        if self.world.replica_size == 1:
            return train(self)
        self._replica.may_be_alone = True
        while True:
            try:
                return train(self)
            except Exception as error:
                if not self._ends_replica(error):
                    raise
                logger.warning("trainer %r forms its replica again: %s", self.trainer, str(error))
                self._replica.wait_for_successors()
                self._replica.may_be_alone = not self._replica.is_alone
            self._start_over()

    def replica_in_use(self) -> AbstractContextManager[None]:
        """Returns the context of collectives of the replica that may be outside of a work item."""
        return self._replica.in_use()

    def replica_lost_error(self, error: BaseException) -> ReplicaLostError:
        """Returns the error for a collective that failed because another trainer of the replica does not answer."""
        return self._replica.lost_error(error)

    def _ends_replica(self, error: Exception) -> bool:
        """True if an error means that the replica must be formed again."""
        lost = isinstance(error, ReplicaLostError) or is_lost_peer(error)
        return lost or (isinstance(error, ShardwellError) and self._membership.lapsed)

    def _start_over(self) -> None:
        """Joins the run again and drops the former model."""
        self._end_training()
        self.loop.close()
        self._replica.close(lost=True)
        self.in_flight.rejoining.start_over(self._replica.epoch)
        self._start_training()
        gc.collect()  # releases the former model, whose objects refer to each other
        self._log_ranks()

    def exchange_address(self, name: str, address: str | None = None) -> str:
        """Publishes an address under a name; without an address, waits until another trainer publishes one."""
        return self._membership.exchange_address(self.step, name, address)

    # ---- the end ----

    def close(self) -> None:
        """Leaves the run, so that its work is reassigned at once. Harmless to repeat.

        In a ``with`` statement and at the end of the process, the other trainers of the replica learn the error that
        has ended the script.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._mark_closed()
        self.loop.close()
        self.store.residuals.finish()
        self._membership.leave(describe_own_error(error))  # before the group ends: the others learn why it does
        self._replica.close(lost=error is not None)
        self.store.close()
        self._close_connections()

    def _leave_at_exit(self) -> None:
        # Python 3.11 has no last_exc.
        self._leave(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def disown(self) -> None:
        """Marks the session closed in a forked process; in the parent process it stays open."""
        self._mark_closed()
        self._membership.disown()

    def _mark_closed(self) -> None:
        self._closed = True
        self._collections.close()
        atexit.unregister(self._leave_at_exit)
        _open_sessions.discard(self)
        self._end_training()

    def _close_connections(self) -> None:
        self.coordinator.close()
        if self._cluster is not None:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)


def describe_own_error(error: BaseException | None) -> str:
    """Returns the type and the first line of an error that a training script has ended with.

    Empty: it has ended without, or because another trainer or the membership was lost, or its process was stopped.
    """
    caused_elsewhere = (ReplicaLostError, StaleEpochError, RunDeletedError)
    if not isinstance(error, Exception) or isinstance(error, caused_elsewhere) or is_lost_peer(error):
        return ""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


@contextmanager
def short_collections() -> Iterator[None]:
    """Makes garbage collections skip the objects that exist now, unless the script has frozen some by itself.

    A full collection visits all objects of torch's modules, which takes longer than everything else between the loss of
    a trainer and the new process group. Only the former model is garbage then.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---- open sessions of this process ----

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def session_of(parameter: Any) -> Session | None:
    """Returns the open session that a sharded parameter belongs to."""
    return next((session for session in _open_sessions if session.units.locate(parameter) is not None), None)


def settle(parameters: Iterable[Any]) -> None:
    """Completes an interrupted ``optimizer.step()`` of the sessions that sharded parameters belong to.

    Called before state is read: if the interrupted step was committed, the servers no longer have its version.
    """
    sessions = {id(session): session for parameter in parameters if (session := session_of(parameter)) is not None}
    for session in sessions.values():
        session.in_flight.settle()


def sessions_at(address: str) -> list[Session]:
    """Returns the open sessions that joined with this address of the coordinator."""
    return [session for session in _open_sessions if session.config.address == address]


def _trainer_of(run_id: str) -> str | None:
    """Returns the trainer of this process that plays logical ranks of a run."""
    return next((other.trainer for other in _open_sessions if other.run_id == run_id and other.num_ranks), None)


def _disown_all() -> None:
    """Closes the sessions of a forked process, such as a DataLoader's worker. Leaving would take the parent's ranks."""
    preemption.forget()
    for session in list(_open_sessions):
        session.disown()
