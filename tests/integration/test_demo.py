"""A small `make demo`: trains, prints its report, and ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from examples.corpus import Corpus
from tests.support.cluster import descendants
from tests.support.processes import ROOT

SMALL = ["--vocab-size", "200", "--context", "16", "--batch-size", "4"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat; the dog sat on the cat. " * 50, encoding="utf-8")
    return path


@pytest.mark.long
def test_demo_prints_loss_samples_and_costs(text: Path, tmp_path: Path) -> None:
    options = ["--text", str(text), "--num-steps", "30", "--output", str(tmp_path / "out"), *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "shardwell", "launch", "examples/train_gpt.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert re.search(r"step   30/30  loss \d\.\d+ +[\d,]+ tokens/s  waiting for weights +\d+%", output)
    before, after, entropy = map(float, re.findall(r"fell from (\S+) to (\S+), against (\S+) for", output)[0])
    assert after < entropy < before
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    assert "The trained model writes:" in output
    paragraph = output[output.index("Where time and memory went:") :]
    assert paragraph.count("MB") >= 6, "bytes moved, unit memory, and memory of trainers and servers"


@pytest.mark.long
def test_another_trainer_prints_when_the_trainer_of_rank_0_is_killed(text: Path, tmp_path: Path) -> None:
    options = ["--text", str(text), "--num-steps", "80", "--output", str(tmp_path / "out"), *SMALL]
    with subprocess.Popen(
        [sys.executable, "-m", "shardwell", "launch", "examples/train_gpt.py", *options],
        cwd=ROOT,
        env={**os.environ, "SHARDWELL_LIVE_OUTPUT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launch:
        try:
            assert launch.stdout is not None
            speaker = next(line.split("]")[0] for line in launch.stdout if "step " in line).removeprefix("[")
            trainers = [child for child in descendants(launch.pid) if "examples/train_gpt.py" in child.cmdline()]
            victim = next(child for child in trainers if child.environ()["SHARDWELL_TRAINER"] == speaker)
            victim.kill()
            output = launch.stdout.read()
            launch.wait(60)
        finally:
            launch.kill()
    other = {"trainer-0": "trainer-1", "trainer-1": "trainer-0"}[speaker]
    assert f"{speaker} ended by SIGKILL" in output
    assert re.search(rf"\[{other}\] step   80/80  loss", output)
    assert f"[{other}] The loss fell from" in output


@pytest.mark.long
def test_demo_kills_a_trainer_and_a_server_and_gets_the_same_weights(text: Path) -> None:
    # So many that all backups are in sync long before the last step, also on a busy machine.
    options = ["--text", str(text), "--num-steps", "60", *SMALL]
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "examples/kill_demo.py", *options],
        cwd=ROOT,
        env={**os.environ, "KILL_DEMO_TEST": mark},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout
    (step,) = re.findall(r"step (\d+): SIGKILL to trainer-1, process \d+", output)
    assert 20 <= int(step) < 60
    killed, served = re.findall(r": SIGKILL to (shard-[01]), .* serves (\S+) \wiB of the \S+ \wiB of weights", output)[
        0
    ]
    assert float(served) > 0
    assert re.search(rf"{killed} .*ended by SIGKILL: starting it again", output + done.stderr)
    for name in ("trainer-1", killed):
        assert re.search(rf"\[kill\] {name} killed at step \d+: next commit \d+\.\d\d s later", output)
    without, with_kills = re.findall(r"SHA-256 of the weights with\w* kills: +([0-9a-f]{64})", output)
    assert without == with_kills and "every bit of the weights is equal" in output
    assert not [process.cmdline() for process in psutil.process_iter() if _mark_of(process) == mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("KILL_DEMO_TEST")
    except psutil.Error:
        return None


@pytest.mark.long
def test_text_is_served_from_the_model_that_trains(text: Path) -> None:
    options = ["--text", str(text), "--num-steps", "40", "--vocab-size", "60", "--context", "16", "--prompt", "the cat"]
    done = subprocess.run(
        [sys.executable, "examples/serve_while_training.py", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    versions = [int(found) for found in re.findall(r"version +(\d+): the cat", done.stdout)]
    assert "serving at http://localhost:" in done.stdout
    assert (
        len(versions) >= 2 and versions == sorted(versions) and versions[-1] == 40
    )  # the last line shows the final weights


@pytest.mark.long
def test_rollouts_are_repeated_by_their_versions_with_the_same_bits() -> None:
    done = subprocess.run(
        [sys.executable, "examples/rl.py", "--steps", "12"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step    4  SIGKILL to trainer-1" in done.stdout and "step    8  SIGKILL to engine-1" in done.stdout
    assert "24 of 24 files of rollouts are equal" in done.stdout
    first, second = re.findall(r"SHA-256 of the weights of run \d: ([0-9a-f]{64})", done.stdout)
    assert first == second


def test_tokens_decode_to_the_same_text(text: Path) -> None:
    corpus = Corpus.read(str(text), vocab_size=60)
    assert corpus.vocabulary.decode(corpus.tokens) == corpus.text
    assert len(corpus.vocabulary) <= 60 and " the" in corpus.vocabulary.tokens
    assert len(corpus.tokens) < len(corpus.text) / 2


def test_unigram_entropy_of_uniform_text_equals_the_entropy_of_its_letters(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcd", encoding="utf-8")
    assert Corpus.read(str(path), vocab_size=4).unigram_entropy == pytest.approx(1.3862943611)
