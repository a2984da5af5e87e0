"""Plans of tensor parallelism: which layers of a transformer are split how, and what is sent for it.

``plan_tensor_parallel`` plans, ``TensorParallelPlan.apply`` splits a model. At the end are the styles of sequence
parallelism that torch does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from shardwell.module.fully_shard import ShardedModule
from shardwell.parallel.description import (
    ActivationShape,
    Collective,
    CollectivePhase,
    ModelDescription,
    SplitLayer,
    StageDescription,
    describe_model,
)
from shardwell.parallel.transformer import BlockParts, Layer, Transformer, analyse, list_layers
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_NUMBER = re.compile(r"\b\d+\b")


@dataclass(slots=True)
class TensorParallelPlan:
    """Styles of ``torch.distributed.tensor.parallel`` for the modules of a model.

    ``apply`` splits the model. ``parallelize_module(model, mesh, plan.styles)`` does the same for models whose
    attention derives its number of heads from its input, and whose embedding and head are not tied.
    """

    tp: int
    """Number of tensor-parallel ranks."""
    sequence_parallel: bool
    loss_parallel: bool
    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    """Torch's style by module name."""
    layers: list[SplitLayer] = field(default_factory=list)
    """What the styles do, in the model's order."""
    heads: list[tuple[str, str]] = field(default_factory=list)
    """``(module name, attribute)`` of the numbers of heads that ``apply`` divides by ``tp``."""

    model_class: str = ""
    """Class of the whole model."""
    model_layers: tuple[Layer, ...] = ()
    """Layers of the whole model, before they are split."""

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Splits a model in place, without communication: all ranks must have the same values.

        Call it before ``fully_shard``. The model may be a pipeline stage with some of the plan's modules.

        Args:
            model: The model, or a stage of it with the same module names.
            mesh: One-dimensional mesh of the tensor-parallel ranks, such as ``session.replica_mesh()["tp"]``.

        Returns:
            The model.

        Raises:
            UsageError: The mesh has another size than the plan, or the model is sharded already.
        """
        if mesh.ndim != 1 or mesh.size() != self.tp:
            raise UsageError(f"the plan is for tp={self.tp}, but the mesh {mesh} has {mesh.ndim} dims of {mesh.size()}")
        if any(isinstance(module, ShardedModule) for module in model.modules()):
            raise UsageError("the model is sharded already: apply the tensor-parallel plan before fully_shard")
        if self.layers:
            self.note_in(describe_model(model, self.model_class, [StageDescription(0, (), self.model_layers)]))
        modules = dict(model.named_modules())
        ties = _ties(model)
        for name, style in self.styles.items():
            if name in modules:
                parallelize_module(modules[name], mesh, style, src_data_rank=None)
        for first, *others in ties:  # the styles put a new parameter into every module
            parameter = getattr(*first)
            for module, attribute in others:
                setattr(module, attribute, parameter)
        for name, attribute in self.heads:
            if name in modules:
                setattr(modules[name], attribute, getattr(modules[name], attribute) // self.tp)
        return model

    def note_in(self, description: ModelDescription) -> None:
        """Adds the plan to the description of a model."""
        description.styles = {layer.name: layer for layer in self.layers}
        description.sequence_parallel, description.loss_parallel = self.sequence_parallel, self.loss_parallel

    def local_shape(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter's part in one rank; the whole shape if the plan does not split it.

        Args:
            parameter: Name of the parameter in the model.
            shape: Its whole shape.
        """
        module = parameter.rpartition(".")[0]
        cut = next((layer.part.partition(" ")[0] for layer in self.layers if layer.name == module), "whole")
        dim = {"rows": 0, "columns": 1}.get(cut)
        if dim is None or dim >= len(shape):  # the bias of a layer that is split by columns is whole
            return shape
        return (*shape[:dim], shape[dim] // self.tp, *shape[dim + 1 :])

    def loss_context(self) -> AbstractContextManager[Any]:
        """Returns the context in which the loss and its backward run: torch's ``loss_parallel`` if the plan uses it."""
        return loss_parallel() if self.loss_parallel else nullcontext()

    def collectives(self, shape: ActivationShape) -> dict[CollectivePhase, dict[str, int]]:
        """Returns the payload bytes of each collective in one forward and one backward.

        Args:
            shape: Size of the micro-batch.

        Returns:
            For each phase, the sum of the payloads by the operation's name. A payload is the whole tensor: an
            all-reduce of ``n`` bytes sends ``2 * n * (tp - 1) / tp`` per rank, the others half of it.
        """
        totals: dict[CollectivePhase, dict[str, int]] = {phase: {} for phase in CollectivePhase}
        for layer in self.layers:
            for collective in layer.collectives:
                of_phase = totals[collective.phase]
                of_phase[collective.operation] = of_phase.get(collective.operation, 0) + collective.payload_bytes(shape)
        return totals

    def describe(self, shape: ActivationShape | None = None) -> str:
        """Returns the plan as text: one line for the same module of all blocks, and the bytes of its collectives.

        Args:
            shape: Size of the micro-batch, to compute bytes; None: names of the collectives only.
        """
        if not self.layers:
            return "no tensor parallelism"
        rows: dict[tuple[str, ...], int] = {}
        for layer in self.layers:
            causes = ", ".join(collective.describe(shape) for collective in layer.collectives)
            row = (_NUMBER.sub("*", layer.name), layer.style, layer.part, causes)
            rows[row] = rows.get(row, 0) + 1
        width = max(len(name) for name, *_ in rows)
        lines = [
            f"  {name:{width}}  x{count:<3} {style:10}  {part:12}  {causes}".rstrip()
            for (name, style, part, causes), count in rows.items()
        ]
        return "\n".join([f"tensor parallelism over {self.tp} ranks", *lines])


def plan_tensor_parallel(
    model: nn.Module,
    tp: int,
    *,
    vocabulary: bool = True,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    fused_by_head: bool = False,
) -> TensorParallelPlan:
    """Plans the tensor parallelism of a GPT-, Llama- or BERT-like model; changes nothing.

    In every block, query, key, value and the first layers of the MLP are split by columns (output features), and the
    output projection and the last layer of the MLP by rows. The token embedding and the head are split along the
    vocabulary. Everything else stays whole on every rank.

    Args:
        model: The whole model, on any device, before ``fully_shard``.
        tp: Number of tensor-parallel ranks. With 1 the plan is empty.
        vocabulary: Whether to split the token embedding and the head.
        sequence_parallel: Whether norms, dropout and residual paths compute a part of the sequence each. The model
            must be pre-norm: each norm in a block feeds the attention or the MLP only.
        loss_parallel: Whether the head's output stays split for a loss in ``plan.loss_context()``.
        fused_by_head: Whether the rows of a fused projection (``qkv``) are ordered by head, then query, key and value.
            A projection with all queries first cannot be split.

    Raises:
        UsageError: ``tp`` does not divide a number of heads, a hidden size, or the size of the vocabulary; the model is
            sharded already; a layer has an unknown role; or the options contradict each other.
    """
    if tp < 1:
        raise UsageError(f"plan_tensor_parallel(tp={tp}): expected at least 1")
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        raise UsageError("the model is sharded already: plan and apply tensor parallelism before fully_shard")
    if tp == 1:
        return TensorParallelPlan(1, False, False)
    parts = analyse(model)
    if loss_parallel and (not vocabulary or parts.head is None):
        raise UsageError("loss_parallel=True needs a head that is split along the vocabulary, but there is none")
    if sequence_parallel and len(parts.final_norms) != 1:
        raise UsageError(
            f"sequence_parallel=True: the model has {len(parts.final_norms)} norms after its blocks "
            f"({', '.join(parts.final_norms)}), expected one, which gathers the sequence: only pre-norm models can "
            "split the sequence"
        )
    _check_sizes(parts, tp, vocabulary=vocabulary, fused_by_head=fused_by_head)
    plan = TensorParallelPlan(tp, sequence_parallel, loss_parallel)
    plan.model_class, plan.model_layers = type(model).__name__, tuple(list_layers(model))
    _Planner(model, parts, plan).plan(vocabulary=vocabulary)
    return plan


def _check_sizes(parts: Transformer, tp: int, *, vocabulary: bool, fused_by_head: bool) -> None:
    for block in parts.blocks:
        attention = block.attention
        if attention.is_fused and not fused_by_head and tp > 1:
            raise UsageError(
                f"{attention.inputs[0]} computes query, key and value in one layer: a split by rows would separate the "
                "queries from their keys. Use three layers, or order the rows by head, as in "
                "view(batch, length, num_heads, 3, head_size), and pass fused_by_head=True"
            )
        _check_divides(tp, attention.num_heads, f"the {attention.num_heads} heads of block {block.name!r}")
        key_value = attention.num_key_value_heads
        _check_divides(tp, key_value, f"the {key_value} key-value heads of block {block.name!r}")
        hidden = block.feed_forward.hidden_size
        _check_divides(tp, hidden, f"the hidden size {hidden} of the MLP of block {block.name!r}")
    if vocabulary and parts.vocabulary_size is not None:
        size = parts.vocabulary_size
        advice = f": pad it to {-(-size // tp) * tp}, or pass vocabulary=False"
        _check_divides(tp, size, f"the vocabulary of {size} entries of {parts.embedding!r}", advice)


def _check_divides(tp: int, size: int, what: str, advice: str = "") -> None:
    if size % tp:
        raise UsageError(f"tp={tp} does not divide {what}{advice}")


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Returns the places of every parameter that several modules hold."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


class _Planner:
    """Fills a plan with the styles and collectives of every module."""

    def __init__(self, model: nn.Module, parts: Transformer, plan: TensorParallelPlan) -> None:
        self._model, self._parts, self._plan = model, parts, plan
        self._names = {id(module): name for name, module in model.named_modules()}
        self._sequence = plan.sequence_parallel

    def plan(self, *, vocabulary: bool) -> None:
        parts = self._parts
        width = parts.blocks[0].width
        if vocabulary and parts.embedding is not None:
            self._add(
                parts.embedding,
                "vocabulary",
                "rows",
                RowwiseParallel(input_layouts=Replicate()),
                Collective("all_reduce", CollectivePhase.FORWARD, last_dim=width),
            )
        if self._sequence:  # the input of the first block is cut along the sequence
            gathered = Collective("all_gather", CollectivePhase.BACKWARD, last_dim=width)
            self._add(parts.blocks[0].name, "input", None, SplitSequence(), gathered)
        for block in parts.blocks:
            self._block(block)
        split_head = vocabulary and parts.head is not None
        if self._sequence and split_head:
            self._norm(parts.final_norms[0], width)
        elif self._sequence:
            name, gather = parts.final_norms[0], Collective("all_gather", CollectivePhase.FORWARD, last_dim=width)
            self._add(name, "sequence", None, GatheredNorm(local=True), gather, *self._partial_gradients(name))
        if split_head:
            self._head(width)

    def _add(
        self, name: str, style_name: str, part: str | None, style: ParallelStyle, *collectives: Collective
    ) -> None:
        share = "whole" if part is None else f"{part} 1/{self._plan.tp}"
        self._plan.styles[name] = style
        self._plan.layers.append(SplitLayer(name, style_name, share, collectives))

    def _block(self, block: BlockParts) -> None:
        attention, feed_forward = block.attention, block.feed_forward
        if self._sequence:
            for name in block.norms:
                self._norm(name, block.width)
        for name in attention.inputs:
            self._column(name, block.width)
        self._row(attention.output, block.width)
        for name in feed_forward.ups:
            self._column(name, block.width)
        self._row(feed_forward.down, block.width)
        self._plan.heads += [(self._names[id(module)], attribute) for module, attribute in attention.attributes]

    def _column(self, name: str, width: int) -> None:
        # With sequence parallelism the norm before the layer gathers the sequence and adds the gradients.
        sums = [] if self._sequence else [Collective("all_reduce", CollectivePhase.BACKWARD, last_dim=width)]
        self._add(name, "column", "rows", ColwiseParallel(), *sums)

    def _row(self, name: str, width: int) -> None:
        if self._sequence:
            style = RowwiseParallel(output_layouts=Shard(1))
            causes = [
                Collective("reduce_scatter", CollectivePhase.FORWARD, last_dim=width),
                Collective("all_gather", CollectivePhase.BACKWARD, last_dim=width),
            ]
        else:
            style, causes = RowwiseParallel(), [Collective("all_reduce", CollectivePhase.FORWARD, last_dim=width)]
        self._add(name, "row", "columns", style, *causes)

    def _norm(self, name: str, width: int) -> None:
        self._add(
            name,
            "sequence",
            None,
            GatheredNorm(),
            Collective("all_gather", CollectivePhase.FORWARD, last_dim=width),
            Collective("reduce_scatter", CollectivePhase.BACKWARD, last_dim=width),
            *self._partial_gradients(name),
        )

    def _head(self, width: int) -> None:
        assert self._parts.head is not None and self._parts.vocabulary_size is not None
        sums = [] if self._sequence else [Collective("all_reduce", CollectivePhase.BACKWARD, last_dim=width)]
        if self._plan.loss_parallel:
            # The maximum, the sum of exponentials and the target's logit of every position, each in 32 bits.
            logits = [Collective("all_reduce", CollectivePhase.FORWARD, last_dim=1, item_size=4, count=3)]
            style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        else:
            logits = [Collective("all_gather", CollectivePhase.FORWARD, last_dim=self._parts.vocabulary_size)]
            style = ColwiseParallel(output_layouts=Replicate())
        self._add(self._parts.head, "vocabulary", "rows", style, *sums, *logits)

    def _partial_gradients(self, name: str) -> Iterator[Collective]:
        """Yields the sums of gradients of whole parameters that each rank computes from its part of the sequence."""
        for parameter in self._model.get_submodule(name).parameters(recurse=False):
            size, item_size = parameter.numel(), parameter.element_size()
            yield Collective("all_reduce", CollectivePhase.GRADIENTS, last_dim=size, item_size=item_size)


SEQUENCE_DIM = 1
"""Dimension of activations along the sequence: ``[batch, length, width]``."""


class SplitSequence(ParallelStyle):
    """Cuts a module's first input, which is whole on every rank, along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return (whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local(), *inputs[1:])

        module.register_forward_pre_hook(cut)
        return module


class GatheredNorm(ParallelStyle):
    """A norm that computes its part of the sequence, and gathers the result.

    The parameters are whole on every rank, and their gradients are sums over the ranks.

    Args:
        local: Whether the output is a plain tensor that is the same on all ranks, and has the same gradient on all
            ranks. Otherwise it is a ``DTensor`` for layers that are split by columns: its gradient is their sum.
    """

    def __init__(self, *, local: bool = False) -> None:
        super().__init__()
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(part.named_parameters(recurse=False)):
                values = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            part: torch.Tensor = inputs[0]
            return (DTensor.from_local(part, mesh, [Shard(SEQUENCE_DIM)], run_check=False), *inputs[1:])

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            whole = output.redistribute(placements=[Replicate()])
            return whole.to_local() if self._local else whole

        return distribute_module(module, device_mesh, replicate, enter, leave)  # type: ignore[arg-type]
