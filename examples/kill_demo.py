"""Trains the demo's GPT twice: once undisturbed, and once while processes are killed. Compares the weights.

    make demo DEMO_OPTIONS=--kill

Each run has two trainers and two shard servers. Every shard has a backup on the other server. In the second run, a
trainer and then a shard server get SIGKILL in the middle of training. Both are started again, as a supervisor would.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import shardwell
from shardwell.processes.trainer_process import TrainerProcess
from shardwell.session.coordinator_client import CoordinatorClient
from shardwell_wire.credentials import TOKEN_FILE_VARIABLE
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2

SCRIPT = Path(__file__).with_name("train_gpt.py")
TRAINERS = ("trainer-0", "trainer-1")
STALLED_AFTER_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills processes of a training run and compares the final weights.")
    parser.add_argument("--num-steps", type=int, default=120)
    options, more = parser.parse_known_args()
    hashes = []
    for kills in (False, True):
        say("a run in which processes are killed" if kills else "a run without kills, for comparison")
        with tempfile.TemporaryDirectory() as folder, shardwell.LocalCluster(num_shards=2, lease_s=5.0) as cluster:
            hashes.append(Demo(cluster, Path(folder), options.num_steps, more).run(kills=kills))
    say(f"weights without kills: {hashes[0]}")
    say(f"weights with kills:    {hashes[1]}")
    say("every bit is equal" if hashes[0] == hashes[1] else "THE WEIGHTS DIFFER")
    return 0 if hashes[0] == hashes[1] else 1


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

    def run(self, *, kills: bool) -> str:
        """Trains to the end; returns the hash of the weights."""
        try:
            if kills:
                self._at(self._num_steps // 3, self._kill_trainer)
                self._at(2 * self._num_steps // 3, self._kill_server)
            self._wait(lambda: all(trainer.exit_code is not None for trainer in self._trainers.values()), "the end")
            return self._hash()
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

    def _at(self, step: int, kill: Callable[[int], None]) -> None:
        """Kills something at a step, and says how long the run paused."""
        self._wait(lambda: self._committed() >= step, f"step {step}")
        killed_s, committed = time.monotonic(), self._committed()
        kill(step)
        self._wait(lambda: self._committed() > committed, "the next commit")
        say(f"the next step was committed {time.monotonic() - killed_s:.2f} s after the kill")

    def _kill_trainer(self, step: int) -> None:
        trainer = self._trainers["trainer-1"]
        say(
            f"step {step}: SIGKILL to trainer-1, process {trainer.pid}. Its connection closes, so the coordinator "
            "leases its batch of this step to trainer-0, which computes it with the same data and seed. trainer-1 "
            "starts again, joins, and gets its rank back."
        )
        trainer.kill()
        trainer.finish()
        trainer.start()

    def _kill_server(self, step: int) -> None:
        server = self._cluster.shards[1]
        say(
            f"step {step}: SIGKILL to {server.name}, process {server.pid}, with half of the weights and of the "
            "optimizer's state. The backups on the other server become the primaries, and the step in flight is "
            "computed again, because its gradients were lost. The server starts again and gets new backups."
        )
        os.kill(server.pid, signal.SIGKILL)  # LocalCluster starts it again

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
            time.sleep(0.02)


def say(text: str) -> None:
    """Prints a line between the lines of the trainers."""
    print(f"\n[kill] {re.sub(r' +', ' ', text)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
