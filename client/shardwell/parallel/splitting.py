"""``split_model``: cuts a model into pipeline stages between its layers, and describes the stages.

A cut is the first layer of a stage. ``even_starts`` and ``balanced_starts`` choose the cuts; ``outline.py`` finds
the layers, and ``stage_modules.py`` makes the stages. ``ModelSplit.from_modules`` takes stages that were made by hand.

Work items are cut into micro-batches: their arguments are checked, and what the last stage returns is merged.
``sends_parts`` and ``sequence_parts`` tell the shapes that stages send with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from shardwell.grid.parallel_plan import descriptions
from shardwell.module.fully_shard import ShardedModule
from shardwell.module.new_units import NAMES_IN_MODEL, mark_ties
from shardwell.parallel.description import ActivationShape, ModelDescription, StageDescription
from shardwell.parallel.forward_records import Record
from shardwell.parallel.outline import Outline, find_blocks, find_parts, list_layers, stage_examples
from shardwell.parallel.stage_modules import make_stage
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.parallel.tensor import TensorParallelPlan
import inspect
from typing import Any

from torch.utils import _pytree as pytree

from shardwell.parallel.description import SplitLayer

Cost = Callable[[str, nn.Module], float]
"""``(name, layer) -> cost`` in any unit."""


@dataclass(frozen=True, slots=True)
class StageExample:
    """Tensors without memory that have the shapes and dtypes of one micro-batch."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


class ModelSplit:
    """A model that is divided into pipeline stages. Made by ``split_model`` or ``from_modules``.

    Attributes:
        stages: What each stage holds.
        ties: Parameters that several stages share.

    Args:
        model: The whole model.
        modules: The module of each stage. Parameters and buffers are the model's, with the model's names.
        calls: Names of each stage's layers.
        outline: The model without memory. None: the stages have forwards of their own.
        given: Inputs and outputs of stages that cannot run without values. None: ``examples`` computes them.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        calls: Sequence[Sequence[str]],
        outline: Outline | None = None,
        given: Sequence[StageExample] | None = None,
    ) -> None:
        self._class_name = type(model).__name__
        self._modules, self._outline, self._given = list(modules), outline, given
        block_classes = sorted({type(block).__name__ for block in find_blocks(model).values()})
        names = _names_by_tensor(model)
        aliases = {name: tuple(tied) for tied in names.values() for name in tied}
        for module in self._modules:
            module._no_split_modules = block_classes  # type: ignore[assignment]  # read by auto_wrap
            module.__dict__[NAMES_IN_MODEL] = aliases
        _check_coverage(type(model).__name__, names, self._modules)
        self.ties = tuple(mark_ties(model, self._modules))
        self.stages = tuple(
            StageDescription(index, tuple(called), tuple(list_layers(module)))
            for index, (called, module) in enumerate(zip(calls, self._modules, strict=True))
        )
        for stage in self.stages:
            if not stage.layers:
                raise UsageError(
                    f"stage {stage.index} of {len(self.stages)} has no parameters (its layers: "
                    f"{', '.join(stage.calls) or 'none'}): use fewer stages, or choose their first layers with starts="
                )
        self._description = ModelDescription(self._class_name, self.stages)
        for index, module in enumerate(self._modules):
            descriptions[module] = self._description
            self._description.indices[module] = index
        if given is not None:
            self._describe_micro_batch(given[0].inputs, given)

    @classmethod
    def from_modules(
        cls, model: nn.Module, stages: Sequence[nn.Module], *, examples: Sequence[StageExample] | None = None
    ) -> ModelSplit:
        """Returns the division of a model into stages that were built by hand.

        The modules of the stages hold the model's own parameters and buffers, under the model's names: a stage with the
        blocks 2 and 3 of ``model.blocks`` has ``self.blocks = nn.ModuleDict({"2": model.blocks["2"], ...})``. A
        parameter that several stages share becomes a unit of its own, as with ``split_model``.

        Args:
            model: The whole model, before tensor parallelism and ``fully_shard``.
            stages: The module of each stage. Its forward takes what the previous one returns. Every trainer passes all
                stages, not only its own.
            examples: Inputs and outputs of each stage for one micro-batch, for stages that cannot run on the meta
                device. ``split.examples`` then returns these. Values between the stages have the model's dtype and the
                whole sequence. None: ``split.examples`` computes them.

        Raises:
            UsageError: The stages do not cover all parameters and persistent buffers of the model, or hold others; a
                name differs; a stage has no parameters; or ``examples`` has another length than ``stages``.
        """
        _check_plain(model)
        if examples is not None and len(examples) != len(stages):
            raise UsageError(
                f"from_modules(examples=): {len(examples)} examples, expected one for each of the {len(stages)} stages"
            )
        blocks = find_blocks(model)
        return cls(model, stages, [list(_layers_in(stage, blocks)) for stage in stages], given=examples)

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
        **keywords: torch.Tensor,
    ) -> list[StageExample]:
        """Returns the inputs and outputs of every stage for one micro-batch, without computing values.

        Call it before ``fully_shard`` and before a tensor-parallel plan is applied.

        Args:
            inputs: Positional arguments of the model's forward for one micro-batch. Only shapes and dtypes are used.
            dtype: Dtype of floating-point values between stages, if mixed precision changes it. None: the model's.
            tensor_plan: The plan of tensor parallelism. Required if it is sequence-parallel: stages then send parts of
                the sequence.
            keywords: Keyword arguments of the model's forward, which all stages get.

        Raises:
            UsageError: The forward cannot be divided, a value between two stages is no tensor, or a layer creates
                tensors on a fixed device; the tensor-parallel ranks cannot divide the sequence; or the examples of
                ``from_modules`` have other inputs.
        """
        found: Sequence[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
        if self._given is not None:
            _check_same(inputs, self._given[0].inputs)
            found = [(each.inputs, each.outputs) for each in self._given]
        elif self._outline is None:
            found = self._run_stages(inputs, keywords)
        else:
            found = stage_examples(self._outline, inputs, keywords, self._modules[0].training)
        examples = [
            StageExample(_cast(received, dtype if index else None), _cast(outputs, dtype))
            for index, (received, outputs) in enumerate(found)
        ]
        self._describe_micro_batch(inputs, examples)
        if tensor_plan is None or not tensor_plan.sequence_parallel:
            return examples
        cut = sends_parts(self.stages, tensor_plan.layers)
        return [
            StageExample(
                sequence_parts(each.inputs, tensor_plan.tp) if before else each.inputs,
                sequence_parts(each.outputs, tensor_plan.tp) if after else each.outputs,
            )
            for each, before, after in zip(examples, [False, *cut], cut, strict=False)
        ]

    def _describe_micro_batch(self, inputs: Sequence[torch.Tensor], examples: Sequence[StageExample]) -> None:
        self._description.has_examples = True
        self._description.micro_batch = micro_batch_of(
            inputs, [value for example in examples for value in example.outputs]
        )

    def _run_stages(
        self, inputs: tuple[torch.Tensor, ...], keywords: Mapping[str, torch.Tensor]
    ) -> list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
        values = tuple(torch.empty_like(value, device="meta") for value in inputs)
        found = []
        for index, module in enumerate(self._modules):
            outputs = self._run_on_meta(index, module, values, keywords)
            found.append((values, outputs))
            values = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
        return found

    def _run_on_meta(
        self, index: int, module: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if any(isinstance(part, ShardedModule) for part in module.modules()):
            raise UsageError(f"stage {index} is sharded already: call split.examples before fully_shard")
        tensors = {
            name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        named = {name: torch.empty_like(value, device="meta") for name, value in keywords.items()}
        try:
            with torch.device("meta"):
                output = functional_call(module, tensors, inputs, named)
        except Exception as error:  # runs the user's layers
            raise UsageError(
                f"stage {index} cannot run without values: {error}. Make the StageExample of each stage by hand, and "
                "pass them to ModelSplit.from_modules(..., examples=)"
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
    example: Sequence[torch.Tensor] | None = None,
) -> ModelSplit:
    """Divides a model into consecutive pipeline stages.

    Layers are the model's repeated blocks and the modules beside them; each belongs to a stage as a whole. All stages
    run the model's own forward, with the code between the layers, such as position embeddings and masks. A stage
    computes its own layers only: it gets the activations of the previous stage and the arguments of the model's
    forward. The stages share their parameters with the model, so a large model is built on the meta device, and each
    trainer keeps its own stages.

    Args:
        model: The model, before tensor parallelism and ``fully_shard``.
        num_stages: Number of stages: ``pp``, times the stages per trainer for interleaved schedules.
        by: ``layers``: equal numbers of blocks; the embedding is in the first stage, final norm and head in the last.
            ``cost``: the most expensive stage is as cheap as possible, and stages may be cut at any layer.
        cost: Cost of a layer, for ``by="cost"``. Default: number of parameters; embeddings cost nothing.
        starts: Names of the layers with which stages 1, 2, ... begin, instead of ``by``.
        example: Arguments of the model's forward for one micro-batch. Only shapes and dtypes are used. They tell the
            order in which the forward calls the layers. None: the order in which the model defines them; models of
            Hugging Face tell their order.

    Raises:
        UsageError: The model is wrapped or split already, has too few layers, or its forward cannot be divided; a stage
            has no parameters; or ``starts`` names no layers in the forward's order.
    """
    _check_plain(model)
    if num_stages < 1:
        raise UsageError(f"split_model(num_stages={num_stages}): expected at least 1")
    blocks = find_blocks(model)
    layers, around = find_parts(model, blocks)
    outline = Outline(model, layers, around)
    record = _recorded(model, outline, example)
    calls = list(layers) if record is None else [call.layer for call in record.calls]
    names = list(dict.fromkeys([*calls, *layers]))
    firsts = _starts(model, num_stages, by=by, cost=cost, starts=starts, layers=layers, blocks=blocks, names=names)
    outline.divide(firsts, record)
    modules = [make_stage(model, outline, index, layers, around) for index in range(num_stages)]
    held = [[name for name in names if index in outline.stages[name]] for index in range(num_stages)]
    return ModelSplit(model, modules, held, outline)


def _recorded(model: nn.Module, outline: Outline, example: Sequence[torch.Tensor] | None) -> Record | None:
    """Returns what the model's forward does. None: not known without an example."""
    if example is not None:
        return outline.record(tuple(example), {}, training=model.training)
    inputs = getattr(model, "dummy_inputs", None)  # of Hugging Face's models
    if isinstance(inputs, Mapping):
        with suppress(UsageError):  # split.examples tells why
            return outline.record((), inputs, training=model.training)
    return None


def _starts(
    model: nn.Module,
    num_stages: int,
    *,
    by: str,
    cost: Cost | None,
    starts: Sequence[str] | None,
    layers: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    names: Sequence[str],
) -> list[str]:
    """Returns the names of the first layers of stages 1, 2, ..."""
    if starts is not None:
        in_order = [name for name in names if name in starts]
        if len(starts) != num_stages - 1 or list(starts) != in_order or starts[:1] == names[:1]:
            raise UsageError(
                f"starts={list(starts)}: expected the first layers of stages 1 to {num_stages - 1}, in the order of "
                f"the forward and after its first layer. The layers are {', '.join(names)}"
            )
        return list(starts)
    with_parameters = [name for name in names if any(True for _ in layers[name].parameters())]
    if by == "layers":
        chosen, what = [name for name in names if name in blocks] or with_parameters, "blocks" if blocks else "layers"
        _check_count(len(chosen), num_stages, model, what)
        return [chosen[start] for start in even_starts(len(chosen), num_stages)[1:]]
    if by != "cost":
        raise UsageError(f"split_model(by={by!r}): expected 'layers' or 'cost'")
    _check_count(len(with_parameters), num_stages, model, "layers")
    costs = [float((cost or _number_of_parameters)(name, layers[name])) for name in with_parameters]
    return [with_parameters[start] for start in balanced_starts(costs, num_stages)[1:]]


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


def _layers_in(stage: nn.Module, blocks: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yields the names of a stage's blocks and of the modules beside them, in the order of their definition."""
    for name, module in stage.named_children():
        path = prefix + name
        if path not in blocks and any(block.startswith(f"{path}.") for block in blocks):
            yield from _layers_in(module, blocks, f"{path}.")
        else:
            yield path


def _names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter and persistent buffer by the tensor's ``id``."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            names.setdefault(id(tensor), []).append(name)
    return names


def _check_coverage(class_name: str, names: Mapping[int, Sequence[str]], stages: Sequence[nn.Module]) -> None:
    """Raises UsageError unless the stages hold all tensors of a model, and no others, under the model's names.

    Args:
        names: Its names by the tensor's ``id``.
    """
    held = set[int]()
    for index, stage in enumerate(stages):
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            expected = names.get(id(tensor))
            if expected is None:
                raise UsageError(
                    f"{name!r} of stage {index} is no parameter or buffer of {class_name}: build the stages "
                    "of the model's own modules"
                )
            if name not in expected:
                raise UsageError(
                    f"{name!r} of stage {index} has the name {expected[0]!r} in {class_name}: give the "
                    "modules of the stage the names that they have in the model, such as "
                    f'nn.ModuleDict({{"2": model.blocks[2]}}) for blocks.2'
                )
            held.add(id(tensor))
    left = [repr(found[0]) for key, found in names.items() if key not in held]
    if left:
        raise UsageError(
            f"no stage has {', '.join(left[:10])}{f' and {len(left) - 10} more' if len(left) > 10 else ''} of "
            f"{class_name}, which would not be trained, stored or exported: put each into a stage"
        )


def _check_count(found: int, num_stages: int, model: nn.Module, what: str) -> None:
    if found < num_stages:
        raise UsageError(f"{type(model).__name__} has {found} {what}, too few for {num_stages} stages")


def _check_same(inputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Raises unless the arguments of the model are those of the example of stage 0."""
    got, expected = ([(list(value.shape), value.dtype) for value in values] for values in (inputs, given))
    if got != expected:
        raise UsageError(
            f"the inputs of a micro-batch have the shapes and dtypes {got}, but those of the first of "
            f"from_modules(examples=) are {expected}"
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


SEQUENCE_DIM = 1
"""Dimension of activations along the sequence: ``[batch, length, width]``."""


class KeywordNames:
    """The keyword arguments that a function takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}

    def __contains__(self, name: str) -> bool:
        return self._takes_all or name in self._names


def count_samples(
    inputs: Sequence[torch.Tensor], target: torch.Tensor | None, keywords: Mapping[str, Any]
) -> int | None:
    """Returns the number of samples of a work item. None: there are no tensors.

    Args:
        inputs: Positional arguments of the first stage.
        target: Target of the loss. None: this trainer does not need it.
        keywords: Keyword arguments of the stages.

    Raises:
        UsageError: The tensors have different numbers of samples.
    """
    named = {f"input {index}": value for index, value in enumerate(inputs)}
    named |= {} if target is None else {"target": target}
    found = [(f"keyword argument {name!r}", leaf) for name in keywords for leaf in pytree.tree_leaves(keywords[name])]
    sizes = [
        (what, value.shape[0] if value.ndim else None)
        for what, value in (*named.items(), *found)
        if isinstance(value, torch.Tensor)
    ]
    for what, size in sizes:
        if size != sizes[0][1] or size is None:
            raise UsageError(
                f"{what} has {size or 'no'} samples in its first dimension, but {sizes[0][0]} has {sizes[0][1]}: the "
                "first dimension of every tensor is cut into micro-batches. Expand a tensor that is equal for all "
                "samples, or keep it in a buffer of the module"
            )
    return sizes[0][1] if sizes else None


def check_shapes(inputs: Sequence[torch.Tensor], example: Sequence[torch.Tensor], *, count: int) -> None:
    """Checks the arguments of the first stage against its example.

    Args:
        inputs: Positional arguments of the first stage, for the whole work item.
        example: Those of one micro-batch.
        count: Number of micro-batches.

    Raises:
        UsageError: Their number differs, or a shape.
    """
    if len(inputs) != len(example):
        raise UsageError(f"the first stage takes {len(example)} inputs, got {len(inputs)}")
    for index, (value, other) in enumerate(zip(inputs, example, strict=True)):
        expected = [count * other.shape[0], *other.shape[1:]]
        if list(value.shape) != expected:
            raise UsageError(
                f"input {index} has the shape {list(value.shape)}, expected {expected}: {count} micro-batches of the "
                f"example's shape {list(other.shape)}. All work items must have the size of the example"
            )


def check_names(keywords: Collection[str], takers: Sequence[KeywordNames]) -> None:
    """Raises UsageError if no stage takes one of the keyword arguments."""
    for name in keywords:
        if not any(name in taker for taker in takers):
            raise UsageError(
                f"no stage of this trainer takes the keyword argument {name!r}: pass it only on trainers that have a "
                f"stage with forward(..., {name}=...)"
            )


def merge(outputs: Sequence[Any]) -> Any:
    """Returns the outputs of all micro-batches as one: tensors are joined at their first dimension.

    Tensors without dimensions are stacked, and other values become lists. [num_micro_batches]
    """
    return pytree.tree_map(_merge_leaves, *outputs)


def detached(output: Any) -> Any:
    """Returns an output whose tensors have no graph."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _merge_leaves(*leaves: Any) -> Any:
    if not isinstance(leaves[0], torch.Tensor):
        return list(leaves)
    return torch.cat(leaves) if leaves[0].ndim else torch.stack(leaves)


def sends_parts(stages: Sequence[StageDescription], layers: Sequence[SplitLayer]) -> list[bool]:
    """Returns for each stage whether it sends parts of the sequence: from the first block to the last norm.

    Args:
        stages: What each stage holds.
        layers: What a sequence-parallel plan does, in the model's order.
    """
    cut = [layer.name for layer in layers if layer.style == "input"]
    gathered = [layer.name for layer in layers if layer.style == "sequence"]
    first, last = (_stage_of(stages, names) for names in (cut[:1], gathered[-1:]))
    return [first <= stage.index < last for stage in stages]


def _stage_of(stages: Sequence[StageDescription], names: Sequence[str]) -> int:
    """Returns the index of the stage that holds a module; the number of stages if none does."""
    held = (
        stage.index
        for stage in stages
        for name in names
        if any(f"{layer.name}.".startswith(f"{name}.") for layer in stage.layers)
    )
    return next(held, len(stages))


def sequence_parts(values: Sequence[torch.Tensor], tp: int) -> tuple[torch.Tensor, ...]:
    """Returns tensors without memory that have the shapes of one rank's parts of activations.

    Values without gradients, such as position embeddings, stay whole.

    Args:
        values: Activations that stages send. [batch, length, ...]
        tp: Number of tensor-parallel ranks.

    Raises:
        UsageError: ``tp`` does not divide the length.
    """
    parts = []
    for value in values:
        if not value.requires_grad or value.ndim <= SEQUENCE_DIM:
            parts.append(value)
            continue
        batch, length, *others = value.shape
        if length % tp:
            raise UsageError(
                f"sequence_parallel=True: tp={tp} does not divide the {length} tokens of a sequence in the example: "
                f"use a multiple of {tp} tokens"
            )
        part = torch.empty(batch, length // tp, *others, dtype=value.dtype, device=value.device)
        parts.append(part.requires_grad_())
    return tuple(parts)
