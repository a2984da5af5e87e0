"""Which shards of a run cannot be reached, for how long, and what to do about it, in words."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.cluster import Cluster, ServerState
from shardwell_wire.errors import ConflictError, ShardwellError, UnavailableError

_MAX_NAMES = 5


def problems(run: Run, cluster: Cluster) -> list[ShardwellError]:
    """Why shards of a run cannot be reached now, a server each; what does not heal comes first."""
    found = [_problem(run, cluster, process) for process in run.units.processes]
    return sorted(filter(None, found), key=lambda problem: isinstance(problem, UnavailableError))


def check_kept(run: Run, cluster: Cluster) -> None:
    """Raises ConflictError if a run can never go on."""
    for process in run.units.processes:
        problem = _problem(run, cluster, process)
        if isinstance(problem, ConflictError):
            raise problem


def _problem(run: Run, cluster: Cluster, process: tuple[str, str]) -> ShardwellError | None:
    server_id, _ = process
    restarted, server = cluster.has_restarted(*process), cluster.servers.get(server_id)
    if server is not None and server.may_be_alive and not restarted:
        return None
    held = run.units.of_process(process)
    if restarted or server is None or server.ended:
        # A unit without initial values is not lost: it is placed anew when it is declared the next time.
        held = [unit for unit in held if unit.published]
        if not held:
            return None
    units = _names(held)
    again = f"delete the run (shardwell delete-run {run.name}) and start it again"
    if server is None or restarted:
        return ConflictError(
            f"server {server_id!r} was restarted and has lost its shards of this run, of {units}: {again}",
            run=run.name,
            server=server_id,
        )
    if server.ended:
        happened = "was stopped and left the cluster" if server.state is ServerState.LEFT else "has ended"
        return ConflictError(
            f"server {server_id!r} at {server.address} {happened}, and its shards of this run, of {units}, are lost: "
            f"{again}",
            run=run.name,
            server=server_id,
        )
    return UnavailableError(
        f"server {server_id!r} at {server.address} has not been heard of for {cluster.silent_s(server):.1f} s"
        f"{f' ({server.silence})' if server.silence else ''}: it holds shards of this run, of {units}. The run goes on "
        "when the server is heard of again: check its process and the network to it. If its process has ended, start "
        "the server again under its id",
        run=run.name,
        server=server_id,
    )


def _names(units: Sequence[Unit]) -> str:
    names = [repr(unit.layout.unit) for unit in units[:_MAX_NAMES]]
    more = f" and {len(units) - _MAX_NAMES} more" if len(units) > _MAX_NAMES else ""
    return f"{'unit' if len(units) == 1 else 'units'} {', '.join(names)}{more}"
