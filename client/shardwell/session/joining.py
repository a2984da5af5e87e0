"""``join``: how a process takes part in a run."""

from __future__ import annotations

from shardwell.module.strategy import BackwardPrefetch
from shardwell.session.config import JoinConfig
from shardwell.session.session import Session
from shardwell_wire.topology import World


def join(
    address: str | None = None,
    *,
    token_file: str | None = None,
    run: str | None = None,
    world: World | None = None,
    seed: int | None = None,
    min_trainers: int | None = None,
    trainer: str | None = None,
    host: str | None = None,
    global_rank: int | None = None,
    num_layers: int | None = None,
    wait_limit_s: float | None = None,
    chunk_bytes: int | None = None,
    prefetch_bytes: int | None = None,
    push_bytes: int | None = None,
    keep_bytes: int | None = None,
    max_gathers_in_flight: int | None = None,
    backward_prefetch: BackwardPrefetch | str | None = None,
    host_cache_bytes: int | None = None,
    node_group: str | None = None,
    transports: str | None = None,
    gather_dtype: str | None = None,
    push_dtype: str | None = None,
    push_error_feedback: bool | None = None,
) -> Session:
    """Takes part in a run; returns once enough trainers are there.

    What is not given is taken from ``SHARDWELL_ADDRESS``, ``SHARDWELL_RUN``, ``SHARDWELL_DP`` and so
    on (see ``JoinConfig.from_env``), as a launcher sets them.

    Args:
        address: The coordinator's host:port. Neither given nor in the environment: a private local
            cluster is started for this process and ended with it.
        token_file: File with the cluster's token, readable by its user only. By default the token of a local cluster
            of this user at the address, or of the file that ``SHARDWELL_TOKEN_FILE`` names.
        run: Name of the run.
        world: The grid of logical ranks.
        seed: Data order and dropout derive from it.
        min_trainers: Trainers that must be there before the first step; one per logical rank if not
            given. Fewer than dp: some play several ranks. More than the world has: spares.
        trainer: A name that stays the same when this trainer is started again.
        host: Where it runs; this machine's name if not given.
        global_rank: A logical rank to ask for.
        num_layers: Layers to be split over pipeline stages, to be checked against the world.
        wait_limit_s: The longest wait for others before DeadlineError.
        chunk_bytes: Payload per message on the data plane.
        prefetch_bytes: Weights that may be fetched ahead of their use.
        push_bytes: Gradients that may be in flight before the backward waits.
        keep_bytes: Weights that may stay here from one use in a step to the next instead of being fetched
            again: memory for bytes on the wire. By default none; what is read in place costs neither.
        max_gathers_in_flight: Units whose weights may be on their way at once, also with explicit prefetch lists
            (FSDP1's ``limit_all_gathers``); what is read in place does not count. By default as many as
            ``prefetch_bytes`` allows.
        backward_prefetch: When the weights of the next unit are gathered in a backward: ``pre``, ``post`` or ``none``,
            as FSDP1's. By default ``pre``.
        host_cache_bytes: Weights that the run's trainers of this host may keep in shared memory together: what is on
            servers of other hosts is fetched once per host and step, and read in place. By default none. The same
            on all trainers of a host.
        node_group: ``gloo`` (trainers on CPUs) or ``nccl`` (on GPUs; choose the device before): trainers of one host
            that hold the same units fetch a part of each unit and exchange the parts. By default ``none``. The same
            on all trainers of a host.
        transports: Ways to the shard servers to use, the preferred one first; by default ``shm,socket,grpc``:
            shared memory on the same host, else plain TCP connections, else the rpcs.
        gather_dtype: How 32-bit weights travel: ``float32``, or rounded to ``bfloat16``, ``float16`` or
            ``int8`` (with a scale per 256 values). The servers keep and update what is not rounded.
        push_dtype: How 32-bit gradients travel; they are added in float32.
        push_error_feedback: Add what rounding left out of a gradient to the next one.

    Raises:
        RunMismatchError: The run exists with another world, seed or min_trainers.
        WorldError: The world is impossible or does not fit.
        DuplicateError: A live trainer has this name, or the rank asked for.
        DeadlineError: Not enough trainers came.
        UnavailableError: The coordinator cannot be reached.
        UnauthenticatedError: The cluster requires a token, and none or another one was found.
    """
    config = JoinConfig.from_env(dict(locals()))
    return Session(config)
