"""The parameter objects of a unit: where modules hold them, where their values are, and when they are usable.

The parameter objects that the user made stay in their modules permanently. Optimizers, tied modules, parameter hooks
and modules that cache their weights (``nn.LSTM``) therefore keep working. Freeing a unit releases the memory and
changes the class of its parameters to a subclass of ``FreedParameter``. Torch functions that need values raise for
that class instead of reading released memory. The shape, the gradient, hooks and other metadata still work.

Note: [Version counters]
    Autograd saves a tensor together with its version counter, and compares the counter when it reads the tensor. All
    views of a tensor share the counter, except ``Tensor.data``. While a unit is freed, the counter of each of its
    parameters is a number from ``FREED_VERSION`` on, so autograd raises instead of reading released memory. Gathering
    restores the counter, so tensors that were saved before are valid again. Older graphs must not read newer weights:
    when graphs become unusable, the next use of the unit sets the counters to the next multiple of ``_STRIDE``.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwell.module.mixed_precision import is_split, local_box, local_part, set_dtype
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import FreedParameterError, UsageError
from shardwell_wire.model.layout import Parameter, UnitLayout

OWNER_ATTRIBUTE = "_shardwell_owner"
"""Attribute of a sharded parameter that holds its ``ParameterOwner``."""

FIRST_VERSION, FREED_VERSION, _STRIDE = 1 << 20, 1 << 31, 1 << 4
"""torch stores counters in 32 bits. Counters of tensors that are not sharded stay below ``FIRST_VERSION``."""

_freed_versions = itertools.count(FREED_VERSION)
_set_versions = torch._C._autograd._unsafe_set_version_counter


@dataclass(frozen=True, slots=True)
class Site:
    """An attribute of a module that holds a parameter or buffer."""

    module: nn.Module
    name: str


def has_parts(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass that consists of several tensors, other than a ``DTensor``."""
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "placements")


def inner_tensors(whole: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields a name for each tensor inside a tensor subclass, and the object and the attribute that hold the tensor."""
    for name in whole.__tensor_flatten__()[0]:
        if has_parts(inner := getattr(whole, name)):
            yield from inner_tensors(inner, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", whole, name


class TensorParts(nn.Module):
    """The tensors inside a frozen parameter of a tensor subclass, such as a quantized weight, as parameters.

    Has the name of the parameter in its module: ``weight`` becomes ``weight.qdata`` and ``weight.scale``. The parameter
    itself is an attribute of the module. Its inner tensors are the parameters here, which are gathered and freed.
    """

    whole: nn.Parameter

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.sites: list[Site] = []
        vars(self)["whole"] = whole  # not a parameter of this module
        for part, holder, name in inner_tensors(whole):
            self._parameters[part] = nn.Parameter(getattr(holder, name), requires_grad=False)
            setattr(holder, name, self._parameters[part])

    def merge(self) -> None:
        """Gives the modules an ordinary parameter again."""
        for site in self.sites:
            del site.module._modules[site.name], vars(site.module)[site.name]
            site.module._parameters[site.name] = self.whole
        for _, holder, name in inner_tensors(self.whole):
            setattr(holder, name, getattr(holder, name).data)


@contextmanager
def divided(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> Iterator[list[TensorParts]]:
    """Replaces frozen parameters that consist of several tensors by ``TensorParts``, unless the block raises."""
    found: dict[int, TensorParts] = {}
    ignored_ids = {id(parameter) for parameter in ignored}
    try:
        for part in {part: None for module in modules for part in module.modules()}:
            for name, each in part._parameters.items():
                if each is None or id(each) in ignored_ids or each.requires_grad or each.is_meta or is_sharded(each):
                    continue
                if has_parts(each):
                    if id(each) not in found:
                        found[id(each)] = TensorParts(each)
                    found[id(each)].sites.append(Site(part, name))
                    part._parameters[name], part._modules[name], vars(part)[name] = None, found[id(each)], each
        yield [*found.values()]
    except BaseException:
        for parts in found.values():
            parts.merge()
        raise


@dataclass(slots=True)
class FoundParameter:
    """A parameter with all its names and all sites that hold it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def describe(self) -> Parameter:
        """Returns the layout entry, for a ``DTensor`` the entry of its local part."""
        dtype = str(self.parameter.dtype).removeprefix("torch.")
        name, shape, aliases = self.names[0], tuple(local_part(self.parameter).shape), tuple(self.names[1:])
        frozen, whole, offsets = not self.parameter.requires_grad, tuple[int, ...](), tuple[int, ...]()
        if is_split(self.parameter):
            whole, offsets = tuple(self.parameter.shape), local_box(self.parameter).offsets
        exact = isinstance(self.sites[0].module, TensorParts)
        return Parameter(name, shape, dtype, aliases, whole, offsets, frozen, exact=exact)


class UnitParameters:
    """The parameters of one unit. The objects stay in their modules, whether the unit is gathered or freed.

    Args:
        layout: Their names.
        found: The parameters, in layout order.
    """

    def __init__(self, layout: UnitLayout, found: Sequence[FoundParameter]) -> None:
        self.layout = layout
        parameters = [entry.parameter for entry in found]
        # A unit stores the local part of a DTensor, so sharding and tensor parallelism are independent.
        self._locals = [local_part(parameter) for parameter in parameters]
        self._classes = [(parameter, type(parameter), freed_class(type(parameter))) for parameter in parameters]
        self._holders = [
            (site.module._parameters, site.name, entry.parameter, index)
            for index, entry in enumerate(found)
            for site in entry.sites
        ]
        holders = enumerate(entry.sites[0].module for entry in found)
        self.divided = {part: index for index, part in holders if isinstance(part, TensorParts)}
        """The parameters that consist of parameters of this unit, with the index of one of these."""
        for parts, index in self.divided.items():
            self._classes.append((parts.whole, type(parts.whole), freed_class(type(parts.whole))))
            self._holders += [(vars(site.module), site.name, parts.whole, index) for site in parts.sites]
        self._addresses: list[int] = []
        """Address of each parameter since its counter is valid."""
        self._tensors = tuple({id(tensor): tensor for tensor in [*parameters, *self._locals]}.values())
        """All tensors that have a version counter of their own. See Note: [Version counters]."""
        self._freed_versions = tuple(next(_freed_versions) for _ in self._tensors)
        self._valid_versions = (FIRST_VERSION,) * len(self._tensors)
        self._are_valid = False
        """True if the tensors have the counters that current graphs have saved, or higher ones after a write."""
        self._is_watched = False
        self._sums_at_read: dict[int, int] = {}
        """Checksums of the parameters whose ``data`` was read since ``allow``: its writes change no fingerprint."""

    def place_all(self, places: Sequence[torch.Tensor]) -> None:
        """Makes all parameters use the memory of the given tensors, in layout order."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, place in enumerate(places):
                self.place(index, place)

    def place(self, index: int, place: torch.Tensor) -> None:
        """Makes one parameter use the memory of a tensor."""
        self._locals[index].data = place
        set_dtype(self._classes[index][0], place.dtype)

    def detach(self, values: Sequence[torch.Tensor]) -> None:
        """Makes all parameters ordinary ones with the given values. Existing graphs become unusable."""
        self._are_valid = False
        _set_versions(self._tensors, (0,) * len(self._tensors))
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
            delattr(parameter, OWNER_ATTRIBUTE)
        self.place_all(values)

    def copy_to(self, places: Sequence[torch.Tensor], *, skip: Collection[int]) -> None:
        """Copies the values of all parameters, except those with an index in ``skip``, to the given tensors."""
        with torch.no_grad():
            for index, (place, local) in enumerate(zip(places, self._locals, strict=True)):
                if index not in skip:
                    place.copy_(local)

    def mark_freed(self) -> None:
        """Makes autograd raise if it reads the values, which are about to be released."""
        _set_versions(self._tensors, self._freed_versions)
        self._are_valid = False

    def forget_graphs(self) -> None:
        """Makes tensors that existing graphs saved unusable from the next ``allow`` on."""
        self._valid_versions = (self._valid_versions[0] + _STRIDE,) * len(self._tensors)
        self._are_valid = False

    def allow(self) -> None:
        """Makes the parameters usable, also by autograd. ``written`` reports writes from now on, or since ``forbid``.

        Raises:
            UsageError: See ``check_holders``. The forward would silently use another parameter.
        """
        for attributes, name, held, _ in self._holders:
            if attributes.get(name) is not held:
                self.check_holders()
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
        if not self._are_valid:
            _set_versions(self._tensors, self._valid_versions)
            self._are_valid = True
            self._addresses.clear()
            for local in self._locals:
                self._addresses.append(local.data_ptr())

    def note_data_read(self, index: int) -> None:
        """Makes ``written`` compare a parameter's values with the present ones, until ``forbid``."""
        if index not in self._sums_at_read:
            self._sums_at_read[index] = _checksum(self._locals[index])

    def forbid(self) -> None:
        """Makes every use of the parameters' values raise."""
        self._is_watched = False
        self._sums_at_read.clear()
        for parameter, _, freed in self._classes:
            parameter.__class__ = freed

    def watch(self) -> None:
        """Makes ``.grad`` of usable parameters warn, until ``end_watch`` or ``forbid``."""
        self._is_watched, watched = True, watched_parameter()
        for parameter, original, _ in self._classes:
            if original is nn.Parameter:
                parameter.__class__ = watched

    def end_watch(self) -> None:
        """Ends ``watch``."""
        if self._is_watched:
            self._is_watched = False
            for parameter, original, _ in self._classes:
                parameter.__class__ = original

    def written(self) -> list[int]:
        """Returns the indices of the parameters that were written in place or given other data since ``allow``."""
        changed, version, sums = [], self._valid_versions[0], self._sums_at_read
        for index, local in enumerate(self._locals):
            if (
                local._version != version
                or local.data_ptr() != self._addresses[index]
                or (index in sums and sums[index] != _checksum(local))
            ):
                changed.append(index)
        return changed

    def check_holders(self) -> None:
        """Raises UsageError if a module holds another parameter than the one that was sharded."""
        for attributes, name, held, index in self._holders:
            if attributes.get(name) is not held:
                unit, parameter = self.layout.unit, self.layout.parameters[index].shown_name
                raise UsageError(
                    f"parameter {parameter!r} of unit {unit!r} was replaced or removed after fully_shard (by an "
                    "assignment, load_state_dict(assign=True) or functional_call), but the shard servers still have "
                    "the old values: change parameters before fully_shard",
                    unit=unit,
                    parameter=parameter,
                )


def _checksum(values: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        on_cpu = values.detach().cpu()
        return zlib.crc32(memory_at(on_cpu.data_ptr(), on_cpu.nbytes, on_cpu))


_READABLE = (
    *("shape", "ndim", "nbytes", "itemsize", "names", "dtype", "device", "layout", "output_nr", "_version"),
    *("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_meta", "is_cpu", "is_cuda", "is_mkldnn"),
    *("is_mps", "is_xpu", "is_mtia"),
)
_WRITABLE = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "stride", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "dim_order"),
    *("is_conj", "is_neg", "is_shared", "is_pinned", "is_distributed", "is_same_size", "is_set_to", "type", "__dir__"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
)
_FUNCTIONS = (
    *("numel", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_same_size", "get_device"),
    *("is_conj", "is_neg", "is_distributed", "result_type", "equal"),
)
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")

_GRAD: Any = torch.Tensor.grad
_GET_GRAD, _SET_GRAD, _DELETE_GRAD = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_COMPARED = (torch.Tensor.__eq__, torch.Tensor.__ne__)
_GRAD_ACCESS = frozenset([_GET_GRAD, _SET_GRAD, _DELETE_GRAD])

_NEEDS_NO_VALUES: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _READABLE if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in _WRITABLE]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [getattr(torch, name) for name in (*_FUNCTIONS, *_LIKE) if hasattr(torch, name)]
    + [torch.Tensor.equal, *_COMPARED, _DELETE_GRAD, torch.autograd.grad, torch.autograd.backward]
)
"""Torch functions that a freed parameter allows, because they neither read nor write values."""

_DEPENDS_ON_DTYPE: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("dtype", "nbytes", "itemsize")]
    + [getattr(torch.Tensor, name) for name in ("element_size", "type")]
    + [getattr(torch.Tensor, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full")]
    + [getattr(torch, name) for name in ("result_type", *_LIKE)]
)
"""Functions that use the dtype. A freed parameter has the dtype of the servers, also under mixed precision."""

_EQUAL = (torch.equal, torch.Tensor.equal)

_NEEDS_VALUES_SOMETIMES: dict[Callable[..., Any], Callable[..., bool]] = {
    torch.Tensor.type: lambda parameter, *dtype, **options: bool(dtype or options),
    **dict.fromkeys(_EQUAL, lambda one, other: one is not other),
    **dict.fromkeys(_COMPARED, lambda one, other: other is not None),
}
"""For functions that need values for some arguments only: whether they do."""

_CLIP_FILE, _SCALER_FILE = clip_grad.__file__, grad_scaler.__file__
_BACKWARD_FILE = "torch/distributed/pipelining/_backward.py"
"""Torch's schedules that split the backward. They set ``.grad`` themselves; the stage pushes it after the schedule."""
_PEFT_NAMES_FILE = "peft/utils/other.py"
_PACKAGE = str(Path(__file__).parents[1])

USE_SHARDED_SCALER = (
    "torch.amp.GradScaler cannot check gradients that are on the shard servers: use shardwell.amp.GradScaler"
)

_WHERE_VALUES_ARE = (
    "Values are available during forwards of modules that contain the parameter, in methods that "
    "shardwell.register_forward_method(module, name) has made forwards, and between module.unshard() and "
    "module.reshard(); shardwell.full_state_dict(model) returns all of them. If the forward of a module that does not "
    "contain the parameter reads it, give both modules to one fully_shard call"
)

_MAX_FRAMES = 60
"""Limit of the search for a caller. Torch's own frames above an error are fewer."""

_ADVICE = {
    "torch/nn/parallel/distributed.py": "do not wrap a sharded module in DistributedDataParallel: the servers take the "
    "mean of the trainers' gradients. For one replica per trainer use strategy=ShardingStrategy.NO_SHARD",
    "torch/distributed/fsdp/": "do not wrap a sharded module with torch's FSDP: shardwell.fully_shard replaces it",
    "torch/nn/init.py": "initialise before fully_shard, or pass an init function as fully_shard(..., source=function)",
    "torch/nn/utils/parametrizations.py": "parametrise modules before fully_shard",
    "torch/nn/utils/prune.py": "prune before fully_shard",
    "torch/export/": "export a plain model that was loaded from shardwell.full_state_dict(model)",
    "transformers/models/rwkv/": "RWKV divides its weights in place when it is evaluated: set "
    "model.config.rescale_every = 0 (the division only keeps float16 from overflowing)",
    "torch/optim/swa_utils.py": "set optimizer.ema_decay: the servers keep the average",
}
"""What to do instead, by a part of the path of the calling file."""


class ParameterOwner(Protocol):
    """The parameter's unit: the part that a freed parameter uses."""

    @property
    def name(self) -> str:
        """The parameter's name for messages."""
        ...

    @property
    def unit_name(self) -> str:
        """The unit's name."""
        ...

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the parameter on the servers."""
        ...

    @property
    def is_pushed(self) -> bool:
        """True if a gradient of the unit was pushed and not committed yet."""
        ...

    @property
    def hidden_gradient(self) -> str:
        """Where the gradient is if ``.grad`` does not show it. Empty: ``.grad`` shows it, or there is no gradient."""
        ...

    def note_gradient_read(self) -> bool:
        """Records that the script reads a hidden gradient. Returns True the first time for the model."""
        ...

    def gather_for_reader(self, frame: FrameType | None) -> bool:
        """Gathers the unit for the running forward that reads the freed parameter in a frame, if there is one."""
        ...


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if a tensor is a parameter of a unit, freed or not."""
    return hasattr(tensor, OWNER_ATTRIBUTE)


class FreedParameter(torch.Tensor):
    """A parameter whose values are on the servers only."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        needs = _NEEDS_VALUES_SOMETIMES.get(func)
        if func not in _NEEDS_NO_VALUES or (needs is not None and needs(*args, **(kwargs or {}))):
            found = _first_freed([*args, *(kwargs or {}).values()])
            if found is not None and not _writes(func) and _owner(found).gather_for_reader(sys._getframe(1)):
                return func(*args, **(kwargs or {}))  # the parameter has its ordinary class now
            if func is torch.Tensor.detach and is_called_from(_PEFT_NAMES_FILE):
                return found  # PEFT takes only the names from the state dict of a module
            _raise_freed(func, found)
        if func in _GRAD_ACCESS:
            # torch calls this method from C, so the frame above is the code that uses the parameter.
            _check_grad_access(args[0], writes=func != _GET_GRAD, frame=sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            # Under mixed precision the placed tensor has the compute dtype, also while freed.
            if func in _DEPENDS_ON_DTYPE:
                args = tuple(_with_stored_dtype(each) if isinstance(each, FreedParameter) else each for each in args)
            return True if func in _EQUAL else func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        owner = _owner(self)
        shape = tuple(self.shape)
        return f"FreedParameter({owner.name!r}, shape={shape}, dtype={self.dtype}, unit={owner.unit_name!r})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def full_tensor(self) -> NoReturn:
        """Always raises. In FSDP2, this method returns the values."""
        _raise_freed(FreedParameter.full_tensor, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _raise_freed(FreedParameter.__deepcopy__, self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _raise_freed(FreedParameter.__reduce_ex__, self)


@functools.cache
def freed_class(original: type[nn.Parameter]) -> type[nn.Parameter]:
    """Returns the class that parameters of a class have while freed."""
    return type(f"Freed{original.__name__}", (FreedParameter, original), {"__module__": __name__})


def _read_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    _check_script_access(parameter, writes=False)
    gradient: torch.Tensor | None = _GET_GRAD(parameter)
    return gradient


def _write_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _check_script_access(parameter, writes=True)
    _SET_GRAD(parameter, gradient)


def _delete_grad(parameter: torch.Tensor) -> None:
    _check_script_access(parameter, writes=True)
    _DELETE_GRAD(parameter)


def _check_script_access(parameter: torch.Tensor, *, writes: bool) -> None:
    """Calls ``_check_grad_access`` unless Shardwell itself uses the gradient."""
    frame = sys._getframe(2)
    if is_sharded(parameter) and not frame.f_code.co_filename.startswith(_PACKAGE):
        _check_grad_access(parameter, writes=writes, frame=frame)


@functools.cache
def watched_parameter() -> type[nn.Parameter]:
    """Returns the class that gathered parameters have while ``.grad`` does not show their gradient."""
    members = {"__module__": __name__, "grad": property(_read_grad, _write_grad, _delete_grad)}
    return type(nn.Parameter.__name__, (nn.Parameter,), members)


def _owner(parameter: torch.Tensor) -> ParameterOwner:
    owner: ParameterOwner = getattr(parameter, OWNER_ATTRIBUTE)
    return owner


def _with_stored_dtype(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the parameter's shape and the dtype of the servers."""
    dtype = _owner(parameter).stored_dtype
    if parameter.dtype == dtype or has_parts(parameter):
        return parameter
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def _raise_freed(func: Callable[..., Any], parameter: torch.Tensor | None) -> NoReturn:
    name, unit = ("?", "?") if parameter is None else (_owner(parameter).name, _owner(parameter).unit_name)
    function = str(getattr(func, "__name__", func))
    if function in ("__get__", "__set__"):
        function = f"Tensor.{getattr(func.__self__, '__name__', 'attribute')}"  # type: ignore[attr-defined]
    initial = "; set initial values before fully_shard, or with its source=" if _writes(func) else ""
    raise FreedParameterError(
        f"{function} needs the values of parameter {name!r}, but its unit {unit!r} is freed. "
        + (f"Do this instead: {advice}" if (advice := _advice()) else f"{_WHERE_VALUES_ARE}{initial}"),
        unit=unit,
        parameter=name,
    )


def _first_freed(values: Sequence[Any]) -> FreedParameter | None:
    for value in values:
        if isinstance(value, FreedParameter):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_freed(value)) is not None:
            return found
    return None


def _writes(func: Callable[..., Any]) -> bool:
    name = str(getattr(func, "__name__", ""))
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _check_grad_access(parameter: torch.Tensor, *, writes: bool, frame: FrameType) -> None:
    """Raises for code that would mistake the local gradients for all gradients."""
    owner, caller = _owner(parameter), frame.f_code
    if caller.co_filename.endswith(_BACKWARD_FILE):
        return
    if caller.co_filename == _CLIP_FILE:
        refuse_clipping(owner)
    if caller.co_filename == _SCALER_FILE:
        raise UsageError(USE_SHARDED_SCALER, parameter=owner.name)
    if not writes and caller.co_name != "zero_grad" and (place := owner.hidden_gradient) and owner.note_gradient_read():
        _warn_of_hidden_gradient(owner, place, frame)
    if owner.is_pushed and (writes or caller.co_name == "zero_grad"):
        raise UsageError(
            f"the gradient of {owner.name!r} was already pushed to the shard servers in this step, so setting .grad "
            "would not change it: call optimizer.zero_grad() to drop the step's gradients, or use "
            "module.set_requires_gradient_sync(False) to keep gradients in this process until the end of the step",
            parameter=owner.name,
        )


def _warn_of_hidden_gradient(owner: ParameterOwner, place: str, frame: FrameType) -> None:
    # Without a registry: Python would suppress the warning for a second model that the same line of code trains.
    warnings.warn_explicit(
        f"the .grad of parameter {owner.name!r} is None because its gradient {place}, so code that scales, masks or "
        "reads gradients between the backward and optimizer.step() has no effect on this model. "
        "optimizer.clip_grad_norm_ clips by the norm over all gradients and returns it; to change a gradient use "
        "parameter.register_hook or register_post_accumulate_grad_hook; set_requires_gradient_sync(False) keeps "
        "gradients in .grad until optimizer.step(), with mixed precision if the policy has "
        "keep_low_precision_grads=True",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


_FRAMEWORKS = {
    "transformers/trainer.py": (
        "Hugging Face's Trainer",
        "shardwell.integrations.transformers.Trainer and TrainingArguments of the same module",
    ),
    "lightning/pytorch/": (
        "Lightning",
        "Trainer(strategy=shardwell.integrations.lightning.ShardwellStrategy(session))",
    ),
}
"""What asks torch to clip, and what to use instead, by a part of the path of the code."""


def refuse_clipping(owner: ParameterOwner) -> NoReturn:
    """Raises because ``torch.nn.utils`` is asked to clip a sharded parameter's gradient."""
    for path, advice in _FRAMEWORKS.items():
        if is_called_from(path):
            raise UsageError(
                f"{advice[0]} asks torch for the gradients, but that of {owner.name!r} is pushed to the shard servers. "
                f"It would also give each trainer the same batches. Use {advice[1]}, see docs/frameworks.md",
                parameter=owner.name,
            )
    raise UsageError(
        f"torch.nn.utils.clip_grad reads only gradients in this process, but the gradient of {owner.name!r} is pushed "
        "to the shard servers: call optimizer.clip_grad_norm_(max_norm), which clips by the norm over all gradients, "
        "or optimizer.clip_grad_value_(clip_value)",
        parameter=owner.name,
    )


def is_called_from(path: str) -> bool:
    """True if a file with this text in its path is among the callers."""
    return any(path in frame.f_code.co_filename for frame in _callers(sys._getframe(1)))


def _advice() -> str | None:
    """Returns what to do instead, for the nearest caller in ``_ADVICE``."""
    for frame in _callers(sys._getframe(1)):
        for path, text in _ADVICE.items():
            if path in frame.f_code.co_filename:
                return text
    return None


def _callers(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found
