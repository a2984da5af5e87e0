"""vLLM's weight-transfer backend ``shardwell``: each worker of an engine reads a version of a run from its servers.

Nothing is sent by the trainers. vLLM imports this module when ``weight_transfer_config={"backend": "shardwell"}``.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from vllm import LLM
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from shardwell.engines import refuse_other_model
from shardwell.weights.reader import Reader, attach
from shardwell_wire.errors import StepStateError, UnavailableError

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Arguments of ``shardwell.attach``, without ``tls`` and ``hold_s``."""

    address: str
    run: str
    token_file: str | None = None
    timeout_s: float = 60.0
    gather_dtype: str = "float32"
    delta_cache_bytes: int = 0
    name: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version that all workers load."""

    version: int
    background: bool = False
    """Whether the call only starts to read, and returns. The engine serves until a second call waits for the rest."""


class ShardwellEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads versions of a run into the model of one worker. Created by vLLM.

    The model is not touched before every worker of the engine has the whole version in its CPU memory. A failed update
    therefore leaves the former version, and can be repeated after ``finish_weight_update``.

    vLLM's executor for several workers reads no replies after that of a worker that raises, and takes them for those of
    its next call. Therefore only the last worker of each executor raises, and nothing but an update does.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    _attached: InitInfo | None = None
    _reader: Reader | None = None
    _fits = False
    """Whether the run has trained the engine's model."""
    _reading: tuple[int, Future[dict[str, torch.Tensor]]] | None = None
    _read: dict[str, torch.Tensor] | None = None
    """A version that every worker has read, and that ``finish_weight_update`` loads."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self._attached, self._pool = init_info, ThreadPoolExecutor(1, thread_name_prefix="shardwell-read")

    def start_weight_update(self) -> None:
        self._read = None

    def update_weights(self, update_info: dict[str, int | bool]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class also waits for an accelerator

    def receive_weights(self, update_info: UpdateInfo) -> None:
        version, failure, self._read = update_info.version, None, None
        if self._reading and (
            self._reading[0] != version or (self._reading[1].done() and self._reading[1].exception())
        ):
            self._reading = None
        if self._attached and self._reading is None:
            self._reading = version, self._pool.submit(self._read_version, version)
        if update_info.background:
            return
        try:
            if self._reading is None:
                raise StepStateError("the engine is not attached to a run: call init_weight_transfer_engine first")
            read = self._reading[1].result()
            if not self._fits:  # not in the thread: the engine serves meanwhile, and this sets torch's default dtype
                refuse_other_model(read, self.model_config.hf_config)
                self._fits = True
        except Exception as error:
            logger.error("version %d was not loaded: %s", version, error)
            failure = error
        self._reading = None
        failed = torch.tensor([int(failure is not None)])
        world, parallel = get_world_group(), self.parallel_config  # also data-parallel ranks, if they share experts
        torch.distributed.all_reduce(failed, group=world.cpu_group)
        has_own_executor = parallel.distributed_executor_backend == "external_launcher"
        if not failed.item():
            self._read = read
        elif has_own_executor or (world.rank_in_group + 1) % parallel.world_size == 0:
            raise failure or UnavailableError(f"another worker did not load version {version}: its log says why")

    def _read_version(self, version: int) -> dict[str, torch.Tensor]:
        if self._reader is None:
            assert self._attached is not None
            self._reader = attach(**asdict(self._attached))
        return self._reader.read(version)[1]

    def finish_weight_update(self) -> None:
        if self._read is None:
            return  # the update has failed, or has only started to read
        read, self._read = self._read, None
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(read.items()))
        finally:  # also after an error: the next update would otherwise add to half-loaded layers
            finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        if self._attached is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._reader is not None:
            self._reader.close()
        self._attached = self._reader = self._reading = self._read = None
        self._fits = False


def update(llm: LLM, version: int) -> None:
    """Loads a version into an engine of this process, and removes cached prefixes of the former version.

    Args:
        llm: The engine, after ``llm.init_weight_transfer_engine``. Its answers then name the version
            (``CompletionOutput.weight_versions``).
        version: The version. The run has to keep it until all workers have pinned it (``join(keep_versions=...)``).

    Raises:
        Exception: As ``Reader.read``, or vLLM's own error. The engine has its former version, unless vLLM has failed
            while it loaded what was read. Then repeat the update before the next request, or start an engine of several
            workers again.
    """
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update(str(version))
    except Exception:
        with suppress(Exception):  # ends the update in the workers that did not raise
            llm.finish_weight_update()
        raise
    llm.reset_prefix_cache()
