"""Slurm on this machine: munged, slurmctld and slurmd as processes of a temporary folder. Needs root.

Debian's packages are slurmctld, slurmd, slurm-client and munge. No file outside of the folder is used.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import Any, Self

from tests.support.cluster import wait_until
from tests.support.ports import reserved_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=15
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster with one node of 16 pretended CPUs. A context manager, which ends every job and daemon."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        # Paths of sockets have at most 107 characters.
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.push(self._stack)
            folder, host = self.folder, socket.gethostname().partition(".")[0]
            for name in ("state", "spool"):
                (folder / name).mkdir()
            key = folder / "munge.key"
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(1024))
            port = self._stack.enter_context(reserved_ports(2))
            config = CONFIG.format(folder=folder, host=host, controller_port=port, node_port=port + 1)
            (folder / "slurm.conf").write_text(config)
            paths = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in paths.items()]
            self._start("munged", "--foreground", "--force", *options)
            wait_until((folder / "munge.socket").exists, "munged listens", timeout_s=30.0)
            self._start("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
            self._start("slurmd", "-D", "-N", host, "-f", self.environment["SLURM_CONF"])
            self._stack.callback(self._end_jobs)
            wait_until(lambda: "idle" in self._sinfo(), "the node is idle", timeout_s=60.0)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, program: str, *arguments: str) -> None:
        path = which(program) or f"/usr/sbin/{program}"
        log = self._stack.enter_context((self.folder / f"{program}.output").open("wb"))
        process = subprocess.Popen([path, *arguments], env=self.environment, stdout=log, stderr=log)
        self._stack.callback(_end, process)

    def _sinfo(self) -> str:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Runs a command of Slurm; returns its output."""
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: Any) -> str:
        """Submits a batch script; returns the number of its job."""
        return self.run("sbatch", "--parsable", *arguments, **environment)

    def jobs(self) -> dict[str, str]:
        """Returns the state of each job that has not ended. Array tasks are called JOB_TASK."""
        lines = self.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def _end_jobs(self) -> None:
        for job in self.jobs():
            self.run("scancel", "--signal=KILL", "--full", job, check=False)
            self.run("scancel", job, check=False)
        wait_until(lambda: not self.jobs(), "all jobs have ended", timeout_s=60.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
