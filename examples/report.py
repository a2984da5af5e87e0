"""Output of the example: a progress line, a loss curve, and a summary of time and memory."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import psutil
from matplotlib.figure import Figure
from torch import nn

import shardwell

matplotlib.use("agg")

_PROGRESS_S = 0.5
"""Seconds between two updates of the progress line on a terminal."""
_LOG_PROGRESS_S = 5.0
"""Seconds between two progress lines in a log."""


class History:
    """The losses of the run. ``session.track`` stores them with every commit, so that they survive a lost trainer."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def add(self, step: int, loss: float) -> None:
        self.steps.append(step)
        self.losses.append(round(loss, 4))

    def recent_loss(self, count: int = 20) -> float:
        """Returns the mean of the last losses, which varies less than a single loss."""
        return sum(self.losses[-count:]) / max(1, len(self.losses[-count:]))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.losses = list(state["steps"]), list(state["losses"])


class Progress:
    """Prints progress: one line that is rewritten on a terminal, or regular lines in a log."""

    def __init__(self, session: shardwell.Session, *, num_steps: int, step_tokens: int) -> None:
        self._session, self._num_steps, self._step_tokens = session, num_steps, step_tokens
        self._live = sys.stdout.isatty() or os.environ.get("SHARDWELL_LIVE_OUTPUT") == "1"
        self.started = self._shown_at = time.perf_counter()
        self._shown_step, self._shown_wait_s = session.step, 0.0

    def show(self, step: int, loss: float) -> None:
        """Prints progress if the last output is old enough. Called after every step."""
        now, last = time.perf_counter(), step + 1 == self._num_steps
        if not last and now - self._shown_at < (_PROGRESS_S if self._live else _LOG_PROGRESS_S):
            return
        seconds, wait_s = now - self._shown_at, self._session.stats()["gather_wait_s"]
        line = (
            f"step {step + 1:4d}/{self._num_steps}  loss {loss:.3f}  "
            f"{(step + 1 - self._shown_step) * self._step_tokens / seconds:7,.0f} tokens/s  "
            f"waiting for weights {(wait_s - self._shown_wait_s) / seconds:4.0%}"
        )
        print(f"{line}\x1b[K" if self._live else line, end="\r" if self._live and not last else "\n", flush=True)
        self._shown_at, self._shown_step, self._shown_wait_s = now, step + 1, wait_s


def save_curve(history: History, entropy: float, path: Path) -> None:
    """Saves the loss curve as an image."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(history.steps, history.losses, color="tab:blue", alpha=0.25, label="loss of each step")
    axes.plot(history.steps, _running_mean(history.losses, 20), color="tab:blue", label="mean of 20 steps")
    axes.axhline(entropy, color="tab:red", linestyle="--", label="unigram entropy of the text")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="A small GPT, its weights on shard servers")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_curve(history: History, entropy: float, *, width: int = 72, height: int = 14) -> str:
    """Returns the loss curve as text."""
    smooth = _running_mean(history.losses, 20)
    columns = [smooth[column * len(smooth) // width] for column in range(width)]
    low, high = min(*columns, entropy), max(*columns, entropy)

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (height - 1))

    rows = [["-" if row == row_of(entropy) else " "] * width for row in range(height)]
    for column, value in enumerate(columns):
        rows[row_of(value)][column] = "*"
    labels = {row_of(value): f"{value:.2f}" for value in (low, high, entropy)}
    lines = [f"{labels.get(row, ''):>6} |{''.join(characters)}" for row, characters in enumerate(rows)]
    axis = f"{'':>6} +{'-' * width}\n{'':>8}step 0{f'step {history.steps[-1] + 1}':>{width - 6}}"
    return "\n".join([*lines, axis, f"{'':>8}* loss, mean of 20 steps    - unigram entropy of the text"])


def describe_costs(session: shardwell.Session, model: nn.Module, *, seconds: float, num_steps: int) -> str:
    """Returns a paragraph about this trainer's time and the memory of all processes."""
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    stats = session.stats()
    waits = {name: stats[f"{name}_wait_s"] / seconds for name in ("gather", "push", "finish", "commit")}
    compute = max(0.0, 1 - sum(waits.values()))
    transports = ", ".join(
        f"{transport['transport']} to {transport['server']} at {transport['bytes_per_s'] / 1e9:.1f} GB/s"
        for transport in session.transports()
    )
    weights = (
        f"The trainer fetched {stats['gathered_bytes'] / 1e6:,.0f} MB of weights"
        if stats["gathered_bytes"]
        else "The trainer read weights in place, 0 MB fetched,"
    )
    text = (
        f"Where time and memory went: {num_steps} steps in {seconds:.0f} s. "
        f"This trainer spent {compute:.0%} of the time computing, {waits['gather']:.0%} waiting for weights, "
        f"{waits['push']:.0%} for pushes of its gradients, {waits['finish']:.0%} for the other trainers' work and "
        f"{waits['commit']:.0%} for commits. {weights} and pushed "
        f"{stats['pushed_bytes'] / 1e6:,.0f} MB of gradients. "
        f"Transports, measured when they were opened: {transports}. "
        f"At most {stats['peak_unit_bytes'] / 1e6:.1f} MB of the model's {parameter_bytes / 1e6:.1f} MB of parameters "
        f"were in this trainer's own memory at a time, and no optimizer state. "
        f"{_describe_processes()}"
    )
    return textwrap.fill(text, width=100)


def _describe_processes() -> str:
    """Describes the own memory of each process of this launch on this machine."""
    me = psutil.Process()
    family = {me, *me.children(recursive=True), *_siblings(me)}
    trainers: list[int] = []
    servers: list[int] = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # another trainer may have ended meanwhile
            (servers if _is_server(process) else trainers).append(_unique_bytes(process))
    text = f"Own memory per trainer process: {_megabytes(trainers)}"
    return f"{text}; per server process: {_megabytes(servers)}." if servers else f"{text}."


def _siblings(me: psutil.Process) -> Sequence[psutil.Process]:
    """Returns the processes that `shardwell launch` started together with this process."""
    launcher = me.parent()
    if launcher is None or "launch" not in launcher.cmdline():
        return []
    return launcher.children()


def _is_server(process: psutil.Process) -> bool:
    return "shardwell_server" in process.cmdline()


def _unique_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss)


def _megabytes(counts: Sequence[int]) -> str:
    return ", ".join(f"{count / 1e6:.0f}" for count in sorted(counts)) + " MB"


def _running_mean(values: Sequence[float], count: int) -> list[float]:
    windows = (values[max(0, end - count) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
