"""Cells of a notebook that run again, are interrupted, or meet another notebook: the right result, or the way out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwell
import shardwell.testing

JOIN = """
import torch
from torch import nn
import shardwell
session = shardwell.join(run=run)
"""
MODEL = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
shardwell.auto_wrap(model, session)
optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
"""
TRAIN = """
for step in session.steps(6):
    for x in step.batches(lambda step, dp_rank: torch.randn(16, 4)):
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        during(step.number)
    optimizer.step()
    optimizer.zero_grad()
"""
SAVE = "final = {name: value.clone() for name, value in shardwell.full_state_dict(model).items()}"


class Notebook:
    """Cells that share their names. A cell that raises leaves the names that it has set, as in Jupyter."""

    def __init__(self, run: str = "notebook") -> None:
        self.names: dict[str, Any] = {"run": run, "during": lambda number: None}

    def run(self, *cells: str) -> None:
        for cell in cells:
            exec(cell, self.names)

    def interrupt_at(self, number: int) -> None:
        def during(current: int) -> None:
            if current == number:
                raise KeyboardInterrupt

        self.names["during"] = during
        with pytest.raises(KeyboardInterrupt):
            self.run(TRAIN)
        self.names["during"] = lambda number: None

    @property
    def session(self) -> shardwell.Session:
        session: shardwell.Session = self.names["session"]
        return session


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    with shardwell.testing.in_process_cluster():
        yield


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    made.session.close()


def all_at_once() -> dict[str, torch.Tensor]:
    """Returns the weights of a notebook whose cells run once, in a run of its own."""
    other = Notebook("undisturbed")
    other.run(JOIN, MODEL, TRAIN, SAVE)
    other.session.close()
    return dict(other.names["final"])


def assert_undisturbed(notebook: Notebook) -> None:
    notebook.run(SAVE)
    expected = all_at_once()
    assert notebook.names["final"].keys() == expected.keys()
    assert all(torch.equal(value, notebook.names["final"][name]) for name, value in expected.items())


def test_an_interrupted_training_cell_runs_again(notebook: Notebook) -> None:
    notebook.run(JOIN, MODEL)
    notebook.interrupt_at(3)
    assert notebook.session.step == 3
    notebook.run(TRAIN)
    assert_undisturbed(notebook)


def test_a_model_cell_that_runs_again_in_the_midst_of_training(notebook: Notebook) -> None:
    notebook.run(JOIN, MODEL)
    notebook.interrupt_at(3)
    notebook.run("former = model")
    advice = r"call shardwell\.unwrap\(model\) before, or session\.close\(\) and shardwell\.join again"
    with pytest.raises(shardwell.errors.StepStateError, match=advice):
        notebook.run(MODEL)
    notebook.run("session.close()", JOIN, MODEL, TRAIN)
    assert_undisturbed(notebook)


def test_a_model_cell_that_runs_again_after_the_former_model_is_unwrapped(notebook: Notebook) -> None:
    notebook.run(JOIN, MODEL)
    notebook.interrupt_at(3)
    with pytest.raises(shardwell.UsageError, match=r"or after optimizer\.zero_grad\(\) to drop the step's gradients$"):
        notebook.run("shardwell.unwrap(model)")
    notebook.run("optimizer.zero_grad()", SAVE, "before = final", "shardwell.unwrap(model)", MODEL, SAVE)
    before, after = notebook.names["before"], notebook.names["final"]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    notebook.run(TRAIN)
    assert notebook.session.step == 6


def test_training_after_a_model_cell_that_has_failed_is_noticed(
    notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    notebook.run(JOIN, MODEL)
    notebook.interrupt_at(3)
    with pytest.raises(shardwell.errors.StepStateError):
        notebook.run(MODEL)
    with caplog.at_level(logging.WARNING):
        notebook.run(TRAIN)
    (warning,) = [text for text in caplog.messages if "no sharded module ran" in text]
    assert warning.startswith("step 4: ")  # step 3 has gradients of the interrupted cell


def test_a_join_cell_that_runs_again_is_told_to_close_the_former_session(notebook: Notebook) -> None:
    notebook.run(JOIN, MODEL)
    notebook.interrupt_at(3)
    former = notebook.session
    notebook.run(JOIN, MODEL)
    advice = r"is a spare and would wait forever: .* Use that session, or close it before you join again$"
    with pytest.raises(shardwell.UsageError, match=advice):
        notebook.run(TRAIN)
    former.close()
    notebook.run("session.close()", JOIN, MODEL, TRAIN)
    assert_undisturbed(notebook)


def test_a_second_session_of_a_finished_run_has_no_steps_left(notebook: Notebook) -> None:
    notebook.run(JOIN, MODEL, TRAIN)
    finished = notebook.session
    notebook.run(JOIN, MODEL, "left = list(session.steps(6))")
    assert notebook.names["left"] == []
    finished.close()


def test_a_kernel_that_is_restarted_continues_the_run(notebook: Notebook) -> None:
    notebook.run(JOIN, MODEL)
    notebook.interrupt_at(3)
    notebook.session.close()  # as the end of the process does
    notebook.names = Notebook().names
    notebook.run(JOIN, MODEL, TRAIN)
    assert_undisturbed(notebook)


def test_two_notebooks_with_runs_of_their_own_train_at_once(notebook: Notebook) -> None:
    other = Notebook("other")
    notebook.run(JOIN, MODEL)
    other.run(JOIN, MODEL)
    notebook.interrupt_at(2)
    other.run(TRAIN, SAVE)
    notebook.run(TRAIN)
    assert_undisturbed(notebook)
    assert all(torch.equal(value, other.names["final"][name]) for name, value in notebook.names["final"].items())
    other.session.close()
