"""A run of one trainer that trains in a thread while a test reads its weights."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

import shardwell
from tests.support.cluster import wait_until


class FirstStates(dict[int, dict[str, torch.Tensor]]):
    """The first state of each version: a repeated step begins with buffers that the lost attempt has changed."""

    def __setitem__(self, version: int, state: dict[str, torch.Tensor]) -> None:
        self.setdefault(version, state)


class BackgroundTraining:
    """Trains in a thread, and records the whole state before every step.

    Args:
        address: Address of the coordinator.
        run: Name of the run. Empty: a unique one.
        options: Further arguments of ``join``.
    """

    model: ClassVar[type[nn.Module]]
    units: ClassVar[set[type[nn.Module]]]
    """Modules that are units of their own."""
    width: ClassVar[int]
    """Number of inputs of the model."""

    def __init__(self, address: str, run: str = "", **options: Any) -> None:
        self.run, self.states = run or uuid.uuid4().hex, dict[int, dict[str, torch.Tensor]]()
        self._options = options
        self.step, self._address, self._stop = 0, address, threading.Event()
        self._go, self._paused = threading.Event(), threading.Event()
        self._go.set()
        self._failures: list[Exception] = []
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        try:
            self._steps()
        except Exception as error:
            self._failures.append(error)

    def _steps(self) -> None:
        torch.manual_seed(0)
        model = self.model()
        with shardwell.join(self._address, run=self.run, **self._options) as session:
            shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy(self.units))
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
            for step in session.steps(10**6):
                self.states[step.number], self.step = shardwell.full_state_dict(model), step.number
                while not self._go.wait(0.01) and not self._stop.is_set():
                    self._paused.set()
                if self._stop.is_set():
                    return
                for batch in step.batches(lambda step, rank: torch.randn(8, self.width)):
                    model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    def pause(self) -> int:
        """Stops before the next step; returns its number, which is the newest version."""
        self._go.clear()
        self._paused.clear()
        assert self._paused.wait(60), self._failures
        return self.step

    def resume(self) -> None:
        self._go.set()

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Trains in the background, from the second step on."""
        self._thread.start()
        try:
            self.wait_for(2)
            yield
        finally:
            self._stop.set()
            self._thread.join(60)
        assert not self._failures and not self._thread.is_alive(), self._failures

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.step >= step or bool(self._failures), f"step {step}", timeout_s=60.0)
