"""``split_model``: cuts a model into pipeline stages between its layers, and describes the stages.

A cut is the first layer of a stage. ``even_starts`` and ``balanced_starts`` choose the cuts. ``trace_layers`` finds the
layers in a trace of the forward, ``cut_graph`` cuts the trace, and ``stage_module`` makes a module of each stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.fx
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from shardwell.grid.parallel_plan import descriptions
from shardwell.module.fully_shard import ShardedModule
from shardwell.module.new_units import mark_ties
from shardwell.parallel.description import ActivationShape, ModelDescription, StageDescription
from shardwell.parallel.micro_batches import sends_parts, sequence_parts
from shardwell.parallel.transformer import find_blocks, list_layers
from shardwell_wire.errors import TiedParameterError, UsageError

if TYPE_CHECKING:
    from shardwell.parallel.tensor import TensorParallelPlan

Cost = Callable[[str, nn.Module], float]
"""``(name, layer) -> cost`` in any unit."""


@dataclass(frozen=True, slots=True)
class StageExample:
    """Tensors without memory that have the shapes and dtypes of one micro-batch."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


class ModelSplit:
    """A model that is divided into pipeline stages.

    Attributes:
        stages: What each stage holds.
        ties: Parameters that several stages share.

    Args:
        model: The whole model.
        graphs: The graph of each stage.
        block_classes: Names of the classes of the model's blocks.
    """

    def __init__(self, model: nn.Module, graphs: Sequence[torch.fx.Graph], block_classes: Sequence[str]) -> None:
        self._class_name = type(model).__name__
        self._modules = [
            stage_module(model, graph, f"{self._class_name}Stage{index}") for index, graph in enumerate(graphs)
        ]
        for module in self._modules:
            module._no_split_modules = list(block_classes)  # type: ignore[assignment]  # read by auto_wrap
        self.ties = tuple(mark_ties(model, self._modules))
        self.stages = tuple(
            StageDescription(
                index,
                tuple(str(node.target) for node in graph.nodes if node.op == "call_module"),
                tuple(list_layers(module)),
            )
            for index, (graph, module) in enumerate(zip(graphs, self._modules, strict=True))
        )
        for stage in self.stages:
            if not stage.layers:
                raise UsageError(
                    f"stage {stage.index} of {len(self.stages)} has no parameters (its layers: "
                    f"{', '.join(stage.calls) or 'none'}): use fewer stages, or choose their first layers with starts="
                )
        self._description = ModelDescription(self._class_name, self.stages)
        for module in self._modules:
            descriptions[module] = self._description

    def module(self, index: int) -> nn.Module:
        """Returns the module of a stage. Its parameters are the model's, with the model's names.

        The forward takes what the previous stage returns. Call ``fully_shard`` on its layers, or ``auto_wrap``. A
        parameter that several stages share, such as the weight of an embedding that is tied to the head, becomes a unit
        of its own, which the trainers of all these stages gather and push.
        """
        return self._modules[index]

    def examples(
        self,
        *inputs: torch.Tensor,
        dtype: torch.dtype | None = None,
        tensor_plan: TensorParallelPlan | None = None,
    ) -> list[StageExample]:
        """Returns the inputs and outputs of every stage for one micro-batch, without computing values.

        Call it before ``fully_shard`` and before a tensor-parallel plan is applied.

        Args:
            inputs: Arguments of the model's forward for one micro-batch. Only shapes and dtypes are used.
            dtype: Dtype of floating-point values between stages, if mixed precision changes it. None: the model's.
            tensor_plan: The plan of tensor parallelism. Required if it is sequence-parallel: stages then send parts of
                the sequence.

        Raises:
            UsageError: A value between two stages is no tensor, or a layer creates tensors on a fixed device; or the
                tensor-parallel ranks cannot divide the sequence.
        """
        values = tuple(torch.empty_like(value, device="meta") for value in inputs)
        found = []
        for index, module in enumerate(self._modules):
            outputs = self._run_on_meta(index, module, values)
            found.append(StageExample(_cast(values, dtype if index else None), _cast(outputs, dtype)))
            values = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
        self._description.micro_batch = micro_batch_of(
            inputs, [value for example in found for value in example.outputs]
        )
        if tensor_plan is None or not tensor_plan.sequence_parallel:
            return found
        cut = sends_parts(self.stages, tensor_plan.layers)
        return [
            StageExample(
                sequence_parts(each.inputs, tensor_plan.tp) if before else each.inputs,
                sequence_parts(each.outputs, tensor_plan.tp) if after else each.outputs,
            )
            for each, before, after in zip(found, [False, *cut], cut, strict=False)
        ]

    def _run_on_meta(self, index: int, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if any(isinstance(part, ShardedModule) for part in module.modules()):
            raise UsageError(f"stage {index} is sharded already: call split.examples before fully_shard")
        tensors = {
            name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        try:
            with torch.device("meta"):
                output = functional_call(module, tensors, inputs)
        except Exception as error:  # runs the user's layers
            raise UsageError(
                f"stage {index} cannot run without values: {error}. Pass input_args and output_args to PipelineStage"
            ) from error
        outputs = output if isinstance(output, tuple) else (output,)
        for value in outputs:
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"stage {index} would send a {type(value).__name__} ({value!r}) to later stages, expected tensors: "
                    "compute it inside the layers"
                )
        return outputs

    def describe(self) -> str:
        """Returns the stages as text: one line per stage, with its layers, parameters and kinds of layers."""
        total = sum(stage.num_parameters for stage in self.stages)
        lines = [f"{self._class_name} in {len(self.stages)} stages, {total:,} parameters"]
        for stage in self.stages:
            kinds = ", ".join(f"{kind.value} {count:,}" for kind, count in stage.parameters_by_kind().items())
            share = 100 * stage.num_parameters / total
            lines.append(f"  stage {stage.index}: {_span(stage.calls)}")
            lines.append(f"    {stage.num_parameters:,} parameters ({share:.0f}%): {kinds}")
        for tie in self.ties:
            lines.append(f"  {' = '.join(tie.names)}: shared by the stages {', '.join(map(str, tie.stages))}")
        return "\n".join(lines)


def split_model(
    model: nn.Module,
    num_stages: int,
    *,
    by: Literal["layers", "cost"] = "layers",
    cost: Cost | None = None,
    starts: Sequence[str] | None = None,
) -> ModelSplit:
    """Divides a model into consecutive pipeline stages.

    The forward of the model must be a sequence of layers with plain tensor operations between them. Layers are the
    model's repeated blocks and the modules beside them; their own forwards are not looked at. The stages share their
    parameters with the model, so a large model is built on the meta device, and each trainer keeps its own stages.

    Args:
        model: The model, before tensor parallelism and ``fully_shard``.
        num_stages: Number of stages: ``pp``, times the stages per trainer for interleaved schedules.
        by: ``layers``: equal numbers of blocks; the embedding is in the first stage, final norm and head in the last.
            ``cost``: the most expensive stage is as cheap as possible, and stages may be cut at any layer.
        cost: Cost of a layer, for ``by="cost"``. Default: number of parameters; embeddings cost nothing.
        starts: Names of the layers with which stages 1, 2, ... begin, instead of ``by``.

    Raises:
        UsageError: The model is wrapped or split already, has too few layers, or cannot be traced; a stage has no
            parameters; or ``starts`` names no layers in the forward's order.
        TiedParameterError: Two stages call the same layer.
    """
    _check_plain(model)
    if num_stages < 1:
        raise UsageError(f"split_model(num_stages={num_stages}): expected at least 1")
    blocks = find_blocks(model)
    graph = trace_layers(model, _opened(model, blocks))
    calls = [node for node in graph.nodes if node.op == "call_module"]
    if starts is not None:
        firsts = _named_starts(calls, starts, num_stages)
    elif by == "layers":
        firsts = _even(calls, blocks, num_stages, model)
    elif by == "cost":
        firsts = _balanced(calls, num_stages, model, cost or _number_of_parameters)
    else:
        raise UsageError(f"split_model(by={by!r}): expected 'layers' or 'cost'")
    _check_repeated(calls, firsts)
    block_classes = sorted({type(block).__name__ for block in blocks.values()})
    return ModelSplit(model, cut_graph(graph, firsts), block_classes)


def _check_plain(model: nn.Module) -> None:
    """Raises if a model is wrapped already."""
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        raise UsageError(f"{type(model).__name__} is sharded already: split the model before fully_shard")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UsageError(
                f"parameter {name!r} of {type(model).__name__} is a DTensor: split the model into stages before tensor "
                "parallelism is applied"
            )


def _opened(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Returns the modules whose forward is traced: those around the blocks, and sequences of layers."""
    if blocks:
        return [
            module
            for name, module in model.named_modules()
            if any(block.startswith(f"{name}." if name else "") for block in blocks) and name not in blocks
        ]
    return [module for module in model.modules() if isinstance(module, nn.Sequential)]


def _even(
    calls: Sequence[torch.fx.Node], blocks: Mapping[str, nn.Module], num_stages: int, model: nn.Module
) -> list[torch.fx.Node]:
    if blocks:
        chosen, what = [node for node in calls if node.target in blocks], "blocks"
    else:
        chosen, what = [node for node in calls if _has_parameters(model.get_submodule(str(node.target)))], "layers"
    _check_count(len(chosen), num_stages, model, what)
    return [chosen[start] for start in even_starts(len(chosen), num_stages)[1:]]


def _balanced(calls: Sequence[torch.fx.Node], num_stages: int, model: nn.Module, cost: Cost) -> list[torch.fx.Node]:
    chosen = [node for node in calls if _has_parameters(model.get_submodule(str(node.target)))]
    _check_count(len(chosen), num_stages, model, "layers")
    costs = [float(cost(str(node.target), model.get_submodule(str(node.target)))) for node in chosen]
    return [chosen[start] for start in balanced_starts(costs, num_stages)[1:]]


def _named_starts(calls: Sequence[torch.fx.Node], starts: Sequence[str], num_stages: int) -> list[torch.fx.Node]:
    by_name = {str(node.target): node for node in reversed(calls)}
    names = list(by_name)[::-1]
    known = [name for name in starts if name in by_name]
    in_order = [name for name in names if name in known]
    if len(starts) != num_stages - 1 or list(starts) != in_order or starts[:1] == names[:1]:
        raise UsageError(
            f"starts={list(starts)}: expected the first layers of stages 1 to {num_stages - 1}, in the order of the "
            f"forward and after its first layer. The layers are {', '.join(names)}"
        )
    return [by_name[name] for name in starts]


def _check_count(found: int, num_stages: int, model: nn.Module, what: str) -> None:
    if found < num_stages:
        raise UsageError(f"{type(model).__name__} has {found} {what}, too few for {num_stages} stages")


def _check_repeated(calls: Sequence[torch.fx.Node], firsts: Sequence[torch.fx.Node]) -> None:
    """Raises if two stages call the same layer."""
    stage, found = 0, dict[str, int]()
    for node in calls:
        stage += node in firsts
        if found.setdefault(str(node.target), stage) != stage:
            raise TiedParameterError(
                f"layer {node.target!r} is called in stages {found[str(node.target)]} and {stage}: a layer belongs to "
                "one stage. Choose other stages with starts=, or use two layers that share their parameters",
                parameter=str(node.target),
            )


def _cast(values: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    """Returns values with their floating-point tensors in another dtype; None: unchanged."""
    if dtype is None:
        return values
    return tuple(
        value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
        for value in values
    )


def micro_batch_of(inputs: Sequence[torch.Tensor], activations: Iterable[torch.Tensor]) -> ActivationShape | None:
    """Returns the size of a micro-batch of sequences. None: the first input has no sequences.

    Args:
        inputs: Arguments of the model's forward.
        activations: Values that layers compute, which tell the bytes per value.
    """
    if not inputs or inputs[0].ndim != (3 if inputs[0].is_floating_point() else 2):
        return None
    sizes = [value.element_size() for value in activations if value.is_floating_point()]
    return ActivationShape(batch=inputs[0].shape[0], length=inputs[0].shape[1], item_size=max(sizes, default=4))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _number_of_parameters(_: str, layer: nn.Module) -> float:
    return 0.0 if isinstance(layer, nn.Embedding) else float(sum(map(torch.numel, layer.parameters())))


def _span(calls: Sequence[str]) -> str:
    """Returns names of layers as text; a long list is shortened to its ends."""
    return ", ".join(calls) if len(calls) <= 4 else f"{calls[0]}, {calls[1]}, ..., {calls[-1]} ({len(calls)} layers)"


def even_starts(num_layers: int, num_stages: int) -> list[int]:
    """Returns the first layer of each stage, for stages with equal numbers of layers.

    If the number of stages does not divide the number of layers, some stages get one layer more: inner stages first,
    because the first and the last stage also have the embedding and the head.
    """
    base, extra = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1]
    larger = set(order[:extra])
    starts, next_start = [], 0
    for stage in range(num_stages):
        starts.append(next_start)
        next_start += base + (stage in larger)
    return starts


def balanced_starts(costs: Sequence[float], num_stages: int) -> list[int]:
    """Returns the first layer of each stage, so that the most expensive stage is as cheap as possible.

    Among equally good divisions, earlier stages get fewer layers. Every stage has at least one layer.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][n]: the lowest maximum for the first n layers in s stages, and where the last of these stages starts
    best = [[(float("inf"), 0)] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_layers + 1):
            best[stage][stop] = min(
                (max(best[stage - 1][start][0], sums[stop] - sums[start]), start) for start in range(stage - 1, stop)
            )
    starts, stop = [], num_layers
    for stage in range(num_stages, 0, -1):
        stop = best[stage][stop][1]
        starts.append(stop)
    return starts[::-1]


# ---- tracing ----


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
    # Arguments that keep their default are not inputs of the stages, and neither are the tracer's checks of them.
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if str(node.target) in defaults or any(str(node.target).startswith(f"{name}_") for name in defaults):
            _erase(graph, node)
    return graph


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
    begins = {node: number for number, node in enumerate(starts, start=1)}
    stage, stage_of = 0, dict[torch.fx.Node, int]()
    for node in graph.nodes:
        stage = begins.get(node, stage)
        stage_of[node] = 0 if node.op == "placeholder" else stage
    for node in graph.nodes:
        if node.op == "get_attr":  # read where it is used, in each of the stages
            stage_of[node] = min((stage_of[user] for user in node.users), default=0)
    return [_stage_graph(graph, stage_of, stage, is_last=stage == len(starts)) for stage in range(len(starts) + 1)]


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
