"""What `make demo` runs, in small: it trains, shows what it should, and ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.corpus import Corpus
from tests.support.processes import ROOT

SMALL = ["--vocab-size", "200", "--context", "16", "--batch-size", "4"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat; the dog sat on the cat. " * 50, encoding="utf-8")
    return path


def test_the_demo_shows_what_it_learned(text: Path, tmp_path: Path) -> None:
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


def test_text_survives_its_tokens(text: Path) -> None:
    corpus = Corpus.read(str(text), vocab_size=60)
    assert corpus.vocabulary.decode(corpus.tokens) == corpus.text
    assert len(corpus.vocabulary) <= 60 and " the" in corpus.vocabulary.tokens
    assert len(corpus.tokens) < len(corpus.text) / 2


def test_the_unigram_entropy_of_a_uniform_text_is_that_of_its_letters(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcd", encoding="utf-8")
    assert Corpus.read(str(path), vocab_size=4).unigram_entropy == pytest.approx(1.3862943611)
