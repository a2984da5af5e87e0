"""Counts the bytes between the hosts of a grid: ``sudo python -m benchmarks.grid_network``.

Two hosts are network namespaces of this machine (``network.py``). Each has one replica, whose trainers exchange
activations within the host, and one shard server. Only weights, gradients and control messages cross the link.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks import report
from benchmarks.grid import GRIDS, Grid, make_grid
from benchmarks.network import Network, NetworkError
from benchmarks.report import Report, to_table
from benchmarks.sampling import wait_until_quiet
from benchmarks.slow_network import start, start_servers
from benchmarks.workers import Group

NUM_HOSTS = 2
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that both hosts received in a step."""

    measured: float
    """With headers, acknowledgements and control messages."""
    theory: int
    """Weights and gradients only."""

    @property
    def deviation(self) -> float:
        """Relative deviation of the measured bytes from the theory."""
        return self.measured / self.theory - 1


def measure_link(network: Network, grid: Grid, *, steps: int) -> LinkTraffic:
    """Trains a grid with one replica per host and counts what crosses the link.

    Args:
        network: Two hosts.
        grid: The grid, with two replicas.
        steps: Number of counted steps.
    """
    hosts, world = network.hosts, grid.spec.world
    with ExitStack() as stack:
        servers, address = start_servers(stack, hosts)
        trainers = []
        for rank in range(world.size):
            spec = replace(grid.spec, rank=rank, address=address, transports="shm,socket")
            host = hosts[world.coordinates(rank).dp_rank]
            trainers.append(start(stack, host, "benchmarks.grid_trainer", [spec.to_json()]))
        group = Group(workers=trainers, server_pids=[server.pid for server in servers])
        pids = [*group.worker_pids, *group.server_pids]
        group.run(steps=_WARM_UP_STEPS)
        wait_until_quiet(pids)
        before = sum(host.received_bytes() for host in hosts)
        group.run(steps=steps)
        wait_until_quiet(pids)
        received = sum(host.received_bytes() for host in hosts) - before
    return LinkTraffic(received / steps, grid.traffic.bytes_between_hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the bytes between the hosts of a grid. Needs root.")
    parser.add_argument("--grids", nargs="+", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--steps", type=int, default=5, help="counted steps")
    report.add_arguments(parser, name="grid_network")
    arguments = parser.parse_args()
    document = Report(arguments, title="Bytes between two hosts, each with one replica and one shard server")
    found: dict[str, LinkTraffic] = {}
    try:
        for name in arguments.grids:
            grid = make_grid(name)
            with Network(NUM_HOSTS) as network:
                found[grid.title] = measure_link(network, grid, steps=arguments.steps)
    except NetworkError as error:
        raise SystemExit(f"grid_network: {error}") from None
    rows = [
        [title, f"{each.measured / 1e6:.2f}", f"{each.theory / 1e6:.2f}", f"{each.deviation:+.2%}"]
        for title, each in found.items()
    ]
    header = ["grid", "received by both hosts, MB/step", "payload in theory, MB/step", "deviation"]
    document.write(
        results={title: {"measured": each.measured, "theory": each.theory} for title, each in found.items()},
        sections=[to_table(header, rows)],
    )


if __name__ == "__main__":
    main()
