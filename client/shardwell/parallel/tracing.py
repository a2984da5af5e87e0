"""Traces the forward of a model into calls of its layers, and cuts the trace into stages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.fx
from torch import nn

from shardwell_wire.errors import UsageError


class _LayerTracer(torch.fx.Tracer):
    """Traces through the modules that contain layers, and records calls of the layers."""

    proxy_buffer_attributes = True

    def __init__(self, opened: set[int]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._opened


def trace_layers(model: nn.Module, opened: Iterable[nn.Module]) -> torch.fx.Graph:
    """Returns the graph of a model's forward, in which each layer is one call.

    Arguments of the forward with a default value keep it.

    Args:
        model: The model.
        opened: Modules inside the model whose forward is traced. All others are layers.

    Raises:
        UsageError: The forward depends on values, or does something else that torch.fx cannot trace.
    """
    signature = inspect.signature(model.forward)
    empty = inspect.Parameter.empty
    defaults = {name: entry.default for name, entry in signature.parameters.items() if entry.default is not empty}
    tracer = _LayerTracer({id(module) for module in opened})
    try:
        graph = tracer.trace(model, concrete_args=defaults)
    except Exception as error:  # the tracer runs the user's forward
        raise UsageError(
            f"the forward of {type(model).__name__} cannot be traced by torch.fx, so its layers cannot be divided into "
            f"stages: {error}. Move code that depends on values into the layers, or build the stages by hand and "
            "pass them to shardwell.parallel.PipelineStage"
        ) from error
    _remove_defaults(graph, defaults)
    return graph


def _remove_defaults(graph: torch.fx.Graph, defaults: Mapping[str, Any]) -> None:
    """Removes arguments that keep their default, and the tracer's checks of their values."""
    names = set(defaults)
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if str(node.target) in names or any(str(node.target).startswith(f"{name}_") for name in names):
            _erase(graph, node)


def _erase(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Removes a node and all nodes that use it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def cut_graph(graph: torch.fx.Graph, starts: Sequence[torch.fx.Node]) -> list[torch.fx.Graph]:
    """Cuts a graph into consecutive stages.

    A stage receives all values of earlier stages that it or a later stage uses, and returns those that later stages
    use. The last stage returns the model's output. Parameters and buffers are read in the stage that uses them.

    Args:
        graph: The graph of the whole forward.
        starts: The first node of each stage but the first.
    """
    stage_of = _stages(graph, starts)
    num_stages = len(starts) + 1
    return [_stage_graph(graph, stage_of, stage, is_last=stage == num_stages - 1) for stage in range(num_stages)]


def _stages(graph: torch.fx.Graph, starts: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    begins = {node: number for number, node in enumerate(starts, start=1)}
    stage, found = 0, {}
    for node in graph.nodes:
        stage = begins.get(node, stage)
        found[node] = 0 if node.op == "placeholder" else stage
    for node in graph.nodes:
        if node.op == "get_attr":  # read where it is used, in each of the stages
            found[node] = min((found[user] for user in node.users), default=0)
    return found


def _values_after(graph: torch.fx.Graph, stage_of: Mapping[torch.fx.Node, int], stage: int) -> list[torch.fx.Node]:
    """Returns the values of a stage and of earlier stages that later stages use, in the graph's order."""
    return [
        node
        for node in graph.nodes
        if node.op not in ("get_attr", "output")
        and stage_of[node] <= stage
        and any(stage_of[user] > stage for user in node.users)
    ]


def _stage_graph(
    graph: torch.fx.Graph, stage_of: Mapping[torch.fx.Node, int], stage: int, *, is_last: bool
) -> torch.fx.Graph:
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    received = _values_after(graph, stage_of, stage - 1) if stage else []
    for node in received:
        copies[node] = made.placeholder(node.name)

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            assert node.op == "get_attr"
            copies[node] = made.node_copy(node)
        return copies[node]

    for node in graph.nodes:
        if stage_of[node] == stage and node.op not in ("get_attr", "output"):
            copies[node] = made.node_copy(node, copied)
    if is_last:
        output = next(node for node in graph.nodes if node.op == "output")
        made.output(torch.fx.map_arg(output.args[0], copied))
    else:
        sent = [copied(node) for node in _values_after(graph, stage_of, stage)]
        made.output(sent[0] if len(sent) == 1 else tuple(sent))
    made.lint()
    return made


def stage_module(model: nn.Module, graph: torch.fx.Graph, class_name: str) -> nn.Module:
    """Returns a module that runs a stage's graph. Its layers are the model's, under the same names.

    Args:
        model: The whole model, which the graph was traced from.
        graph: Graph of the stage.
        class_name: Name of the module's class.
    """
    stage = torch.fx.GraphModule(model, graph, class_name)
    _replace_containers(stage, model)
    return stage.train(model.training)


def _replace_containers(stage: nn.Module, model: nn.Module) -> None:
    """Replaces the bare modules that torch.fx makes: by the model's own layer, or by a dictionary of layers."""
    for name, child in list(stage.named_children()):
        if type(child) is not nn.Module:
            continue
        original = model.get_submodule(name)
        if any(True for _ in child.parameters(recurse=False)) or any(True for _ in child.buffers(recurse=False)):
            stage._modules[name] = original  # the forward reads a parameter of a layer that it does not call
            continue
        _replace_containers(child, original)
        layers = nn.ModuleDict()
        layers.update(dict(child.named_children()))
        stage._modules[name] = layers
