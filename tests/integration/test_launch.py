"""``shardwell launch``: environment, relayed output, restarts, signals and cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import shardwell
from shardwell.command.cli import main
from shardwell.processes.launch import TrainerProcess
from tests.support.cluster import descendants, wait_gone

SHARDWELL = [sys.executable, "-m", "shardwell"]
NO_CLUSTER = ["--coordinator", "127.0.0.1:1"]
"""Options for scripts that do not join and need no cluster."""

PRINT_CREDENTIALS = """
    import os
    print(*sorted(name for name in os.environ if name.startswith(("SHARDWELL_TLS", "SHARDWELL_TOKEN"))))
"""
PRINT_ENVIRONMENT = """
    import os
    keys = ("ADDRESS", "RUN", "TRAINER", "DP", "TP", "PP", "MIN_TRAINERS")
    print(*(os.environ["SHARDWELL_" + key] for key in keys), os.environ["OMP_NUM_THREADS"])
"""
WAIT = """
    import signal, threading
    print("waiting", flush=True)
    threading.Event().wait(60)
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("waiting", flush=True)
    while True:
        time.sleep(1)
"""
TRAIN = """
    import time, torch, shardwell
    session = shardwell.join()
    with open({joins!r}, "a") as joins:
        joins.write(session.trainer + "\\n")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps({steps}):
        for x in step.batches(lambda step, dp_rank: torch.full((2, 3), float(dp_rank))):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step.number, "rank", session.global_rank, flush=True)
        while step.number == 5 and len(open({joins!r}).readlines()) < {starts}:
            time.sleep(0.01)
"""


LOSE_CHECKPOINTS = """
    import os, time, torch, shardwell
    session = shardwell.join(checkpoint_dir={folder!r}, checkpoint_every=1)
    if session.trainer == "trainer-0":
        os.rename({folder!r}, {folder!r} + "-away")
        open({folder!r}, "w").close()
    model = torch.nn.Linear(3, 1)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(20):
        while step.number == 0 and not os.path.isfile({folder!r}):
            time.sleep(0.01)
        for x in step.batches(lambda step, dp_rank: torch.full((2, 3), float(dp_rank))):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step.number, "rank", session.global_rank, flush=True)
        time.sleep(0.02)
    session.close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def write(script: Path, source: str, **values: object) -> str:
    text = textwrap.dedent(source)
    script.write_text(text.format(**values) if values else text)
    return str(script)


@dataclass
class Done:
    """Exit code and output of a launch."""

    returncode: int
    stdout: str
    stderr: str


Launch = Callable[..., Done]


@pytest.fixture
def launch(capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs the launcher in this process, which has the imports already, until the trainers have ended."""

    def run(*arguments: str) -> Done:
        code = main(["launch", *arguments])
        return Done(code, *capsys.readouterr())

    return run


@contextmanager
def launched(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a launcher process; kills the process when the context ends."""
    with subprocess.Popen(
        [*SHARDWELL, "launch", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(process: subprocess.Popen[str], text: str, count: int) -> None:
    assert process.stdout is not None
    found = 0
    for line in process.stdout:
        found += text in line
        if found == count:
            return
    pytest.fail(f"the launch ended before {text!r} appeared {count} times")


def test_trainers_train_on_a_private_cluster_and_a_checkpoint_that_fails_is_a_warning_in_each(
    launch: Launch, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TLS_CA", "TOKEN", "TOKEN_FILE"):  # of another cluster
        monkeypatch.setenv(f"SHARDWELL_{name}", "/none")
    done = launch("--num-trainers", "2", write(script, LOSE_CHECKPOINTS, folder=str(tmp_path / "checkpoints")))
    assert done.returncode == 0, done.stderr
    lines = {line.partition("] ")[2] for line in done.stdout.splitlines()}
    assert lines == {f"step {step} rank {rank}" for step in range(20) for rank in range(2)}
    for trainer in ("trainer-0", "trainer-1"):
        warnings = [line for line in done.stderr.splitlines() if trainer in line and "was not saved" in line]
        assert 1 <= len(warnings) < 5, "each cause once, not every checkpoint"


def test_each_trainer_gets_its_environment(launch: Launch, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    done = launch(*NO_CLUSTER, "--num-trainers", "2", "--run", "r", write(script, PRINT_ENVIRONMENT))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[trainer-{index}] 127.0.0.1:1 r trainer-{index} 2 1 1 2 3" for index in range(2)
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [(NO_CLUSTER, "SHARDWELL_TLS_CA SHARDWELL_TOKEN"), (["--num-shards", "1"], "SHARDWELL_TOKEN_FILE")],
    ids=["other cluster", "private cluster"],
)
def test_credentials_are_those_of_the_cluster(
    launch: Launch, script: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: str
) -> None:
    for name in ("TLS_CA", "TOKEN"):
        monkeypatch.setenv(f"SHARDWELL_{name}", "/none")
    done = launch(*options, "--num-trainers", "1", write(script, PRINT_CREDENTIALS))
    assert done.stdout.splitlines() == [f"[trainer-0] {expected}"]


def test_run_starts_with_fewer_trainers_than_ranks(
    launch: Launch, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = launch(*NO_CLUSTER, "--num-trainers", "1", "--dp", "4", "--tp", "2", write(script, PRINT_ENVIRONMENT))
    assert done.stdout == "[trainer-0] 127.0.0.1:1 script trainer-0 4 2 1 1 1\n"


def test_arguments_after_the_script_are_passed_to_it(launch: Launch, script: Path) -> None:
    source = "import sys; print(sys.argv[1:])"
    done = launch(*NO_CLUSTER, "--num-trainers", "1", write(script, source), "--run", "x", "--help")
    assert done.stdout == "[trainer-0] ['--run', 'x', '--help']\n"


def test_a_module_runs_and_a_missing_script_is_named(
    launch: Launch, script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        script,
        "import os, sys; print(sys.argv[1:], os.environ['SHARDWELL_RUN'], sys.modules['__main__'].__spec__.name)",
    )
    monkeypatch.setenv("PYTHONPATH", f"{script.parent}:{os.environ.get('PYTHONPATH', '')}")
    done = launch(*NO_CLUSTER, "--num-trainers", "1", "-m", script.stem, "-m", "x")
    assert done.stdout == f"[trainer-0] ['-m', 'x'] {script.stem} {script.stem}\n"
    assert "to run a module, put -m before its name" in launch("nosuch").stderr
    with pytest.raises(SystemExit):
        main(["launch"])
    assert "the following arguments are required: script\n" in capsys.readouterr().err


def test_output_of_each_trainer_is_kept_in_its_log(launch: Launch, script: Path, tmp_path: Path) -> None:
    source = "import os, sys; print(os.environ['SHARDWELL_TRAINER']); print('error', file=sys.stderr)"
    done = launch(*NO_CLUSTER, "--log-dir", str(tmp_path / "logs"), write(script, source))
    assert done.returncode == 0
    for name in ("trainer-0", "trainer-1"):
        lines = (tmp_path / "logs" / f"{name}.log").read_text().splitlines()
        assert sorted(lines) == ["error", name]


def test_a_single_trainer_can_be_debugged(script: Path) -> None:
    command = [*SHARDWELL, "launch", *NO_CLUSTER, "--num-trainers", "1", write(script, "breakpoint(); print('after')")]
    done = subprocess.run(command, input="p 6 * 7\nc\n", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "(Pdb) 42" in done.stdout and "after" in done.stdout


def test_highest_exit_code_is_returned(launch: Launch, script: Path) -> None:
    source = "import os, sys; sys.exit(7 * os.environ['SHARDWELL_TRAINER'].endswith('1'))"
    done = launch(*NO_CLUSTER, write(script, source))
    assert done.returncode == 7


def test_output_without_a_final_newline_is_relayed(launch: Launch, script: Path) -> None:
    done = launch(*NO_CLUSTER, "--num-trainers", "1", write(script, "print('a\\rb\\nc', end='')"))
    assert done.stdout == "[trainer-0] a\r[trainer-0] b\n[trainer-0] c\n"


def test_dead_trainer_is_restarted(launch: Launch, script: Path, tmp_path: Path) -> None:
    source = """
        import os, pathlib, signal
        marker = pathlib.Path({marker!r})
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        print("second start")
    """
    command = write(script, source, marker=str(tmp_path / "marker"))
    done = launch(*NO_CLUSTER, "--num-trainers", "1", "--restart", "1", command)
    assert (done.returncode, done.stdout) == (0, "[trainer-0] second start\n")
    assert "trainer-0 ended by SIGKILL; restarting it (1 of 1)" in done.stderr


def test_number_of_restarts_is_limited(launch: Launch, script: Path) -> None:
    done = launch(
        *NO_CLUSTER, "--num-trainers", "1", "--restart", "2", write(script, "print('start'); raise SystemExit(3)")
    )
    assert (done.returncode, done.stdout.count("start")) == (3, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launch_prints_its_plan_and_a_signal_stops_trainers_and_servers(script: Path, number: signal.Signals) -> None:
    with launched("--num-shards", "1", "--run", "r", write(script, WAIT)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[launch] starting a private cluster: a coordinator and 1 shard server\n"
        plan = process.stdout.readline()
        assert plan.startswith("[launch] run 'r' on 127.0.0.1:")
        assert plan.endswith(": starting 2 trainers for World(dp=2, tp=1, pp=1)\n")
        wait_for_lines(process, "waiting", 2)
        below = descendants(process.pid)
        assert len(below) == 4, "two trainers, a coordinator and a shard server"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        wait_gone(below)


def test_signal_right_after_the_start_of_a_trainer_stops_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = TrainerProcess.start, []

    def start_and_signal(trainer: TrainerProcess) -> None:
        start(trainer)
        started.append(trainer.pid)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainerProcess, "start", start_and_signal)
    assert main(["launch", *NO_CLUSTER, "--num-trainers", "2", write(script, WAIT)]) == 128 + signal.SIGTERM
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_second_ctrl_c_kills_trainers_that_ignore_the_first(script: Path) -> None:
    with launched(*NO_CLUSTER, write(script, STUBBORN)) as process:
        wait_for_lines(process, "waiting", 2)
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        wait_for_lines(process, "stopping 2 trainers", 1)
        assert all(trainer.is_running() for trainer in below)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        wait_gone(below)


def test_killed_launch_leaves_no_processes(script: Path, tmp_path: Path) -> None:
    # A killed launcher cannot remove its temporary files.
    with launched("--num-shards", "1", write(script, STUBBORN), TMPDIR=str(tmp_path)) as process:
        wait_for_lines(process, "waiting", 2)
        below = descendants(process.pid)
        assert len(below) == 4
        process.kill()
        wait_gone(below)


@pytest.mark.long  # test_dead_trainer_is_restarted, and tests/faults/test_rejoin.py
def test_restarted_trainer_rejoins_the_run(cluster: shardwell.LocalCluster, run_name: str, script: Path) -> None:
    # The survivor would train to the end before the other trainer has started again.
    command = write(script, TRAIN, steps=40, joins=str(script) + ".joins", starts=3)
    with launched("--coordinator", cluster.address, "--run", run_name, "--restart", "1", command) as process:
        wait_for_lines(process, "step 2 ", 2)
        victim = next(child for child in descendants(process.pid) if "script.py" in " ".join(child.cmdline()))
        victim.send_signal(signal.SIGKILL)
        wait_for_lines(process, "restarting it (1 of 1)", 1)
        wait_for_lines(process, "step 39 ", 2)
        assert process.wait(30) == 0


@pytest.mark.long
def test_relay_serves_the_trainers_of_a_launch(
    cluster: shardwell.LocalCluster, run_name: str, script: Path, tmp_path: Path
) -> None:
    command = write(script, TRAIN, joins=str(tmp_path / "joins"), steps=3, starts=2)
    remote = {
        "SHARDWELL_TOKEN_FILE": cluster.token_file,
        "SHARDWELL_TRANSPORTS": "socket,grpc",  # as if the servers were on another host
        "SHARDWELL_HOST_CACHE_BYTES": str(1 << 20),
        "SHARDWELL_GRADIENT_REDUCTION": "hierarchical",
    }
    options = ("--coordinator", cluster.address, "--relay", "--log-dir", str(tmp_path), "--run", run_name)
    with launched(*options, command, **remote) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "[launch] relay for the trainers of this host at 127.0.0.1:" in output
    assert "registered with the coordinator" in (tmp_path / "relay.log").read_text()
    assert "no relay on host" not in output


def test_invalid_launch_arguments_are_explained(launch: Launch) -> None:
    done = launch("absent.py")
    assert (done.returncode, done.stderr) == (1, "shardwell launch: no such script: absent.py\n")


def test_trainers_outlive_a_shard_server_and_a_dead_coordinator_ends_the_launch(script: Path) -> None:
    """The logs of both are printed."""
    with launched("--num-shards", "1", write(script, WAIT)) as process:
        wait_for_lines(process, "waiting", 2)
        below = descendants(process.pid)
        next(child for child in below if "shard" in child.cmdline()).kill()
        wait_for_lines(process, "[launch] shard-0 ended by SIGKILL. The end of its log:", 1)
        assert sum("script.py" in " ".join(child.cmdline()) for child in below if child.is_running()) == 2
        coordinator = next(child for child in below if "coordinator" in child.cmdline())
        coordinator.kill()
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(20) == 1
        assert "[launch] coordinator ended by SIGKILL. The end of its log:\n    " in output
        wait_gone(below)
