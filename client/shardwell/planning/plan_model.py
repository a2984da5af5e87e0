"""The model of a plan: builds it in shapes only, records what autograd saves, and divides it over a world.

``load`` builds the model, ``record_activations`` runs its example call, and ``divide`` cuts it for tensor and pipeline
ranks, as a training script would.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy, check_strategy
from shardwell.module.unit import Unit
from shardwell.parallel.description import ModelDescription, StageDescription, describe_model
from shardwell.parallel.outline import list_layers
from shardwell.parallel.pipeline import SchedulePlan
from shardwell.parallel.splitting import micro_batch_of, split_model
from shardwell.parallel.tensor import TensorParallelPlan, plan_tensor_parallel
from shardwell.wrapping.auto_wrap import choose_units
from shardwell.wrapping.policies import supports_recomputation
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS, OptimizerSpec
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2


class ShapeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode in which operations compute shapes only. Values of real tensors are not read.

    Attributes:
        before_operation: Called before each operation.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.before_operation: Callable[[], None] = lambda: None

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        self.before_operation()
        return super().__torch_dispatch__(*args, **kwargs)


@dataclass(frozen=True)
class ShapeModel:
    """A model whose tensors have shapes and no memory."""

    module: nn.Module
    mode: ShapeMode
    arguments: tuple[Any, ...] = ()
    """Arguments of an example call."""
    keywords: Mapping[str, Any] = field(default_factory=dict)


def load(target: str | Callable[..., Any], *, batch: int, length: int, dtype: torch.dtype | None = None) -> ShapeModel:
    """Builds a model without allocating its memory.

    Args:
        target: A callable, or ``module:callable``, which returns the model, ``(model, args)`` or
            ``(model, args, kwargs)`` with the tuple and the dict of an example call, or ``(model, tensor, ...)``.
            ``batch`` and ``length`` are passed if the callable has parameters with these names. Or the path of a
            Hugging Face ``config.json`` or its folder.
        batch: Sequences of the example call.
        length: Tokens per sequence.
        dtype: Default dtype of parameters; None: the default of torch or the config.

    Raises:
        UsageError: The target does not exist, or the model cannot be built without values.
    """
    mode = ShapeMode()
    sizes = {"batch": batch, "length": length}
    with mode, _default_dtype(dtype):
        if callable(target):
            made = _call(target, getattr(target, "__qualname__", repr(target)), sizes)
        elif ":" in target:
            made = _call(_imported(target), target, sizes)
        else:
            made = _from_config(Path(target), sizes, dtype)
        model, arguments, keywords = made
        if any(not isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            model = copy.deepcopy(model)  # the callable has returned a model in use, which a dry run must not change
    return ShapeModel(model, mode, arguments, keywords)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _imported(target: str) -> Callable[..., Any]:
    module_name, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    if module_name.endswith(".py"):
        raise UsageError(f"{target!r}: expected the module's name, {module_name[:-3].replace('/', '.')}:{name}")
    with _locating_errors(f"{target!r}: cannot import {module_name}"):
        module = importlib.import_module(module_name)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{target!r}: {module_name} has no function {name!r} that makes a model")
    return function


def _call(function: Callable[..., Any], target: str, sizes: Mapping[str, int]) -> _Made:
    signature = inspect.signature(function)
    keywords = {key: value for key, value in sizes.items() if key in signature.parameters}
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise UsageError(f"{target!r}: {error}; only the parameters batch and length are passed") from None
    with _locating_errors(f"{target!r}: {target.rpartition(':')[2]} failed"):
        made = function(**keywords)
    model, *call = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{target!r} returned {type(model).__name__}, expected a module, or a tuple of a module and its arguments"
        )
    return model, *_split_call(call)


def _split_call(call: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of ``args``, ``args, kwargs``, or separate arguments."""
    match call:
        case [tuple() | list() as arguments]:
            return tuple(arguments), {}
        case [dict() as keywords]:
            return (), keywords
        case [tuple() | list() as arguments, dict() as keywords]:
            return tuple(arguments), keywords
    return tuple(call), {}


@contextmanager
def _locating_errors(action: str) -> Iterator[None]:
    """Context that adds the location in the user's code to errors."""
    try:
        yield
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise UsageError(f"{action}: {type(error).__name__}: {error}{where}") from error


def _is_users(filename: str) -> bool:
    libraries = ("<", __file__, str(Path(inspect.__file__).parent))
    return not filename.startswith(libraries) and "site-packages" not in filename


def _from_config(path: Path, sizes: Mapping[str, int], dtype: torch.dtype | None) -> _Made:
    if not path.exists():
        raise UsageError(f"{path}: no such file; expected module:callable, or the path of a Hugging Face config.json")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("a Hugging Face config needs the package transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: {error}") from error
    config.use_cache = False
    if dtype is not None:
        config.dtype = dtype
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    model = (named._from_config if named else transformers.AutoModelForCausalLM.from_config)(config)
    tokens = torch.zeros(sizes["batch"], sizes["length"], dtype=torch.long)
    return model, (), {"input_ids": tokens, "labels": tokens} if "CausalLM" in type(model).__name__ else {}


# ---- activations ----

Sizes = dict[int, int]
"""Bytes of storages by identity: a storage that is saved twice counts once."""


@dataclass(slots=True)
class _Region:
    """A call of one module, or the computation between two such calls."""

    in_module: bool = False
    can_recompute: bool = False
    inputs: Sizes = field(default_factory=dict)
    saved: Sizes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBytes:
    """Size of the activations of one forward."""

    held: int
    """Between the forward and the backward."""
    peak: int
    """At most, until the end of the backward."""


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """The tensors that one forward in training saves, without parameters and buffers."""

    regions: tuple[_Region, ...]
    """Regions in the order of the forward."""
    outputs: tuple[torch.Tensor, ...] = ()
    """The tensors that the forward returned."""

    def sizes(self, *, recomputes: bool = False, moved_min_bytes: int | None = None) -> ActivationBytes:
        """Returns the size of the saved tensors.

        Args:
            recomputes: Whether modules save only their inputs and are recomputed in the backward, one at a time, if
                they can be.
            moved_min_bytes: Size from which the activations of modules are offloaded. None: they are not.
        """
        held: Sizes = {}
        peak = 0
        for region in self.regions:
            kept = region.inputs if recomputes and region.can_recompute else region.saved
            # In the backward of a region, its activations and those of all earlier regions are in memory.
            peak = max(peak, sum((held | kept | region.saved).values()))
            moves = region.in_module and moved_min_bytes is not None
            held |= {key: size for key, size in kept.items() if not (moves and size >= (moved_min_bytes or 0))}
        total = sum(held.values())
        return ActivationBytes(held=total, peak=max(peak, total))


def record_activations(
    shapes: ShapeModel, *, received: Iterable[torch.Tensor] = ()
) -> tuple[SavedActivations | None, str]:
    """Records what autograd saves in one call in training.

    Args:
        shapes: The model, or a stage of it.
        received: Arguments of the call that are not counted.

    Returns:
        The activations, and if they are unknown the reason.
    """
    if not shapes.arguments and not shapes.keywords:
        return None, "there is no example call"
    model = shapes.module
    chosen = [module for unit in choose_units(model) for module in unit.modules.values()]
    inside = {id(part) for module in chosen for part in module.modules() if part is not module}
    recorder = _Recorder([*model.parameters(), *model.buffers(), *received])
    with ExitStack() as stack:
        for module in chosen:
            if id(module) not in inside:
                enter = module.register_forward_pre_hook(recorder.enter, with_kwargs=True)
                leave = module.register_forward_hook(recorder.leave)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        try:
            with shapes.mode, saved_tensors_hooks(recorder.save, lambda tensor: tensor):
                output = model.train()(*shapes.arguments, **shapes.keywords)
        except Exception as error:  # a user's forward may raise anything if it needs a value
            message = str(error).strip().partition("\n")[0]
            return None, f"the example call on shapes raised {type(error).__name__}: {message}"
    outputs = tuple(value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
    return SavedActivations(tuple(recorder.regions), outputs), ""


class _Recorder:
    """Divides a forward into regions. ``own``: tensors that are not counted."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._alive: list[torch.UntypedStorage] = []
        """Keeps storages alive, so that no identity is reused."""
        self.regions = [_Region()]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._add(tensor, self.regions[-1].saved)
        return tensor

    def enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        self.regions.append(_Region(in_module=True, can_recompute=supports_recomputation(module)))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, self.regions[-1].inputs)

    def leave(self, *_: object) -> None:
        self.regions.append(_Region())

    def _add(self, tensor: torch.Tensor, sizes: Sizes) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._alive.append(storage)
            sizes[storage._cdata] = storage.nbytes()


# ---- division ----


@dataclass(slots=True)
class PlannedStage:
    """One pipeline stage in one tensor-parallel rank, or the whole model."""

    module: nn.Module
    arguments: tuple[Any, ...] = ()
    """Arguments of the call with one micro-batch."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    saved: SavedActivations | None = None
    """What autograd saves in the forward of one micro-batch. None: unknown."""
    received_bytes: int = 0
    """Activations of one micro-batch that the stage receives from other stages."""
    sent_bytes: int = 0
    """Activations of one micro-batch that the stage sends to other stages."""
    output_bytes: int = 0
    """What the forward of one micro-batch returns. Kept until the backward."""
    units: Sequence[Unit] = ()
    """In the order in which ``auto_wrap`` makes them, the root unit last. Set by ``DryRun``."""


@dataclass(frozen=True, slots=True)
class Division:
    """A model that is divided over tensor and pipeline ranks."""

    stages: tuple[PlannedStage, ...]
    mode: ShapeMode
    """The mode in which the model was built."""
    tensor_plan: TensorParallelPlan
    schedule: SchedulePlan | None = None
    """None: the model is one stage, and a step has one forward and one backward."""
    description: coordinator_pb2.ModelPlan | None = None
    """Layers, styles and collectives. None: the model is not divided."""
    unknown: str = ""
    """Why the activations are unknown; empty if they are known."""


def divide(shapes: ShapeModel, world: World, options: DivisionOptions) -> Division:
    """Divides a model over a world.

    Args:
        shapes: The model. Its example call is that of one micro-batch.
        world: The grid of logical ranks.
        options: How to divide.

    Raises:
        UsageError: The model cannot be divided in this way; the message says why.
        TiedParameterError: Two stages of one trainer share a parameter.
    """
    schedule = options.schedule_plan(world)
    tensor_plan = plan_tensor_parallel(
        shapes.module,
        world.tp,
        vocabulary=options.vocabulary,
        sequence_parallel=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
        fused_by_head=options.fused_by_head,
        example=_example_of(shapes),
    )
    if schedule is None:
        saved, unknown = record_activations(shapes)
        return Division(
            (PlannedStage(shapes.module, shapes.arguments, shapes.keywords, saved),),
            shapes.mode,
            tensor_plan,
            description=_describe_undivided(shapes, tensor_plan) if world.tp > 1 else None,
            unknown=unknown,
        )
    return _divide_into_stages(shapes, schedule, tensor_plan, options.split_by)


def _example_of(shapes: ShapeModel) -> Any:
    """Returns the example call as ``plan_tensor_parallel`` takes it. None: there is none."""
    if not shapes.keywords:
        return shapes.arguments or None
    return inspect.signature(shapes.module.forward).bind(*shapes.arguments, **shapes.keywords).arguments


def _divide_into_stages(
    shapes: ShapeModel, schedule: SchedulePlan, tensor_plan: TensorParallelPlan, by: Literal["layers", "cost"]
) -> Division:
    if shapes.keywords:
        raise UsageError(
            f"the example call passes {', '.join(shapes.keywords)} by keyword, but a pipeline schedule passes the "
            "inputs of the first stage by position: use a function (module:callable) that returns (model, (inputs...))"
        )
    split = split_model(shapes.module, schedule.num_stages, by=by)
    holders = schedule.holders
    for tie in split.ties:
        tie.check_holders(holders)
    modules = [split.module(index) for index in range(schedule.num_stages)]
    if shapes.arguments:
        split.examples(*shapes.arguments)
    # With sequence parallelism, each rank sends its part of the sequence.
    parts = tensor_plan.tp if tensor_plan.sequence_parallel else 1
    stages: list[PlannedStage] = []
    unknown, values = "", shapes.arguments
    for module in modules:
        received = values if stages else ()
        saved, reason = record_activations(replace(shapes, module=module, arguments=values), received=received)
        unknown = unknown or reason
        outputs = () if saved is None else saved.outputs
        stages.append(
            PlannedStage(
                module,
                values,
                saved=saved,
                received_bytes=_size_bytes(received) // parts,
                sent_bytes=_size_bytes(outputs) // parts if module is not modules[-1] else 0,
                output_bytes=_size_bytes(outputs) // parts,
            )
        )
        values = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
    description = describe_model(modules[0], type(shapes.module).__name__, split.stages)
    schedule.note_in(description)
    tensor_plan.note_in(description)
    return Division(tuple(stages), shapes.mode, tensor_plan, schedule, description.to_proto(), unknown)


def _describe_undivided(shapes: ShapeModel, tensor_plan: TensorParallelPlan) -> coordinator_pb2.ModelPlan:
    model = shapes.module
    description = ModelDescription(type(model).__name__, (StageDescription(0, (), tuple(list_layers(model))),))
    tensor_plan.note_in(description)
    description.num_micro_batches = 1
    inputs = [value for value in (*shapes.arguments, *shapes.keywords.values()) if isinstance(value, torch.Tensor)]
    description.micro_batch = micro_batch_of(inputs, model.parameters())
    return description.to_proto()


def _size_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


OPTIMIZER_CHOICES: dict[str, tuple[OptimizerSpec, tuple[str, ...]]] = {
    **{name: (spec, ()) for name, spec in sorted(OPTIMIZERS.items())},
    **{
        f"{name}-{tensor.enabled_by}": (spec, (tensor.enabled_by,))
        for name, spec in sorted(OPTIMIZERS.items())
        for tensor in spec.state
        if tensor.enabled_by
    },
}
"""Optimizers by the name that a plan uses, such as ``sgd``, or ``sgd-momentum`` for the state that momentum enables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The run to plan. Fields with the name of an option of ``join`` or ``MemoryOptions`` mean the same."""

    world: World = field(default_factory=World)
    """The grid of logical ranks. Each rank has its own trainer."""
    num_servers: int = 1
    """Number of shard servers. All have the same memory, and each has its own link."""
    ranks_per_host: int = 1
    """Data-parallel ranks whose trainers share a host, its link and its cache."""
    bandwidth: float = 1e9 / 8
    """Bytes per second in each direction of the link of every trainer host and every server."""
    same_host: bool = False
    """Whether trainers read weights in the memory of servers on their host."""
    optimizer: str = "adamw"
    """A key of ``OPTIMIZER_CHOICES``."""
    min_shard_bytes: int = 2 << 20
    """Same as the coordinator's option of this name."""
    activation_bytes: int | None = None
    """Activations that autograd saves in one work item; None: recorded from an example call, if there is one."""

    gather_dtype: str = "float32"
    push_dtype: str = "float32"
    prefetch_bytes: int = 128 << 20
    push_bytes: int = 64 << 20
    keep_bytes: int | None = None
    host_cache_bytes: int = 0
    delta_cache_bytes: int = 0
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE

    strategy: ShardingStrategy | None = None
    reshard_after_forward: bool | None = None
    checkpoint_activations: bool = False
    offload_to: str | os.PathLike[str] | None = None
    offload_min_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_CHOICES:
            raise UsageError(f"optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZER_CHOICES)}")
        if self.num_servers < 1 or self.bandwidth <= 0:
            raise UsageError(
                f"num_servers={self.num_servers}, bandwidth={self.bandwidth}: expected at least 1 server and a "
                "positive number of bytes per second"
            )
        if not 1 <= self.ranks_per_host <= self.world.dp:
            raise UsageError(
                f"ranks_per_host={self.ranks_per_host}: expected 1 to dp={self.world.dp}, the data-parallel ranks"
            )
        for name, known in (("gather_dtype", GATHER_NAMES), ("push_dtype", PUSH_NAMES)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        check_strategy("(planned)", self.strategy, None, self.reshard_after_forward)

    @property
    def reads_servers(self) -> bool:
        """True if weights are read in the servers' memory, which needs a lossless ``gather_dtype``."""
        return self.same_host and self.gather_dtype == "float32"

    @property
    def streams_gradients(self) -> bool:
        """False if gradients are copied to shared memory at once: none are in flight, and they are never rounded."""
        return not (self.same_host and self.push_dtype == "float32")

    def state_bytes(self, layout: UnitLayout) -> int:
        """Returns the bytes of optimizer state for a unit."""
        spec, enabled = OPTIMIZER_CHOICES[self.optimizer]
        return spec.state_bytes(layout, enabled)


@dataclass(frozen=True, kw_only=True, slots=True)
class DivisionOptions:
    """How a training script divides its model: the arguments of the functions of ``shardwell.parallel``."""

    schedule: str | None = None
    """One of ``shardwell.parallel.SCHEDULES``. None: ``1F1B`` if ``pp`` is above 1."""
    num_micro_batches: int | None = None
    """Micro-batches per work item. None: ``pp``."""
    stages_per_trainer: int | None = None
    """As in ``SchedulePlan``."""
    split_by: Literal["layers", "cost"] = "layers"
    """As in ``split_model``."""
    vocabulary: bool = True
    sequence_parallel: bool = False
    loss_parallel: bool = False
    fused_by_head: bool = False
    """These four as in ``plan_tensor_parallel``."""

    def schedule_plan(self, world: World) -> SchedulePlan | None:
        """Returns the schedule of a world; None if ``pp`` is 1 and no schedule is given.

        Raises:
            UsageError: The schedule does not work with these numbers.
        """
        if world.pp == 1 and self.schedule is None and self.num_micro_batches is None:
            return None
        return SchedulePlan(
            schedule=self.schedule or "1F1B",
            pp=world.pp,
            num_micro_batches=world.pp if self.num_micro_batches is None else self.num_micro_batches,
            stages_per_trainer=self.stages_per_trainer,
        )
