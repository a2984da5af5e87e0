"""A plain model that follows a run, and answers requests with the version that computed the answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from shardwell.weights.reader import Reader
from shardwell.weights.weight_files import Rename
from shardwell_wire.errors import DeadlineError, ShardwellError, UsageError

logger = logging.getLogger(__name__)


class _Turns:
    """A lock that a waiting thread gets before the thread that releases it: that one mostly gets a plain lock again."""

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class LiveModel:
    """A plain model, such as one of Transformers, that follows a run. Thread-safe.

    >>> live = shardwell.engines.LiveModel(reader, model)
    >>> with live.following():
    ...     version, tokens = live.generate(input_ids=prompt, max_new_tokens=20)

    Requests are computed one after another, each with exactly one version. New weights are read while requests are
    computed, and copied into the model between two requests. If a read fails, the model keeps its version.

    Args:
        reader: Reads the run.
        model: The model, on any device. Only this object may use it.
        rename: As in ``Reader.follow``.
        cast: As in ``Reader.follow``.
    """

    def __init__(self, reader: Reader, model: nn.Module, *, rename: Rename | None = None, cast: bool = False) -> None:
        self._reader, self._model, self._rename, self._cast = reader, model, rename, cast
        self._reading, self._using = _Turns(), _Turns()

    @property
    def version(self) -> int:
        """The version that the model has. -1: none yet, or new values are being written."""
        return self._reader.loaded_version(self._model)

    def follow(self) -> int:
        """Loads the newest committed version; returns it. Raises as ``Reader.follow``, and the model is unchanged."""
        with self._reading:
            return self._reader.follow(self._model, rename=self._rename, cast=self._cast, writing=self._using)

    @contextmanager
    def use(self) -> Iterator[int]:
        """Context in which the calling thread has the model to itself; yields its version.

        Raises:
            UsageError: The model has no version of the run yet.
        """
        with self._using:
            if (version := self.version) < 0:
                raise UsageError("the model has no weights of the run yet: call follow() first, or use following()")
            yield version

    def generate(self, *arguments: Any, **options: Any) -> tuple[int, Any]:
        """Returns the version and ``model.generate(*arguments, **options)``, computed without gradients."""
        with self.use() as version, torch.no_grad():
            return (version, self._model.generate(*arguments, **options))  # type: ignore[operator]

    @contextmanager
    def following(self, *, pause_s: float = 1.0) -> Iterator[None]:
        """Context in which a thread loads each new version, or the newest if commits are faster.

        The first version is loaded before the context begins, and raises as ``follow``. Later errors are logged, and
        the read is repeated.

        Args:
            pause_s: Seconds between two attempts if no step is committed or a read fails.
        """
        self.follow()
        stop = threading.Event()
        thread = threading.Thread(target=self._follow_until, args=(stop, pause_s), name="shardwell-follow", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _follow_until(self, stop: threading.Event, pause_s: float) -> None:
        while not stop.is_set():
            try:
                with suppress(DeadlineError), self._reading:  # a rollback may have replaced the version all the same
                    self._reader.wait_for(self.version + 1, pause_s)
                self.follow()
            except Exception as error:
                is_known = isinstance(error, ShardwellError)  # others are, for example, a lack of memory
                logger.warning("the model stays at version %d: %s", self.version, error, exc_info=not is_known)
                stop.wait(pause_s)
