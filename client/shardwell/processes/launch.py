"""``shardwell launch``: runs a training script as several trainers, by default on a private cluster.

The output of all trainers is relayed, each line with the name of its trainer.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from shardwell.processes import trainer_start
from shardwell.processes.local_cluster import LocalCluster, ServerProcess
from shardwell_wire.connection.channel import check_address
from shardwell_wire.errors import UsageError
from shardwell_wire.host.server_folders import temporary_folder
from shardwell_wire.host.variables import CONFIG_VARIABLE, CONTEXT_VARIABLE
from shardwell_wire.model.topology import World
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from shardwell_wire.security.tls import TLS_VARIABLES

_output_lock = threading.Lock()
_LINE_END = re.compile(rb"([\r\n])")
"""Progress bars rewrite a line in place and end each state with a carriage return."""

_POLL_S = 0.05
_RELAY_START_S = 60.0
_STOP_LIMIT_S = 10.0
"""Seconds after a stop signal before trainers are killed."""

_EPILOG = """\
Two trainers on a private cluster with two shard servers, like `make demo`:
  shardwell launch examples/train_gpt.py --num-steps 200

Four trainers on a running cluster; each trainer is restarted up to 3 times:
  shardwell launch --coordinator localhost:50051 --run gpt --num-trainers 4 --restart 3 train.py

Every option of shardwell.join has a variable, which the trainers inherit:
  SHARDWELL_GATHER_DTYPE=bfloat16 SHARDWELL_WAIT_LIMIT_S=60 shardwell launch train.py

The script calls shardwell.join() without arguments. The launcher sets SHARDWELL_ADDRESS, SHARDWELL_RUN,
SHARDWELL_TRAINER, SHARDWELL_DP, SHARDWELL_CP, SHARDWELL_TP, SHARDWELL_PP, SHARDWELL_MIN_TRAINERS and
LOCAL_RANK.
When a trainer dies, the other trainers continue and take over its work.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The trainers that ``shardwell launch`` starts."""

    command: tuple[str, ...]
    """The training script and its arguments."""
    run: str
    """Name of the run."""
    num_trainers: int = 2
    """Number of trainer processes."""
    world: World
    """The grid of logical ranks."""
    max_restarts: int = 0
    """How often each trainer may be restarted."""
    gpus: tuple[str, ...] = ()
    """GPUs that trainers see, as in CUDA_VISIBLE_DEVICES, by trainer. Empty: each sees all GPUs."""

    def environment(
        self, trainer: str, address: str, inherited: Mapping[str, str], *, local_rank: int = 0
    ) -> dict[str, str]:
        """Returns the environment of one trainer: inherited variables, and those that ``shardwell.join`` reads.

        LOCAL_RANK is the index of the trainer's GPU among those that it sees.
        """
        gpus = {"CUDA_VISIBLE_DEVICES": self.gpus[local_rank]} if self.gpus else {}
        world, live = self.world, {"SHARDWELL_LIVE_OUTPUT": "1"} if sys.stdout.isatty() else {}
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **live,
            **inherited,
            **gpus,
            "LOCAL_RANK": "0" if self.gpus else str(local_rank),
            "SHARDWELL_ADDRESS": address,
            "SHARDWELL_RUN": self.run,
            "SHARDWELL_TRAINER": trainer,
            "SHARDWELL_DP": str(world.dp),
            "SHARDWELL_TP": str(world.tp),
            "SHARDWELL_PP": str(world.pp),
            "SHARDWELL_CP": str(world.cp),
            "SHARDWELL_MIN_TRAINERS": str(min(self.num_trainers, world.size)),
        }


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``launch`` subcommand."""
    parser = subparsers.add_parser(
        "launch",
        help="run a training script as several trainers",
        description="Runs a training script as several trainers, like torchrun.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-trainers", type=_positive, default=2, metavar="N", help="trainer processes (default: 2)")
    parser.add_argument(
        "--num-shards", type=_positive, default=2, metavar="N", help="shard servers of the private cluster (default: 2)"
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="use this cluster instead of starting a private one; all coordinators, with commas",
    )
    parser.add_argument(
        "--run", metavar="NAME", help="name of the run; an existing run continues (default: the script's name)"
    )
    parser.add_argument(
        "--dp", type=_positive, metavar="N", help="data-parallel ranks (default: trainers / (cp * tp * pp))"
    )
    parser.add_argument("--cp", type=_positive, default=1, metavar="N", help="context-parallel ranks (default: 1)")
    parser.add_argument("--tp", type=_positive, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--pp", type=_positive, default=1, metavar="N", help="pipeline stages (default: 1)")
    parser.add_argument(
        "--restart", type=_not_negative, default=0, metavar="N", help="restart a trainer that dies, up to N times"
    )
    parser.add_argument(
        "--relay",
        action="store_true",
        help="with --coordinator: start a relay for the trainers of this host, which fetches each weight once for all "
        "of them and adds their gradients; needs the cluster's key, see shardwell-server relay",
    )
    parser.add_argument(
        "--gpus-per-trainer",
        type=_positive,
        metavar="N",
        help="each trainer sees N GPUs of its own (CUDA_VISIBLE_DEVICES) with LOCAL_RANK=0 (default: it sees all, and "
        "LOCAL_RANK is its number)",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder for a log of each trainer, beside the output here, and for the private cluster's logs (default: "
        "none of the trainers, those of the cluster are temporary)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does: SCRIPT is its name"
    )
    parser.add_argument("script", help="the training script")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, if it takes any")
    rest.required = False  # otherwise the error about a missing script names it, too
    parser.usage = "shardwell launch [OPTION...] [-m] SCRIPT [ARGUMENT...]"
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell launch``; returns the highest exit code of the trainers."""
    plan = make_plan(arguments)
    try:
        with _stop_signals() as signals, _cluster(arguments) as cluster:
            return _Launch(plan, cluster, signals, arguments.log_dir).run()
    except _Stop as stop:
        return 128 + stop.signal_number


def make_plan(arguments: argparse.Namespace) -> LaunchPlan:
    """Returns the plan for command line arguments.

    Raises:
        UsageError: The script does not exist, the address is invalid, the number of trainers does not fit the axes, or
            there are too few GPUs.
    """
    if not arguments.module and not Path(arguments.script).is_file():
        advice = "; to run a module, put -m before its name" if not arguments.script.endswith(".py") else ""
        raise UsageError(f"no such script: {arguments.script}{advice}")
    program = ("-m", arguments.script) if arguments.module else (arguments.script,)
    if arguments.coordinator:
        check_address(arguments.coordinator)
    dp, model_size = arguments.dp, arguments.cp * arguments.tp * arguments.pp
    if dp is None:
        dp, rest = divmod(arguments.num_trainers, model_size)
        if rest:
            axes = ("tp", "pp") if arguments.cp == 1 else ("cp", "tp", "pp")
            sizes = " x ".join(f"{axis}={getattr(arguments, axis)}" for axis in axes)
            raise UsageError(
                f"--num-trainers {arguments.num_trainers} is not a multiple of {sizes}: start a multiple of "
                f"{model_size}, or set --dp"
            )
    return LaunchPlan(
        command=(sys.executable, *program, *arguments.arguments),
        run=arguments.run or (arguments.script.rpartition(".")[2] if arguments.module else Path(arguments.script).stem),
        num_trainers=arguments.num_trainers,
        world=World(dp=dp, tp=arguments.tp, pp=arguments.pp, cp=arguments.cp),
        max_restarts=arguments.restart,
        gpus=_divide_gpus(arguments.gpus_per_trainer, arguments.num_trainers) if arguments.gpus_per_trainer else (),
    )


def _divide_gpus(per_trainer: int, num_trainers: int) -> tuple[str, ...]:
    """Returns CUDA_VISIBLE_DEVICES of each trainer."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(index) for index in range(_count_gpus())]
    if len(visible) < per_trainer * num_trainers:
        raise UsageError(
            f"--gpus-per-trainer {per_trainer} with {num_trainers} trainers needs {per_trainer * num_trainers} GPUs, "
            f"and this host has {len(visible)}" + (f" (CUDA_VISIBLE_DEVICES={listed})" if listed else "")
        )
    return tuple(",".join(visible[index * per_trainer :][:per_trainer]) for index in range(num_trainers))


def _count_gpus() -> int:
    import torch  # takes a second, which other launches do not need

    return torch.cuda.device_count()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or a positive integer, got {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The cluster that the trainers use."""

    address: str
    servers: tuple[ServerProcess, ...] = ()
    """Servers of a private cluster, the coordinator first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with which the trainers find the token of a private cluster."""


@contextmanager
def _cluster(arguments: argparse.Namespace) -> Iterator[_Cluster]:
    """Yields the cluster to use. A private cluster stops when the context ends."""
    if arguments.coordinator:
        with _host_relay(arguments) if arguments.relay else nullcontext():
            yield _Cluster(arguments.coordinator)
        return
    count = arguments.num_shards
    _print(f"starting a private cluster: a coordinator and {count} shard server{'s' * (count > 1)}")
    with LocalCluster(count, log_dir=arguments.log_dir) as cluster:
        yield _Cluster(
            cluster.address, (cluster.coordinator, *cluster.shards), {TOKEN_FILE_VARIABLE: cluster.token_file}
        )


@contextmanager
def _host_relay(arguments: argparse.Namespace) -> Iterator[None]:
    """Runs a relay until the context ends. It is started again if it dies; meanwhile the trainers do without."""
    with temporary_folder() as folder:
        log_dir = Path(arguments.log_dir or folder)
        log_dir.mkdir(parents=True, exist_ok=True)
        command = ["relay", "--coordinator", arguments.coordinator, "--listen", "127.0.0.1:0", "--exit-with-parent"]
        variables = (
            TOKEN_FILE_VARIABLE,
            *TLS_VARIABLES,
            "SHARDWELL_HOST",
            "SHARDWELL_SHM_DIR",
            CONFIG_VARIABLE,
            CONTEXT_VARIABLE,
        )
        relay = ServerProcess("relay", command, log_dir / "relay.log", variables)
        try:
            relay.wait_ready(time.monotonic() + _RELAY_START_S)
            relay.keep_running(_RELAY_START_S)
            _print(f"relay for the trainers of this host at {relay.address}")
            yield
        finally:
            relay.request_stop(at_once=True)
            relay.stop(_STOP_LIMIT_S)


class _Stop(BaseException):
    """Raised when a signal asks the launcher to stop."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


@dataclass
class _Signals:
    """The stop signals that were received."""

    count: int = 0
    first: int = 0
    interrupt: bool = True
    """True if the first signal raises ``_Stop`` at once. False while trainers are started: an exception between the
    start of a trainer and its registration would leave the trainer running."""

    def receive(self, signal_number: int, _: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            self.first = signal_number
            if self.interrupt:
                raise _Stop(signal_number)

    def check(self) -> None:
        """Raises ``_Stop`` if a signal was received."""
        if self.count:
            raise _Stop(self.first)


@contextmanager
def _stop_signals() -> Iterator[_Signals]:
    """Handles SIGINT, SIGTERM and SIGHUP while the context is open."""
    signals = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, signals.receive) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Launch:
    """Starts, watches and stops the trainers of one launch."""

    def __init__(self, plan: LaunchPlan, cluster: _Cluster, signals: _Signals, log_dir: str | None = None) -> None:
        self._plan, self._address, self._signals = plan, cluster.address, signals
        self._log_dir = None if log_dir is None else Path(log_dir)
        # Trainers of a private cluster must not use the credentials of another one.
        hidden = (TOKEN_VARIABLE, *TLS_VARIABLES) if cluster.servers else ()
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment = {**inherited, **cluster.environment}
        self._trainers: list[TrainerProcess] = []
        self._coordinator, self._servers = next(iter(cluster.servers), None), list(cluster.servers)
        self._reported: Counter[str] = Counter()
        """Number of ends that were reported, by the name of a shard server that is started again."""

    def run(self) -> int:
        """Waits for the end of all trainers; returns the highest exit code."""
        self._signals.interrupt = False
        plan = self._plan
        _print(f"run {plan.run!r} on {self._address}: starting {plan.num_trainers} trainers for {plan.world}")
        try:
            for index in range(self._plan.num_trainers):
                name = f"trainer-{index}"
                environment = self._plan.environment(name, self._address, self._environment, local_rank=index)
                log = None if self._log_dir is None else self._log_dir / f"{name}.log"
                trainer = TrainerProcess(name, self._plan.command, environment, log=log, alone=plan.num_trainers == 1)
                self._trainers.append(trainer)
            return self._watch()
        except _Stop as stop:
            self._stop(stop.signal_number)
            raise
        finally:
            for trainer in self._trainers:
                trainer.kill()
                trainer.finish()

    def _watch(self) -> int:
        running, worst = list(self._trainers), 0
        while running:
            self._signals.check()
            if self._is_coordinator_lost():
                self._stop(signal.SIGTERM)
                return 1
            for trainer in list(running):
                code = trainer.exit_code
                if code is None or (code != 0 and self._restart(trainer, code)):
                    continue
                trainer.finish()
                running.remove(trainer)
                worst = max(worst, code)
                if code != 0 and running:
                    _print(f"{trainer.name} {describe_exit(code)}; the other trainers take over its work")
            time.sleep(_POLL_S)
        return worst

    def _is_coordinator_lost(self) -> bool:
        """Reports the servers of a private cluster that have ended. True if the coordinator is one of them."""
        for server in self._servers:
            for code in server.ends[self._reported[server.name] :]:
                self._reported[server.name] += 1
                _print(f"{server.name} {_describe_end(code)}. {server.log_tail()}")
                _print(f"{server.name} is started again")
        for server in [server for server in self._servers if server.is_over]:
            self._servers.remove(server)
            _print(f"{server.name} {_describe_end(server.exit_code or 0)}. {server.log_tail()}")
            if server is self._coordinator:
                return True
        return False

    def _restart(self, trainer: TrainerProcess, code: int) -> bool:
        if trainer.starts > self._plan.max_restarts:
            return False
        trainer.finish()
        _print(f"{trainer.name} {describe_exit(code)}; restarting it ({trainer.starts} of {self._plan.max_restarts})")
        trainer.start()
        return True

    def _stop(self, signal_number: int) -> None:
        """Sends a signal to all trainers and waits for their end, until a second signal or the time limit."""
        _print(f"{signal.Signals(signal_number).name}: stopping {len(self._trainers)} trainers")
        for trainer in self._trainers:
            trainer.send(signal_number)
        deadline = time.monotonic() + _STOP_LIMIT_S
        while any(trainer.exit_code is None for trainer in self._trainers):
            if self._signals.count > 1 or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)


def _describe_end(code: int) -> str:
    return describe_exit(code if code >= 0 else 128 - code)


def _print(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


class TrainerProcess:
    """A training script that runs as one of several trainers.

    The process has its own session, so that it receives signals from the launcher only. It ends with the launcher; on
    Linux also if the launcher is killed.

    Args:
        name: Name of the trainer in the run, and prefix of each line of its output.
        command: Program and arguments.
        environment: The complete environment.
        log: File to which its output is appended, too.
        alone: Whether it is the only trainer. It then reads the launcher's standard input, and its output need not wait
            for the end of a line, as for a debugger.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        alone: bool = False,
    ) -> None:
        self.name, self._alone = name, alone
        self.starts = 0
        self._log_path = log
        self._command, self._environment = list(command), dict(environment)
        self.start()

    def start(self) -> None:
        """Starts the trainer. Also restarts a trainer that has ended."""
        self.starts += 1
        self._log: IO[bytes] | None = None
        if self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-I", trainer_start.__file__, str(os.getpid()), *self._command],
            env=self._environment,
            stdin=None if self._alone else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._relays = [
            threading.Thread(
                target=_relay,
                args=(source, target, f"[{self.name}] ".encode()),
                kwargs={"log": self._log, "by_line": not self._alone},
                daemon=True,
            )
            for source, target in ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        ]
        for relay in self._relays:
            relay.start()

    @property
    def pid(self) -> int:
        """Process id. Changes with each start."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code as in a shell: 128 + n for signal n. None while the trainer runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, signal_number: int) -> None:
        """Sends a signal to the trainer if it runs."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        """Kills the trainer and all processes that it has started (SIGKILL)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Waits for the trainer's end, and a limited time for output that its own child processes still hold open."""
        self._process.wait()
        for relay in self._relays:
            relay.join(timeout=2.0)
        if self._log is not None and not any(relay.is_alive() for relay in self._relays):
            self._log.close()


def describe_exit(code: int) -> str:
    """Returns a description of an exit code."""
    if code > 128:
        try:
            return f"ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"


def _relay(
    source: IO[bytes], target: IO[bytes], prefix: bytes, *, log: IO[bytes] | None = None, by_line: bool = True
) -> None:
    """Copies output line by line, so that lines of different trainers do not mix.

    Args:
        target: Where it is shown.
        prefix: What each line starts with there.
        log: A file that gets the output without the prefix.
        by_line: Whether to wait for the end of each line.
    """
    rest, start = b"", prefix
    with source:
        while data := os.read(source.fileno(), 65536):
            *lines, rest = _LINE_END.split(rest + data)
            try:
                for line, end in zip(lines[::2], lines[1::2], strict=True):
                    _write(target, start + line + end)
                    _write(log, line + end)
                    start = prefix
                if rest and not by_line:
                    _write(target, start + rest)
                    _write(log, rest)
                    rest = start = b""
            except BrokenPipeError:
                return
    if rest or not start:
        _write(target, start + rest + b"\n")
        _write(log, rest + b"\n")


def _write(target: IO[bytes] | None, data: bytes) -> None:
    if target is not None:
        with _output_lock:
            target.write(data)
            target.flush()
