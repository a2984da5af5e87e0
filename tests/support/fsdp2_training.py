"""Training of the small transformer with FSDP2, from and to ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwell.seeds import derive_seed
from tests.support import transformer
from tests.support.named_training import DP
from tests.support.reference import ADAMW, sha256


def train(
    rank: int, folder: str, first: int, stop: int, source: str | None, target: str, flat: bool, fused: bool = True
) -> None:
    """Trains steps ``[first, stop)`` as one of two ranks.

    Args:
        rank: Global rank.
        folder: For the rendezvous; rank 0 writes the hash of the weights to ``folder/sha256``.
        first: First step.
        stop: End of the steps, exclusive.
        source: Checkpoint to load. None: start with the model's own weights.
        target: Checkpoint to write at the end.
        flat: Whether to flatten the state dict of the optimizer.
        fused: Whether to use the fused optimizer.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{first}-{stop}", rank=rank, world_size=DP)
    try:
        mesh = init_device_mesh("cpu", (DP,))
        model = transformer.build()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused, **ADAMW)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        if source is not None:
            model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
            state = {"model": model_state, "optim": optimizer_state}
            dcp.load(state, checkpoint_id=source)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
            )
        for step in range(first, stop):
            torch.manual_seed(derive_seed(0, step, rank))
            model(transformer.batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=target)
        whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        if rank == 0:
            Path(folder, "sha256").write_text(sha256(whole))
        dist.barrier()
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
