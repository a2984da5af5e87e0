"""vLLM's weight-transfer backend, which vLLM imports for ``weight_transfer_config={"backend": "shardwell"}``."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from inspect import signature
from typing import Any

import torch
from vllm import LLM
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from shardwell.engines import GroupReader, refuse_other_model
from shardwell.weights.reader import attach
from shardwell_wire.errors import StepStateError


class ShardwellEngine(WeightTransferEngine[Any, Any]):
    """Reads versions of a run from its servers into the model of one worker. Created by vLLM.

    After a worker raises, vLLM's executor leaves the remaining replies in their queues and reads them as replies to the
    next call. Therefore only the last worker of each executor raises.
    """

    init_info_cls = update_info_cls = dict  # checked below: vLLM makes them in all workers
    supports_draft_weight_update = False
    _reader: GroupReader | None = None
    _is_open = False  # whether vLLM has started an update in this worker and not ended it

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Takes the arguments of ``shardwell.attach``."""
        with self._raising_once():
            signature(attach).bind(**init_info)
            self.shutdown()
            check = partial(refuse_other_model, config=self.model_config.hf_config)
            self._reader = GroupReader(partial(attach, **init_info), get_world_group().cpu_group, check)
            if self._reader.in_any(self._is_open):  # vLLM would let all workers refuse the next update
                raise StepStateError("an update is open, perhaps of a killed caller: call finish_weight_update")

    def start_weight_update(self) -> None:
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:  # in the base class, it also waits for a device
        self._is_open = not self._is_last  # vLLM ends the update in the worker that raises
        with self._raising_once():
            self.receive_weights(update_info)
        self._is_open = True

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Takes the arguments ``version`` and ``until`` of ``GroupReader.update``."""
        if self._reader is None:
            raise StepStateError("the engine is not attached to a run: call init_weight_transfer_engine first")
        self._reader.update(load=self._load, **update_info)

    def _raising_once(self) -> nullcontext[None] | suppress:
        return nullcontext() if self._is_last else suppress(Exception)

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(tensors.items()))
        finally:  # also after an error: the next update would otherwise add to half-loaded layers
            finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    @property
    def _is_last(self) -> bool:
        world, parallel = get_world_group(), self.parallel_config  # also data-parallel ranks, if they share experts
        has_own_executor = parallel.distributed_executor_backend == "external_launcher"
        return has_own_executor or (world.rank_in_group + 1) % parallel.world_size == 0

    def finish_weight_update(self) -> None:
        self._is_open = False
        if self._reader is not None:
            self._reader.drop()

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()


def update(llm: LLM, version: int) -> None:
    """Loads a version into an engine of this process. Removes cached prefixes. Answers then name the version.

    Call ``llm.init_weight_transfer_engine`` before. Raises as ``GroupReader.update``. The engine keeps its former
    version, unless vLLM has failed while it loaded what was read: then repeat the update before the next request.
    """
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"version": version}})
    except BaseException:
        with suppress(Exception):  # ends the update in the workers that did not raise
            llm.finish_weight_update()
        raise
    llm.finish_weight_update(str(version))
    llm.reset_prefix_cache()
