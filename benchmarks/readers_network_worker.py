"""The trainer and the engines of ``benchmarks.readers_network``: ``trainer|engine ADDRESS MODEL``."""

from __future__ import annotations

import json
import sys
import threading
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn import functional

import shardwell
from benchmarks import workers
from examples.corpus import Windows
from examples.gpt import GPT, GPTConfig
from shardwell_wire.errors import DeadlineError, VersionGoneError

RUN = "readers"
KEPT = 2
"""Older versions that the run keeps."""


class Trainer:
    """Trains a GPT on the bytes of English text.

    Args:
        address: Address of the coordinator.
        config: Sizes of the model.
    """

    def __init__(self, address: str, config: GPTConfig) -> None:
        self._session = shardwell.join(address, run=RUN, keep_versions=KEPT)
        torch.manual_seed(0)
        self._model = GPT(config)
        text = "".join(topics.values()).encode("ascii", "ignore")
        self._windows = Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), config.context)
        for block in self._model.blocks:
            shardwell.fully_shard(block, self._session)
        shardwell.fully_shard(self._model, self._session)
        self._optimizer = shardwell.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._steps = self._session.steps(sys.maxsize)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Trains ``steps`` steps at ``rate``; returns versions, the instants of their commits, and seconds of steps."""
        for group in self._optimizer.param_groups:
            group["lr"] = command["rate"]
        commits, seconds = dict[int, float](), list[float]()
        for _ in range(command["steps"]):
            started, step = time.monotonic(), next(self._steps)
            for batch in step.batches(self._windows, batch_size=1):
                functional.cross_entropy(self._model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            self._optimizer.step()
            commits[step.number + 1] = time.monotonic()
            self._optimizer.zero_grad()
            seconds.append(time.monotonic() - started)
        return {"commits": commits, "seconds": seconds}


class Engine:
    """An engine that follows the run.

    Args:
        address: Address of the coordinator.
        config: Sizes of the model.
    """

    def __init__(self, address: str, config: GPTConfig) -> None:
        self._address = address
        self._reader: shardwell.Reader | None = None
        self._model = GPT(config).requires_grad_(False)
        self._way = ""
        self._version = -1
        self._stopped, self._thread = threading.Event(), threading.Thread()
        self._loaded: list[tuple[int, float]] = []
        self._failures: list[str] = []

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Runs one of the commands.

        - ``join``: attaches in a way, and loads the newest version into a new model.
        - ``load``: waits until a version is committed, and loads it.
        - ``follow``: loads each new version in a thread, until ``pause``.
        - ``pause``: returns the versions that ``follow`` has loaded.
        """
        started, cpu = time.monotonic(), time.process_time()
        action = command["do"]
        if action == "join":
            self._join(command["way"])
        elif action == "load":
            self._load(command["version"])
        elif action == "follow":
            self._stopped.clear()
            self._loaded = []
            self._thread = threading.Thread(target=self._follow)
            self._thread.start()
        else:
            self._stopped.set()
            self._thread.join()
            if self._failures:
                raise RuntimeError(self._failures[0])
            return {"loaded": self._loaded}
        now = time.monotonic()
        return {"at": now, "s": now - started, "cpu_s": time.process_time() - cpu, "version": self._version}

    def _join(self, way: str) -> None:
        if self._reader is not None:
            self._reader.close()
        self._way, dtype = way, "float32" if way == "float32" else "bfloat16"
        self._reader = shardwell.attach(
            self._address,
            RUN,
            gather_dtype=dtype,
            delta_cache_bytes=1 << 40 if way == "deltas" else 0,
            timeout_s=120.0,
        )
        self._model = self._model.to(getattr(torch, dtype))
        self._version = self._reader.follow(self._model, cast=True)

    def _load(self, version: int) -> None:
        """Loads a version, or a later one."""
        assert self._reader is not None
        self._reader.wait_for(version, 120.0)
        if self._way == "patch":
            with self._reader.pin() as pinned:
                pinned.patch(self._model.state_dict(), since=self._version)
                self._version = pinned.version
        else:
            self._version = self._reader.follow(self._model, cast=True)
        assert self._version >= version

    def _follow(self) -> None:
        assert self._reader is not None
        try:
            while not self._stopped.is_set():
                try:
                    self._reader.wait_for(self._version + 1, 2.0)
                    self._load(self._version + 1)
                except DeadlineError:
                    continue
                except VersionGoneError:  # too far behind for ``patch``
                    self._version = self._reader.follow(self._model, cast=True)
                self._loaded.append((self._version, time.monotonic()))
        except Exception as error:
            self._failures.append(repr(error))
            raise


def main() -> None:
    role, address, model = sys.argv[1:]
    torch.set_num_threads(1)
    config = GPTConfig(**json.loads(model))
    worker = Trainer(address, config) if role == "trainer" else Engine(address, config)
    workers.serve(worker.answer)


if __name__ == "__main__":
    main()
