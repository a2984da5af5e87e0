"""Plans of tensor parallelism: which layers of a transformer are split how, and what is sent for it.

``plan_tensor_parallel`` plans, ``TensorParallelPlan.apply`` splits a model. At the end are the styles of sequence
parallelism that torch does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from shardwell.module.fully_shard import ShardedModule
from shardwell.parallel.dataflow import SEQUENCE_DIM, Dataflow, SplitRoles, examples, trace
from shardwell.parallel.description import (
    ActivationShape,
    Collective,
    CollectivePhase,
    ModelDescription,
    SplitLayer,
    StageDescription,
    describe_model,
)
from shardwell.parallel.outline import BlockParts, Layer, Transformer, analyse, list_layers
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
            UsageError: The mesh has another size than the plan, or the model is sharded or split already.
        """
        if mesh.ndim != 1 or mesh.size() != self.tp:
            raise UsageError(f"the plan is for tp={self.tp}, but the mesh {mesh} has {mesh.ndim} dims of {mesh.size()}")
        if any(isinstance(module, ShardedModule) for module in model.modules()):
            raise UsageError("the model is sharded already: apply the tensor-parallel plan before fully_shard")
        for name, parameter in model.named_parameters():
            if self.styles and isinstance(parameter, DTensor):
                raise UsageError(
                    f"the parameter {name!r} is a DTensor already: apply one plan, once, to a model that no other plan "
                    "of parallel styles has split. For another plan, build the model again"
                )
        if self.layers:
            self.note_in(describe_model(model, self.model_class, [StageDescription(0, (), self.model_layers)]))
        modules = dict(model.named_modules())
        split = {id(modules[name]) for name in self.styles if name in modules}
        ties = _ties(model)
        for name, style in self.styles.items():
            if name in modules:
                parallelize_module(modules[name], mesh, style, src_data_rank=None)
        for places in ties:  # the styles put a new parameter into every module that they split
            for parameter in [getattr(*place) for place in places if id(place[0]) in split][:1]:
                for module, attribute in places:
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
    example: Any = None,
) -> TensorParallelPlan:
    """Plans the tensor parallelism of a GPT-, Llama- or BERT-like model; changes nothing.

    In every block, query, key, value and the first layers of the MLP are split by columns (output features), and the
    output projection and the last layer of the MLP by rows. The token embedding and the head are split along the
    vocabulary. Everything else stays whole on every rank. Parameters that a rank uses with its own heads only, such as
    those of query and key norms, are whole, and their gradients are summed over the ranks.

    The forward runs without values, once whole and once as one rank runs it. A model for which these runs do not prove
    that the ranks compute the same as the whole model is refused.

    Args:
        model: The whole model, on any device, before ``fully_shard``.
        tp: Number of tensor-parallel ranks. With 1 the plan is empty.
        vocabulary: Whether to split the token embedding and the head.
        sequence_parallel: Whether norms, dropout and residual paths compute a part of the sequence each. The model
            must be pre-norm: each norm in a block feeds the attention or the MLP only.
        loss_parallel: Whether the head's output stays split for a loss in ``plan.loss_context()``.
        fused_by_head: Whether the rows of a fused projection (``qkv``) are ordered by head, then query, key and value.
            A projection with all queries first cannot be split.
        example: Arguments of a call of the model: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. Values do not matter. Default: token ids of shape ``[3, 2 * tp]``, or the images of a Hugging
            Face model.

    Raises:
        UsageError: ``tp`` does not divide a number of heads, a hidden size, or the size of the vocabulary; the model is
            sharded already; a layer has an unknown role; the runs do not prove the plan; or the options contradict each
            other.
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
    roles = _roles(parts, tp, vocabulary=vocabulary)
    flow = _prove(model, parts, roles, example, sequence_parallel=sequence_parallel)
    plan = TensorParallelPlan(tp, sequence_parallel, loss_parallel)
    plan.model_class, plan.model_layers = type(model).__name__, tuple(list_layers(model))
    _Planner(model, parts, plan, roles, flow).plan(vocabulary=vocabulary)
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


def _roles(parts: Transformer, tp: int, *, vocabulary: bool) -> SplitRoles:
    roles = SplitRoles(tp, norms=list(parts.final_norms))
    for block in parts.blocks:
        roles.columns += [*block.attention.inputs, *block.feed_forward.ups]
        roles.rows += [block.attention.output, block.feed_forward.down]
        roles.heads += block.attention.attributes
        roles.norms += block.norms
    if vocabulary:
        roles.vocabulary = [name for name in (parts.embedding, parts.head) if name is not None]
    return roles


_OTHER_PLAN = "Otherwise write a plan of torch's parallel styles and call parallelize_module"


def _prove(model: nn.Module, parts: Transformer, roles: SplitRoles, given: Any, *, sequence_parallel: bool) -> Dataflow:
    """Proves that the ranks compute the same as the whole model; adds the roles of norms if the sequence is split.

    Raises:
        UsageError: They do not, or the model cannot run without values.
    """
    failure: Exception | None = None
    for example in examples(model, roles.tp, given):
        try:
            whole = trace(model, roles, example)
            break
        except UsageError as error:
            raise UsageError(f"tp={roles.tp} for {type(model).__name__}: {error}. {_OTHER_PLAN}") from error
        except Exception as error:  # runs the user's modules
            failure = failure or error
    else:
        assert failure is not None
        reason = str(failure).partition("\n")[0]
        raise UsageError(
            f"{type(model).__name__} cannot run without values, which plan_tensor_parallel needs to prove the "
            f"plan ({type(failure).__name__}: {reason}). Pass example=, the arguments of a call. The forward must not "
            f"depend on values of tensors. {_OTHER_PLAN}"
        ) from failure
    advice = _OTHER_PLAN
    if sequence_parallel:
        _split_sequence(parts, roles, whole)
        advice = f"Try sequence_parallel=False. {_OTHER_PLAN}"
    try:
        return trace(model, roles, example, whole)
    except UsageError as error:
        options = ", sequence_parallel=True" if sequence_parallel else ""
        raise UsageError(f"tp={roles.tp}{options} for {type(model).__name__}: {error}. {advice}") from error


def _split_sequence(parts: Transformer, roles: SplitRoles, whole: Dataflow) -> None:
    """Chooses the norms that gather the sequence.

    Raises:
        UsageError: A layer that is split by columns does not follow a norm.
    """
    in_blocks = {name for block in parts.blocks for name in block.norms}
    for name in roles.columns:
        if whole.feeding.get(name) not in in_blocks:
            raise UsageError(
                f"sequence_parallel=True: the input of {name!r} is not the output of a norm of its block, which would "
                "gather the sequence: only pre-norm models can split the sequence"
            )
    final = parts.final_norms[0]
    feeding = {whole.feeding[name] for name in roles.columns}
    heads = {whole.feeding.get(name) for name in roles.vocabulary}
    roles.sequence_from = parts.blocks[0].name
    roles.gathered = frozenset(feeding | ({final} & heads))
    roles.gathered_locally = "" if final in heads else final


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

    def __init__(
        self, model: nn.Module, parts: Transformer, plan: TensorParallelPlan, roles: SplitRoles, flow: Dataflow
    ) -> None:
        self._model, self._parts, self._plan, self._roles = model, parts, plan, roles
        self._names = {id(module): name for name, module in model.named_modules()}
        self._sequence = plan.sequence_parallel
        self._partial: dict[str, list[str]] = {}
        for parameter, owner in flow.partial.items():
            if owner not in roles.gathered and owner != roles.gathered_locally:
                self._partial.setdefault(owner, []).append(parameter)

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
        self._partial_modules([*self._partial])
        if self._sequence:
            self._final_norm(parts.final_norms[0], width)
        if vocabulary and parts.head is not None:
            self._head(width)

    def _final_norm(self, name: str, width: int) -> None:
        if name in self._roles.gathered:
            self._norm(name, width)
            return
        gather = Collective("all_gather", CollectivePhase.FORWARD, last_dim=width)
        self._add(name, "sequence", None, GatheredNorm(local=True), gather, *self._partial_gradients(name))

    def _add(
        self, name: str, style_name: str, part: str | None, style: ParallelStyle, *collectives: Collective
    ) -> None:
        if name in self._plan.styles:
            raise UsageError(
                f"{name!r} has parameters of its own, whose gradients are sums over the ranks, and is split itself: "
                "move the parameters into a module of their own"
            )
        share = "whole" if part is None else f"{part} 1/{self._plan.tp}"
        self._plan.styles[name] = style
        self._plan.layers.append(SplitLayer(name, style_name, share, collectives))

    def _block(self, block: BlockParts) -> None:
        attention, feed_forward = block.attention, block.feed_forward
        if self._sequence:
            for name in block.norms:
                if name in self._roles.gathered:
                    self._norm(name, block.width)
        for name in attention.inputs:
            self._column(name, block.width)
        self._row(attention.output, block.width)
        for name in feed_forward.ups:
            self._column(name, block.width)
        self._row(feed_forward.down, block.width)
        self._partial_modules([owner for owner in self._partial if f"{owner}.".startswith(f"{block.name}.")])
        self._plan.heads += [(self._names[id(module)], attribute) for module, attribute in attention.attributes]

    def _partial_modules(self, owners: Sequence[str]) -> None:
        for owner in owners:
            names = self._partial.pop(owner)
            parameters = map(self._model.get_parameter, names)
            style = PartialGradients([name.rpartition(".")[2] for name in names])
            self._add(owner, "partial", None, style, *map(_summed, parameters))

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
        yield from map(_summed, self._model.get_submodule(name).parameters(recurse=False))


def _summed(parameter: nn.Parameter) -> Collective:
    size, item_size = parameter.numel(), parameter.element_size()
    return Collective("all_reduce", CollectivePhase.GRADIENTS, last_dim=size, item_size=item_size)


class SplitSequence(ParallelStyle):
    """Cuts a module's first input, which is whole on every rank, along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            length, tp = inputs[0].shape[SEQUENCE_DIM], device_mesh.size()
            if length % tp:
                raise UsageError(
                    f"sequence parallelism over tp={tp} ranks: tp does not divide the sequence length {length}. Use "
                    f"sequences of {length + -length % tp} tokens, or plan with sequence_parallel=False"
                )
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
        def replicate(__: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, _ in list(part.named_parameters(recurse=False)):
                _replicate(part, name, mesh)

        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            part: torch.Tensor = inputs[0]
            return (DTensor.from_local(part, mesh, [Shard(SEQUENCE_DIM)], run_check=False), *inputs[1:])

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            whole = output.redistribute(placements=[Replicate()])
            return whole.to_local() if self._local else whole

        return distribute_module(module, device_mesh, replicate, enter, leave)  # type: ignore[arg-type]


class PartialGradients(ParallelStyle):
    """A module that computes with its rank's part of heads, features or sequence.

    The parameters are whole on every rank, and their gradients are sums over the ranks.
    """

    def __init__(self, parameters: Sequence[str]) -> None:
        super().__init__()
        self._parameters = tuple(parameters)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        calls: list[dict[str, nn.Parameter]] = []

        def enter(part: nn.Module, _: tuple[Any, ...]) -> None:
            whole: dict[str, Any] = {name: part._parameters[name] for name in self._parameters}
            calls.append(whole)
            for name, parameter in whole.items():  # __setattr__ takes parameters only
                part._parameters[name] = parameter.to_local(grad_placements=[Partial()])

        def leave(part: nn.Module, _: tuple[Any, ...], __: object) -> None:
            if calls:  # otherwise a hook before `enter` has raised
                part._parameters.update(calls.pop())

        for name in self._parameters:
            _replicate(module, name, device_mesh)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


def _replicate(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    parameter = module.get_parameter(name)
    values = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))
