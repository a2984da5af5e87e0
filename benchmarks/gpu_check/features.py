"""Checks 12 to 14: activations that leave the GPU, compiled blocks, and a checkpoint that goes to the GPU and back."""

from __future__ import annotations

import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell
from benchmarks.gpu_check.speed import GPT_350M, TINY, Sizes, batch_of
from benchmarks.gpu_check.task import Task
from benchmarks.gpu_check.training import loss_of
from examples.gpt import GPT

MODES = ("resident", "checkpointed", "offloaded")


def make_gpt(sizes: Sizes, device: torch.device) -> Any:
    torch.manual_seed(0)
    return GPT(sizes.config).to(device)


def offload(task: Task) -> None:
    """Compares offloaded activations with resident and with recomputed ones."""
    sizes = GPT_350M if task.on_gpu else TINY
    tokens = batch_of(sizes, sizes.tokens[0], task.device)
    found: dict[str, tuple[list[torch.Tensor], float, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            model, moved_bytes = make_gpt(sizes, task.device), 0
            handles: list[Any] = []
            if mode == "offloaded":  # activations of a CPU are only moved to files
                where = "cpu" if task.on_gpu else folder
                handles = [shardwell.offload_activations(block, to=where, min_bytes=1 << 10) for block in model.blocks]
            elif mode == "checkpointed":
                _checkpoint(model)
            task.reset_peak()
            seconds = task.seconds(partial(_backward, model, tokens), repeats=3)
            moved_bytes = sum(handle.moved_bytes for handle in handles) // 4
            gradients = [parameter.grad.detach().clone() for parameter in model.parameters()]
            found[mode] = gradients, seconds, task.peak_bytes()
            what = f"{mode}: step, peak on the GPU, moved in a step"
            task.row(what, f"{seconds * 1e3:.0f} ms, {task.peak_bytes() / 1e9:.2f} GB, {moved_bytes / 1e9:.2f} GB")
            if mode == "offloaded":
                task.row("offloaded: activations have moved", ok=moved_bytes > 0)
    expected, _, peak = found["resident"]
    for mode in MODES[1:]:
        is_equal = all(torch.equal(ours, theirs) for ours, theirs in zip(found[mode][0], expected, strict=True))
        task.row(f"{mode}: gradients have equal bits", ok=is_equal)
    if task.on_gpu:
        task.row("offloaded: peak below the resident one", ok=found["offloaded"][2] < peak)


def _backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model.zero_grad()
    loss_of(model, tokens).backward()


def _checkpoint(model: Any) -> None:
    for block in model.blocks:
        forward = block.forward

        def recomputed(x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
            result: torch.Tensor = checkpoint(forward, x, use_reentrant=False)
            return result

        block.forward = recomputed


# ---- compile ----


def compile_blocks(task: Task) -> None:
    """Compiles every block, before and after it is sharded: graph breaks, recompilations, speed and distance."""
    sizes = Sizes(8, 1024, 16, 4096, 512, (4 << 10,)) if task.on_gpu else TINY
    backend = "inductor" if task.on_gpu else "aot_eager"  # a CPU's machine may lack a C++ compiler
    with shardwell.LocalCluster(num_shards=2) as cluster:
        eager, _, expected = _train_compiled(task, sizes, cluster.address, "never", backend)
        for order in ("before", "after"):
            with task.attempt(f"compiled {order} sharding"):
                seconds, graphs, weights = _train_compiled(task, sizes, cluster.address, order, backend)
                breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
                distance = ((weights - expected).norm() / expected.norm()).item()
                task.row(f"compiled {order} sharding: graph breaks (0)", breaks, breaks == 0)
                task.row(f"compiled {order} sharding: new graphs after step 3 (0)", graphs, graphs == 0)
                task.row(f"compiled {order} sharding: step, relative to eager", f"{seconds / eager:.2f}")
                task.row(f"compiled {order} sharding: distance (<= 1e-4)", f"{distance:.1e}", distance <= 1e-4)


def _train_compiled(
    task: Task, sizes: Sizes, address: str, order: str, backend: str
) -> tuple[float, int, torch.Tensor]:
    """Returns the seconds of a step, the graphs that were compiled after the third step, and the final weights."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with shardwell.join(address, run=f"compiled {order}") as session:
        model = make_gpt(sizes, task.device)

        def compile_all() -> None:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend=backend)

        if order == "before":
            compile_all()
        for block in model.blocks:
            shardwell.fully_shard(block, session)
        shardwell.fully_shard(model, session)
        if order == "after":
            compile_all()
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.125)
        tokens, seconds, graphs = batch_of(sizes, sizes.tokens[0], task.device), [], 0
        for step in range(6):
            task.sync()
            started = time.perf_counter()
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            task.sync()
            seconds.append(time.perf_counter() - started)
            if step == 2:
                graphs = counters["stats"]["unique_graphs"]
        if order != "never":
            task.row(f"compiled {order} sharding: graphs", graphs, graphs > 0)
        weights = torch.cat([value.cpu().flatten() for value in shardwell.full_state_dict(model).values()])
    return min(seconds[3:]), counters["stats"]["unique_graphs"] - graphs, weights


# ---- load and export ----


def load_and_export(task: Task) -> None:
    """Loads a Llama from safetensors into a run whose trainer is on the GPU, computes, and exports it."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 1024 if task.on_gpu else 64
    config = LlamaConfig(
        vocab_size=32 * width // 8,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8 if task.on_gpu else 2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    plain: Any = LlamaForCausalLM(config)
    tokens = torch.arange(32)[None].to(task.device) % config.vocab_size
    with tempfile.TemporaryDirectory() as folder, shardwell.LocalCluster(num_shards=2) as cluster:
        source, target = Path(folder) / "source", Path(folder) / "target"
        plain.save_pretrained(source)
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        with torch.no_grad():
            expected = plain.to(task.device)(tokens).logits.cpu()
        size_bytes = sum(value.nbytes for value in state.values())
        with shardwell.join(cluster.address, run="llama") as session:
            with torch.device("meta"):
                model: Any = LlamaForCausalLM(config)
            rotary = plain.model.rotary_emb  # its buffers are not in the checkpoint
            started = time.perf_counter()
            model.model.rotary_emb = rotary
            source_of = shardwell.from_safetensors(model, source)
            for layer in model.model.layers:
                shardwell.fully_shard(layer, session, source=source_of, device=task.device)
            shardwell.fully_shard(model, session, source=source_of, device=task.device)
            seconds = time.perf_counter() - started
            task.row("load", f"{size_bytes / 1e9:.2f} GB, {size_bytes / seconds / 1e9:.2f} GB/s")
            with torch.no_grad():
                logits = model(tokens).logits.cpu()
            task.row("logits have the bits of transformers' own", ok=torch.equal(logits, expected))
            started = time.perf_counter()
            shardwell.save_safetensors(model, target)
            seconds = time.perf_counter() - started
            task.row("export", f"{size_bytes / seconds / 1e9:.2f} GB/s")
        exported = load_file(target / "model.safetensors")
        is_equal = exported.keys() == state.keys() and all(torch.equal(exported[name], state[name]) for name in state)
        task.row("the exported file has equal bits", ok=is_equal)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        task.row("peak of the process on the host, the plain model included", f"{peak / 1e9:.2f} GB")
