"""Joins a run: the arguments of ``shardwell.join``."""

from __future__ import annotations

from shardwell.options import JoinConfig, TransferOptions, WaitOptions
from shardwell.session.session import Session
from shardwell_wire.model.topology import Consistency, World
from shardwell_wire.security.tls import TlsOptions


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
    consistency: Consistency | None = None,
    resume: str | None = None,
    rewrap: bool | None = None,
    reduction_groups: tuple[int, ...] | None = None,
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
        consistency: When gradients are applied: ``shardwell.SYNCHRONOUS`` (one commit for all ranks),
            ``shardwell.ASYNCHRONOUS`` (one commit per work item) or ``shardwell.BOUNDED_STALENESS(s)`` (likewise, with
            no rank more than ``s`` items ahead of the slowest). Only the first gives reproducible weights. Default:
            SYNCHRONOUS.
        resume: Checkpoint from which to create the run, if it does not exist: ``latest`` for the newest one of this
            run in ``checkpoint_dir`` (without any, the run starts at step 0), or the path or URL of one checkpoint.
            The world and the numbers of trainers and servers may differ from those at the time of the checkpoint.
        rewrap: Whether the model may be wrapped into other units than those of the checkpoint. With another ``tp`` or
            ``pp`` it always may. Default: False.
        reduction_groups: Order in which the gradients of data ranks are added: sizes of groups, innermost first, that
            multiply to dp. With ``(4, 2)``, the gradients of ranks 0 to 3 are added in rank order, then those of 4 to
            7, and then the two sums. Default: all gradients are added in rank order.
        transfers: How weights and gradients travel.
        waits: How long to wait for other processes.

    Raises:
        RunMismatchError: The run exists with another world, seed, min_trainers, consistency or reduction_groups; or the
            checkpoint has another seed, or the same dp and other reduction_groups. Or one of
            the two runs is asynchronous and the other is not.
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
    return Session(JoinConfig.from_env(dict(locals())))
