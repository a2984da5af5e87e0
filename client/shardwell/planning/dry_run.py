"""Trains the stages of one trainer without values: the SDK's own code runs, and a store that moves no bytes counts.

1. Every parameter is replaced by a tensor with its shape and the memory of one element. With tensor parallelism, it is
   the part of rank 0. ``auto_wrap`` then shards the stages and declares their units to a ``DryRun``.
2. The trainer takes steps under a ``ShapeMode``, so operations compute shapes only. The hooks of the units gather, free
   and push as in training: the units' own accounting has the memory, and the ``DryRun`` what the units asked for. Flat
   vectors have addresses, but nothing touches their pages.

A step runs the example call of the model. If there is none, if it needs values, or if tensor parallelism would divide
it, stand-ins take the place of forwards: see ``_stand_in``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from shardwell.memory.buffers import BufferPool
from shardwell.module import torch_patches
from shardwell.module.fully_shard import Accumulation, ShardedModule, make_plain
from shardwell.module.new_units import GridPlace
from shardwell.module.unit import Unit
from shardwell.module.units import Units
from shardwell.parallel.tensor import TensorParallelPlan
from shardwell.planning.plan_model import Division, PlanOptions
from shardwell.wrapping.auto_wrap import auto_wrap, choose_units
from shardwell.wrapping.policies import MemoryOptions, WrapPolicy
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES, stream_size
from shardwell_wire.model.layout import UnitLayout

_NUM_STEPS = 3
"""The first step records the order of units, the second one the transition between steps. Later steps are equal."""


def dry_run(division: Division, pp_rank: int, options: PlanOptions, policy: WrapPolicy | None = None) -> DryRun:
    """Takes some steps of the trainer of a pipeline rank and of tensor-parallel rank 0.

    The model gets other parameters, and is of no use afterwards.

    Args:
        division: The model. The trainer's stages get their units.
        policy: As in ``auto_wrap``.

    Raises:
        UsageError: The model cannot be sharded.
        TiedParameterError: Stages of one trainer share a parameter.
    """
    world, schedule = options.world, division.schedule
    indices = [0] if schedule is None else schedule.stages_of(pp_rank)
    place = GridPlace(tp=world.tp, pp=world.pp, pp_rank=pp_rank, cp=world.cp)
    stands_in = world.tp > 1 or any(division.stages[index].saved is None for index in indices)
    while True:
        run = DryRun(division, indices, options, place)
        try:
            run.shard(policy, stands_in=stands_in)
            run.train(stands_in=stands_in)
            return run
        except Exception:  # a user's backward may raise anything if it needs a value
            if stands_in:
                raise
            stands_in = True
            for module in [part for index in indices for part in division.stages[index].module.modules()]:
                if isinstance(module, ShardedModule):
                    make_plain(module)
        finally:
            torch_patches.unwatch(run.units.passes)


class DryRun:
    """A trainer's stages, and a ``ParameterStore`` that records what they ask for and moves no bytes.

    Attributes:
        units: The units of all stages.
        gathers: Gathers in the last step, by unit index.
        cached: Indices of the units in the cache of the host. Each unit that fits, in the order of the declarations.
        weights_bytes: Peak of the weights in the trainer's own memory.
        ahead_bytes: Maximum of prefetched weights that have not been used yet.
        kept_bytes: Maximum of weights that are kept for their next use in the step.

    Args:
        division: The model.
        stages: The numbers of the trainer's stages. They get their units.
    """

    def __init__(self, division: Division, stages: Sequence[int], options: PlanOptions, place: GridPlace) -> None:
        self.options = options
        self._division = division
        self._stages = [division.stages[index] for index in stages]
        self.gathers: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.weights_bytes = self.ahead_bytes = self.kept_bytes = self._peak_bytes = 0
        self._free_cache_bytes = options.host_cache_bytes
        self._layouts: list[UnitLayout] = []
        self._vectors: dict[int, _ShapeVector] = {}
        self._pushed: dict[int, set[int]] = {}
        self.units = Units(
            self,
            prefetch_bytes=options.prefetch_bytes,
            keep_bytes=options.keep_bytes,
            backward_prefetch=options.backward_prefetch,
            place=place,
        )
        self._memory = self.units.memory
        self._memory.pool = _ShapePool(options.prefetch_bytes, one_larger=True)

    @property
    def idle_bytes(self) -> int:
        """Idle buffers at the peak of weights and idle buffers together, beyond ``weights_bytes``."""
        return self._peak_bytes - self.weights_bytes

    @property
    def bases(self) -> set[int]:
        """Indices of the units whose streams are kept as bases of deltas: in their order, each unit that fits."""
        options, free_bytes, kept = self.options, self.options.delta_cache_bytes, set()
        if not options.same_host and GATHER_NAMES[options.gather_dtype] in value_deltas.WIRE_DTYPES:
            for index, layout in enumerate(self._layouts):
                size_bytes = wire_bytes(layout, options.gather_dtype)
                if index not in self.cached and size_bytes <= free_bytes:
                    kept.add(index)
                    free_bytes -= size_bytes
        return kept

    def sent_bytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's gradients that the last step has pushed, in their wire dtype."""
        layout, pushed = unit.layout, self._pushed.get(unit.index, set())
        if len(pushed) == len(layout.parameters):
            return wire_bytes(layout, self.options.push_dtype)
        segments = [part for part in layout.segments(0, layout.size_bytes) if part.parameter_index in pushed]
        return stream_size(layout, segments, PUSH_NAMES[self.options.push_dtype])

    def observe(self, waiting_bytes: int = 0) -> None:
        """Called while the trainer waits for so many bytes: all other units that are being fetched are prefetched."""
        self.ahead_bytes = max(self.ahead_bytes, self._memory.fetching_bytes - waiting_bytes)
        self.kept_bytes = max(self.kept_bytes, self._memory.kept_bytes)

    def shard(self, policy: WrapPolicy | None, *, stands_in: bool) -> None:
        """Makes the units of all stages.

        Args:
            policy: As in ``auto_wrap``.
            stands_in: Whether stand-ins take the place of forwards.
        """
        options = self.options
        for stage in self._stages:
            _in_shape(stage.module, self._division.tensor_plan)
            if stands_in:
                chosen = [module for unit in choose_units(stage.module, policy) for module in unit.modules.values()]
                calls = dict.fromkeys([*chosen, stage.module])
                for module in calls:
                    module.forward = _stand_in(module, calls)
            first = len(self.units)
            auto_wrap(
                stage.module,
                SimpleNamespace(units=self.units),
                policy,
                memory=MemoryOptions(checkpoint_activations=options.checkpoint_activations),
                strategy=options.strategy,
                reshard_after_forward=options.reshard_after_forward,
                source=_NoValues(),
            )
            stage.units = list(self.units)[first:]

    def train(self, *, stands_in: bool) -> None:
        """Takes some steps."""
        accumulations = [Accumulation(stage.module) for stage in self._stages]
        schedule, mode = self._division.schedule, self._division.mode
        mode.before_operation = self.observe
        with mode, torch.enable_grad(), warnings.catch_warnings():
            # Gradients without values have the address 0, which is in no flat vector.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            for _ in range(_NUM_STEPS):
                self.gathers.clear()
                self._pushed.clear()
                self.units.passes.begin_step()
                outputs = []
                for stage, accumulation in zip(self._stages, accumulations, strict=True):
                    if schedule is not None:  # one micro-batch: all others find the units gathered
                        accumulation.begin()
                    if stands_in:
                        outputs.append(stage.module(torch.zeros((), requires_grad=True)))
                    else:
                        outputs.append(stage.module.train()(*stage.arguments, **stage.keywords))
                for accumulation in reversed(accumulations):
                    _backward(outputs.pop())
                    self.observe()
                    if schedule is not None:
                        accumulation.finish(schedule.num_micro_batches)
                self.units.finish_item()
                self.units.invalidate()
                self.units.zero_grad()

    # See ParameterStore.

    @property
    def gradients(self) -> DryRun:
        return self

    def declare(self, layout: UnitLayout, initial_values: object) -> int:
        index = len(self._layouts)
        self._layouts.append(layout)
        if layout.size_bytes <= self._free_cache_bytes and not self.options.reads_servers:
            self._free_cache_bytes -= layout.size_bytes
            self.cached.add(index)
        return index

    def gather(self, unit_index: int, target: memoryview | None, **_: object) -> Future[int]:
        self.gathers[unit_index] += 1
        live_bytes = self._memory.live_bytes
        self.weights_bytes = max(self.weights_bytes, live_bytes)
        self._peak_bytes = max(self._peak_bytes, live_bytes + self._memory.pool.idle_bytes)
        return _Gather(partial(self.observe, self._layouts[unit_index].size_bytes))

    @contextmanager
    def gathering_together(self) -> Iterator[None]:
        self.observe()
        yield

    def gather_average(self, unit_index: int, target: memoryview, version: int | None = None) -> None:
        raise NotImplementedError

    def in_place(self, unit_index: int) -> _ShapeVector | None:
        if self.options.reads_servers or unit_index in self.cached:
            return self._vectors.setdefault(unit_index, _ShapeVector(self._layouts[unit_index].size_bytes))
        return None

    def wrote_in_place(self) -> bool:
        return False

    def fetches_in_place(self) -> bool:
        return bool(self.cached)

    def share_on_host(self, unit_index: int) -> bool:
        if not self.options.reads_servers:
            self.cached.add(unit_index)
        return True

    def streams_gradients(self, unit_index: int) -> bool:
        return self.options.streams_gradients

    def present_version(self, unit_index: int) -> int | None:
        self.gathers[unit_index] += 1
        return 0

    def await_version(self, unit_index: int) -> Callable[[], int]:
        self.gathers[unit_index] += 1
        return _Gather(self.observe).result

    def compare(self, unit_index: int, gradients: object) -> None:
        pass

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.observe()
        self._pushed.setdefault(unit_index, set()).update(index for index, _ in gradients)

    def may_keep(self, unit_index: int) -> bool:
        return False

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        pass

    def abandons_work(self) -> bool:
        return False

    def discard(self) -> None:
        pass


class _Gather(Future[int]):
    """A gather that is done. Calls a function when the trainer waits for it."""

    def __init__(self, observe: Callable[[], None]) -> None:
        super().__init__()
        self._observe = observe
        self.set_result(0)

    def result(self, timeout: float | None = None) -> int:
        self._observe()
        return super().result(timeout)


class _ShapePool(BufferPool):
    """A pool whose buffers have addresses, also under a ``ShapeMode``."""

    def acquire(self, size_bytes: int) -> torch.Tensor:
        with unset_fake_temporarily():
            return super().acquire(size_bytes)


class _ShapeVector:
    """An ``InPlaceVector`` that never changes."""

    exact = True

    def __init__(self, size_bytes: int) -> None:
        self.bytes = BufferPool(0).acquire(size_bytes)

    def shows(self, version: int) -> bool:
        return True

    def check(self, version: int) -> None:
        pass

    def forget_writes(self) -> int | None:
        return None


class _NoValues:
    """A ``ValueSource``, and the ``InitialValues`` of every unit, which nothing reads."""

    init = None
    draws: Mapping[int, Any] = {}

    def unit_values(self, *_: object) -> Any:
        return self

    def fill(self, *_: object) -> bool:
        return False


def _backward(output: object) -> None:
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def _in_shape(module: nn.Module, tensor_plan: TensorParallelPlan) -> None:
    """Replaces all parameters of a stage by ones with the memory of one element, on the CPU."""
    made: dict[int, nn.Parameter] = {}
    for name, part in module.named_modules():
        for attribute, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                shape, local = parameter.shape, parameter.shape
                if tensor_plan.tp > 1:
                    local = tensor_plan.local_shape(f"{name}.{attribute}".removeprefix("."), tuple(shape))
                values = torch.empty((), dtype=parameter.dtype).expand(local)
                if local != shape:
                    dim = next(dim for dim, size in enumerate(shape) if size != local[dim])
                    values = _part(values, shape, dim, tensor_plan.tp)
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            setattr(part, attribute, made[id(parameter)])


def _part(local: torch.Tensor, shape: torch.Size, dim: int, tp: int) -> torch.Tensor:
    """Returns a ``DTensor`` on a mesh in which this process is tensor-parallel rank 0. No other process exists."""
    own_group = not dist.is_initialized()
    if own_group:  # a mesh asks for the rank in the default group
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", dist.get_rank() + torch.arange(tp), _init_backend=False)
    finally:
        if own_group:
            dist.destroy_process_group()
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=strides)


def _stand_in(module: nn.Module, calls: Collection[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a forward that calls the units inside a module in the model's order, and reads all other parameters."""
    inside: dict[nn.Module, None] = {}
    own = _own_parts(module, calls, inside)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for call in inside:
            x = call(x)
        # The result is the module's own, so its backward begins before those of the modules inside. A product saves its
        # factors, so a checkpoint recomputes the whole forward.
        x = x * x
        for parameter in dict.fromkeys(parameter for part in own for parameter in part._parameters.values()):
            if parameter is not None and parameter.requires_grad:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                x = x + (local * x).sum().to(x.dtype)
        return x

    return forward


def _own_parts(module: nn.Module, calls: Collection[nn.Module], inside: dict[nn.Module, None]) -> list[nn.Module]:
    """Returns a module and the parts of it that are in no other call. Adds the outermost other calls to ``inside``."""
    own = [module]
    for child in module.children():
        if child in calls:
            inside[child] = None
        else:
            own += _own_parts(child, calls, inside)
    return own


def wire_bytes(layout: UnitLayout, dtype: str, start: int = 0, stop: int | None = None) -> int:
    """Returns the bytes of a part of a flat vector on the wire."""
    stop = layout.size_bytes if stop is None else stop
    return stop - start if dtype == "float32" else stream_size(layout, layout.segments(start, stop), PUSH_NAMES[dtype])
