"""Inference engines that follow the committed weights of a run: see docs/serving.md.

``LiveModel`` is a plain model, such as one of Transformers. ``load_weights`` fills any engine with a method of that
name, and ``GroupReader`` one with several workers. ``shardwell.engines.vllm`` is vLLM's backend, and
``shardwell.engines.vllm_server`` updates running servers.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from http.client import HTTPException
from threading import Event
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from shardwell.engines.live_model import LiveModel
from shardwell.weights.reader import GroupReader, Reader, attach
from shardwell.weights.stored_parameters import Names
from shardwell.weights.weight_files import Rename, listed
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError, UsageError
from shardwell_wire.host.variables import variables

__all__ = ["EngineServer", "GroupReader", "LiveModel", "follow", "load_weights", "register_vllm"]

logger = logging.getLogger(__name__)

_LOCAL = re.compile(r"(https?://)?(localhost|127\.[\d.]+|\[::1\])([:/].*)?")


def load_weights(
    reader: Reader,
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    version: int | str | None = None,
    *,
    rename: Rename | None = None,
    names: Names | None = None,
) -> int:
    """Loads a version of a run into an engine that takes an iterator of names and tensors.

    >>> version = shardwell.engines.load_weights(reader, engine_model.load_weights)

    The whole version is in CPU memory before ``load`` is called. If it cannot be read, the engine is not touched.

    Args:
        reader: Reads the run.
        load: Loads pairs of names and CPU tensors, such as ``load_weights`` of a model in vLLM or SGLang. Called once.
            A tied parameter has its first name only, as in checkpoints of Hugging Face.
        version: The version or the name of a published one. Default: the newest.
        rename: Maps the names that ``Reader.read`` returns to those that ``load`` expects, or to None to skip a tensor.
        names: A glob pattern of names in the run, or several, such as ``"*lora_*"``. Default: all.

    Returns:
        The version that was loaded.

    Raises:
        Exception: As ``Reader.read``, and nothing was loaded.
    """
    number, tensors = reader.read(version, names=names)
    pairs = ((name if rename is None else rename(name), value) for name, value in tensors.items())
    load((name, value) for name, value in pairs if name is not None)
    return number


class EngineServer(ABC):
    """A server of an inference engine, at a URL, that loads versions when it is told to over HTTP."""

    history: str | None = None
    """``history`` of the last ``update``. None if no update has succeeded, or if the last one failed."""

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        self.url, self._timeout_s = url.rstrip("/"), timeout_s

    @abstractmethod
    def version(self) -> int:
        """Returns the version that the server serves. -1: the weights with which it was started."""

    @abstractmethod
    def update(self, version: int, history: str = "") -> None:
        """Loads a version. Raises UnavailableError if that fails. The call can be repeated, also by another process."""

    def _call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=timeout_s or self._timeout_s) as answer:
                return dict(json.load(answer))
        except (OSError, HTTPException, TypeError, ValueError) as error:
            said = ""
            with suppress(OSError, HTTPException):
                said = error.read(200).decode(errors="replace") if isinstance(error, HTTPError) else ""
            raise UnavailableError(f"{self.url}/{path} failed: {error} {said}. See the server's log") from error


def follow(reader: Reader, servers: Sequence[EngineServer], *, pause_s: float = 1.0, stop: Event | None = None) -> None:
    """Updates servers, one after another, to each new version, or to the newest if commits are faster.

    A server that is down or fails is logged and tried again with the newest version then: after ``pause_s`` seconds,
    later after up to 30. Returns between two updates when ``stop`` is set. Raises UsageError if there are no servers.
    """
    if not servers:
        raise UsageError("follow(servers=[]): expected at least one server")
    stop, resting = stop or Event(), dict[EngineServer, tuple[float, float]]()
    while not stop.is_set():
        try:
            found = list[int]()
            for server in servers:
                version, history = reader.newest()
                found.append(version)
                rest_until, next_rest_s = resting.get(server, (0.0, pause_s))
                if stop.is_set() or time.monotonic() < rest_until:
                    continue
                try:
                    if server.version() != version or server.history != history:
                        server.update(version, history)
                        logger.info("%s serves version %d", server.url, version)
                    resting.pop(server, None)
                except UnavailableError as error:
                    logger.warning("the server was not updated, next attempt in %.0f s: %s", next_rest_s, error)
                    resting[server] = time.monotonic() + next_rest_s, min(2 * next_rest_s, 30.0)
            with suppress(DeadlineError):
                reader.wait_for(min(found) + 1, pause_s)
        except ShardwellError as error:
            logger.warning("the servers keep their versions: %s", error)
            stop.wait(pause_s)


def run_command(server: Callable[[str, dict[str, Any]], EngineServer], description: str | None) -> None:
    """Runs ``follow`` as a command. After SIGTERM or SIGINT, it finishes the update that it has begun, and ends.

    Args:
        server: Called with each URL of the command line, and the arguments with which an engine attaches.
        description: Text of ``--help``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL", help="servers, such as http://localhost:8000")
    parser.add_argument("--address", help="coordinator (default: SHARDWELL_ADDRESS)")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--token-file", help="file with a reader's token, here and on the servers' hosts")
    parser.add_argument("--gather-dtype", default="float32", help="dtype in which the servers receive 32-bit weights")
    parser.add_argument("--delta-cache-bytes", type=int, default=0, help="memory of each server's host for deltas")
    attached = vars(parser.parse_args())
    urls, stop = attached.pop("servers"), Event()
    attached["address"] = attached["address"] or variables().get("SHARDWELL_ADDRESS") or "localhost:50051"
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        parser.error(f"{wrong[0]!r} is not a URL: expected one such as http://localhost:8000")
    if any(map(_LOCAL.fullmatch, attached["address"].split(","))) and not all(map(_LOCAL.fullmatch, urls)):
        parser.error(f"--address {attached['address']} is not that of another host: name the coordinator's host")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with attach(**attached) as reader:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            follow(reader, [server(url, attached) for url in urls], stop=stop)
    except ShardwellError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def refuse_other_model(tensors: Mapping[str, torch.Tensor], config: Any) -> None:
    """Raises UsageError if tensors are not those of a causal language model of Transformers, by names and shapes.

    Checked before loading, because a failed load destroys the engine's weights. A tied parameter needs only one of its
    names. Models of other kinds are not checked.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))  # which sets config.dtype
    shapes, ties = dict[str, torch.Size](), dict[int, list[str]]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        shapes[name] = tensor.shape
        ties.setdefault(id(tensor), []).append(name)
    unknown = [repr(name) for name, tensor in tensors.items() if shapes.get(name) != tensor.shape]
    lacking = [repr(names[0]) for names in ties.values() if not tensors.keys() & set(names)]
    problems = [
        *([f"the model has no {listed(unknown)} of these shapes"] if unknown else []),
        *([f"the run lacks {listed(lacking)}"] if lacking else []),
    ]
    if problems:
        raise UsageError(
            f"the run does not fit the engine's model {type(model).__name__}, which keeps its weights: "
            f"{'; '.join(problems)}"
        )


def register_vllm() -> None:
    """Registers the backend ``shardwell`` in vLLM, which calls this in each of its processes. Harmless to repeat."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        if "shardwell" not in Factory._registry:
            Factory.register_engine("shardwell", "shardwell.engines.vllm", "ShardwellEngine")
    except (ImportError, AttributeError, TypeError) as error:  # vLLM also has to start if nothing uses the backend
        logger.warning("this version of vLLM cannot use the weight-transfer backend 'shardwell': %s", error)
