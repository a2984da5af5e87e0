"""Trains the demo's GPT twice: once undisturbed, and once while processes are killed. Compares the weights.

    make demo DEMO_OPTIONS=--kill

Each run has two trainers and two shard servers. Every shard has a backup on the other server. In the second run, a
trainer and then a shard server get SIGKILL in the middle of training. Both are started again, as a supervisor would.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import shardwell
from shardwell.processes.launch import TrainerProcess
from shardwell.tables import format_size
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import ShardwellError
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE
from shardwell_wire.v1 import coordinator_pb2

SCRIPT = Path(__file__).with_name("train_gpt.py")
TRAINERS = ("trainer-0", "trainer-1")
STALLED_AFTER_S = 120.0


@dataclass(frozen=True)
class Kill:
    """A process that the demo has killed."""

    name: str
    step: int
    """Committed steps at that time."""
    pause_s: float
    """Time until the next step was committed."""


@dataclass(frozen=True)
class Outcome:
    """What one run has led to."""

    weights: str
    """SHA-256 of all bits of the weights."""
    step_s: float
    """Seconds per step, from the first commit to the last."""
    kills: Sequence[Kill]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kills processes of a training run and compares the final weights. Other options are those of "
        "train_gpt.py."
    )
    parser.add_argument("--num-steps", type=int, default=120, help="steps of each of the two runs (default: 120)")
    options, more = parser.parse_known_args()
    if options.num_steps < 6:
        parser.error(f"--num-steps {options.num_steps}: expected at least 6, because two processes are killed")
    say(
        f"Two runs of {options.num_steps} steps follow, with the same data and seed: one without kills, one in which a "
        "trainer and a shard server get SIGKILL. Each has two trainers and two shard servers on this machine, and "
        "every part of the weights has a backup on the other server."
    )
    outcomes = []
    for number, kills in enumerate((False, True), 1):
        say(f"run {number} of 2: {'processes are killed' if kills else 'no kills, for comparison'}")
        with tempfile.TemporaryDirectory() as folder, shardwell.LocalCluster(num_shards=2, lease_s=5.0) as cluster:
            outcomes.append(Demo(cluster, Path(folder), options.num_steps, more).run(kills=kills))
    undisturbed, disturbed = outcomes
    is_equal = undisturbed.weights == disturbed.weights
    say(
        *(
            f"{kill.name} killed at step {kill.step}: next commit {kill.pause_s:.2f} s later"
            for kill in disturbed.kills
        ),
        f"a step without kills takes {undisturbed.step_s:.2f} s",
        f"SHA-256 of the weights without kills: {undisturbed.weights}",
        f"SHA-256 of the weights with kills:    {disturbed.weights}",
        "every bit of the weights is equal" if is_equal else "THE WEIGHTS DIFFER",
    )
    return 0 if is_equal else 1


class Demo:
    """One run of the demo.

    Args:
        cluster: The cluster.
        folder: Folder for the trainers' hashes.
        num_steps: Number of steps.
        arguments: More arguments of the training script.
    """

    def __init__(self, cluster: shardwell.LocalCluster, folder: Path, num_steps: int, arguments: Sequence[str]) -> None:
        self._cluster, self._folder, self._num_steps = cluster, folder, num_steps
        self._coordinator = CoordinatorClient(cluster.address, credentials=cluster.credentials)
        command = [sys.executable, str(SCRIPT), "--num-steps", str(num_steps), *arguments]
        self._trainers = {
            name: TrainerProcess(name, [*command, "--hash-file", str(folder / name)], self._environment(name))
            for name in TRAINERS
        }

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "SHARDWELL_ADDRESS": self._cluster.address,
            TOKEN_FILE_VARIABLE: self._cluster.token_file,
            "SHARDWELL_RUN": "gpt",
            "SHARDWELL_TRAINER": name,
            "SHARDWELL_DP": str(len(TRAINERS)),
            "SHARDWELL_BACKUPS": "1",
        }

    def run(self, *, kills: bool) -> Outcome:
        """Trains to the end."""
        try:
            self._wait(lambda: self._committed() > 0, "the first step")
            first_s, first = time.monotonic(), self._committed()
            killed = []
            if kills:
                killed.append(self._at(self._num_steps // 3, self._kill_trainer))
                killed.append(self._at(2 * self._num_steps // 3, self._kill_server))
            self._wait(lambda: self._committed() >= self._num_steps, "the last step")
            step_s = (time.monotonic() - first_s) / max(1, self._num_steps - first)
            self._wait(lambda: all(trainer.exit_code is not None for trainer in self._trainers.values()), "the end")
            return Outcome(self._hash(), step_s, killed)
        finally:
            self._coordinator.close()
            for trainer in self._trainers.values():
                trainer.kill()
                trainer.finish()

    def _hash(self) -> str:
        found = {path.read_text() for path in self._folder.iterdir()}
        if len(found) != 1:
            raise SystemExit(f"expected one hash from all trainers, got {sorted(found)}")
        return found.pop()

    # ---- kills ----

    def _at(self, step: int, kill: Callable[[int], str]) -> Kill:
        """Kills a process at a step, and measures how long the run pauses."""
        self._wait(lambda: self._committed() >= step and self._is_protected(), f"step {step} and backups of all shards")
        step = self._committed()
        killed_s, name = time.monotonic(), kill(step)
        self._wait(lambda: self._committed() > step, "the next commit")
        pause_s = time.monotonic() - killed_s
        say(f"the next step was committed {pause_s:.2f} s after the kill")
        return Kill(name, step, pause_s)

    def _kill_trainer(self, step: int) -> str:
        trainer = self._trainers["trainer-1"]
        pid = trainer.pid
        trainer.kill()
        say(
            f"step {step}: SIGKILL to trainer-1, process {pid}. Its connection closes, so the coordinator leases its "
            "batch of this step to trainer-0, which computes it with the same data and seed. trainer-1 starts again, "
            "joins, and gets its rank back."
        )
        trainer.finish()
        trainer.start()
        return trainer.name

    def _kill_server(self, step: int) -> str:
        request = coordinator_pb2.ListServersRequest()
        servers = {each.server_id: each for each in self._coordinator.call("ListServers", request).servers}
        server = max(self._cluster.shards, key=lambda each: int(servers[each.name].primary_bytes))
        pid, held = server.pid, servers[server.name].primary_bytes
        os.kill(pid, signal.SIGKILL)  # LocalCluster starts it again
        total = sum(each.primary_bytes for each in servers.values())
        say(
            f"step {step}: SIGKILL to {server.name}, process {pid}, which serves {format_size(held)} of the "
            f"{format_size(total)} of weights, with their optimizer state. The backups on the other server become the "
            "primaries, and the step in flight is computed again, because its gradients were lost. The server starts "
            "again and gets new backups."
        )
        return server.name

    def _is_protected(self) -> bool:
        """True if every shard has a backup in sync."""
        units = self._coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run="gpt")).units
        in_sync = coordinator_pb2.BACKUP_STATE_IN_SYNC
        return all(
            len(unit.backups) >= len(unit.shards) and all(backup.state == in_sync for backup in unit.backups)
            for unit in units
        )

    # ---- waiting ----

    def _committed(self) -> int:
        try:
            request = coordinator_pb2.DescribeRunRequest(run="gpt")
            return int(self._coordinator.call("DescribeRun", request, timeout_s=2.0).summary.committed_step)
        except ShardwellError:
            return 0  # the run does not exist yet

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        moved_s, committed = time.monotonic(), -1
        while not condition():
            if (now_committed := self._committed()) > committed:
                moved_s, committed = time.monotonic(), now_committed
            if time.monotonic() - moved_s > STALLED_AFTER_S:
                raise SystemExit(f"no step was committed for {STALLED_AFTER_S:.0f} s, while waiting for {what}")
            failed = [name for name, trainer in self._trainers.items() if trainer.exit_code not in (None, 0)]
            if failed:
                raise SystemExit(f"{', '.join(failed)} failed")
            if all(trainer.exit_code == 0 for trainer in self._trainers.values()) and not condition():
                raise SystemExit(f"the run ended while waiting for {what}: pass a larger --num-steps")
            time.sleep(0.02)


def say(*lines: str) -> None:
    """Prints lines between those of the trainers."""
    print("", *(f"[kill] {line}" for line in lines), "", sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
