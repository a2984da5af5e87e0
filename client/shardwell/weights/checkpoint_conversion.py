"""Converts checkpoints of runs to ``torch.distributed.checkpoint`` and back, with optimizer state.

The other side has the layout of ``torch.distributed.checkpoint.state_dict.get_state_dict``, saved as
``{"model": model_state, "optim": optimizer_state}``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwell.weights.checkpoint_reader import CheckpointReader
from shardwell.weights.dcp import DcpReader, EntryPath, write_dcp
from shardwell.weights.weight_files import listed, memory_of
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import VALUES, CheckpointFileWriter, FilePlan, FileRecord, Part, Piece, PieceKind
from shardwell_wire.checkpoints.manifest import RESIDUAL_RANKS, Manifest, message_from_dict, message_to_dict
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import Parameter
from shardwell_wire.model.optimizers import NO_GROUP, OPTIMIZERS, StateShape, StateTensor
from shardwell_wire.v1 import common_pb2, coordinator_pb2

_CLASSES = {
    name.lower(): each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
}
"""torch's optimizers by the names of ``OPTIMIZERS``."""
_FUSED = ("adam", "adamw", "sgd")
"""Optimizers for which shard servers use torch's fused kernels."""


def find_algorithm(groups: Iterable[Mapping[str, Any]], state_names: Collection[str]) -> str:
    """Returns the optimizer that has these parameter groups and state.

    Args:
        groups: Parameter groups of a torch optimizer.

    Raises:
        UsageError: None or several fit.
    """
    groups = list(groups)
    found = [name for name, each in _CLASSES.items() if name in OPTIMIZERS and _fits(name, each, groups, state_names)]
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in groups}
    if {"adam", "adamw"} <= set(found) and len(decoupled) == 1:
        found.remove("adam" if decoupled == {True} else "adamw")
    if len(found) != 1:
        fitting = " and ".join(sorted(found)) or "none"
        raise UsageError(
            f"which optimizer wrote the state {sorted(state_names)}? {fitting} of the known ones fit: name it "
            "(optimizer=, --optimizer)"
        )
    return found[0]


def _fits(
    name: str, optimizer: type[torch.optim.Optimizer], groups: list[Mapping[str, Any]], state_names: Collection[str]
) -> bool:
    spec = OPTIMIZERS[name]
    known = set(torch_group(name, {}, optimizer=optimizer))
    written = {key for group in groups for key in group} - {"params", "initial_lr"}
    return written <= known and set(state_names) <= {tensor.name for tensor in spec.state} and bool(written)


def hyperparameters(algorithm: str, group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a parameter group, as in ``ParameterGroup.hyperparameters``.

    Raises:
        UsageError: A number is missing.
    """
    settings = {**torch_group(algorithm, {}), **group}
    if algorithm == "muon":
        settings["match_rms_adamw"] = settings.get("adjust_lr_fn") == "match_rms_adamw"
    if algorithm == "adafactor":
        eps1, eps2 = settings["eps"]
        settings["eps"] = (torch.finfo(torch.float32).eps if eps1 is None else eps1, eps2)
    numbers = {}
    for each in OPTIMIZERS[algorithm].hyperparameters:
        value = each.value_in(settings)
        if value is None:
            raise UsageError(f"the parameter group has no {each.label!r}, which {algorithm!r} needs")
        numbers[each.name] = float(value)
    return numbers


def torch_group(
    algorithm: str, numbers: Mapping[str, float], *, optimizer: type[torch.optim.Optimizer] | None = None
) -> dict[str, Any]:
    """Returns a parameter group with all settings of torch's optimizer, without ``params``.

    Args:
        numbers: As in ``ParameterGroup.hyperparameters``. Settings that are not named get torch's defaults.
        optimizer: torch's class. Default: the class of this name, if torch has one.
    """
    optimizer = _CLASSES.get(algorithm) if optimizer is None else optimizer
    settings: dict[str, Any] = {}
    if optimizer is not None:
        more: dict[str, Any] = {"lr": 1e-3} if algorithm == "sgd" else {}
        settings = dict(optimizer([torch.zeros(1, 1)], **more).param_groups[0])
        del settings["params"]
        if "fused" in settings:  # as on the shard servers: the bits of fused kernels differ from those of the others
            settings["fused"] = algorithm in _FUSED
    tuples: dict[str, dict[int, float]] = {}
    for each in OPTIMIZERS[algorithm].hyperparameters:
        if each.name in numbers:
            value: Any = numbers[each.name]
            value = bool(value) if each.is_flag else int(value) if each.is_integer else value
            if each.argument:
                tuples.setdefault(each.argument, {})[each.index] = value
            elif each.name == "match_rms_adamw":
                settings["adjust_lr_fn"] = "match_rms_adamw" if value else settings.get("adjust_lr_fn")
            else:
                settings[each.name] = value
    return settings | {argument: tuple(items[index] for index in sorted(items)) for argument, items in tuples.items()}


NoteBytes = Callable[[int], None]
"""Called with the number of bytes that were converted."""

_OPTIMIZER_KEYS = ("optim", "optimizer")
_SERVER_ID = "converted"


def _nothing(_: int) -> None:
    pass


# ---- to torch ----


def checkpoint_to_dcp(checkpoint: CheckpointReader, folder: str | Path, *, note: NoteBytes = _nothing) -> None:
    """Writes a checkpoint of a run as a ``torch.distributed.checkpoint``. Holds one tensor at a time.

    Load it with ``torch.distributed.checkpoint.load`` into ``{"model": ..., "optim": ...}`` of
    ``get_state_dict(model, optimizer)``, then pass both to ``set_state_dict``.

    Args:
        checkpoint: The checkpoint.
        folder: Destination. Created if it does not exist.
        note: Called for each tensor.

    Raises:
        UsageError: The run's optimizer runs on the trainers, or several optimizers alternate.
        CorruptDataError: The checkpoint is damaged.
        OSError: The folder cannot be written. It is unchanged.
    """
    names = {
        name: parameter
        for unit in checkpoint.manifest.units
        for parameter in unit.parameters
        for name in checkpoint.names.get(parameter.name, ())
    }
    model = {
        name: torch.empty(parameter.box.whole, dtype=getattr(torch, parameter.dtype), device="meta")
        for name, parameter in names.items()
    }
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name in checkpoint.parameters:
        if found := checkpoint.optimizer_tensors(name):
            states[name] = found
    state = {"model": model, "optim": {"state": states, "param_groups": _torch_groups(checkpoint)}}

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in names.items():
            yield f"model.{name}", _noted(checkpoint.read(checkpoint.names[parameter.name][0]), note)
        for name, tensors in states.items():
            for each in tensors:
                yield f"optim.state.{name}.{each}", _noted(checkpoint.read(name, each), note)

    write_dcp(Path(folder), state, values())


def _noted(value: torch.Tensor, note: NoteBytes) -> torch.Tensor:
    note(value.nbytes)
    return value


def _torch_groups(checkpoint: CheckpointReader) -> list[dict[str, Any]]:
    commits = checkpoint.manifest.commits
    if not commits:
        return []
    optimizer = message_from_dict(commits[-1]["optimizer"], common_pb2.OptimizerStep())
    groups = []
    for group in optimizer.groups:
        algorithm = group.algorithm or optimizer.algorithm
        if algorithm not in OPTIMIZERS:
            raise UsageError(
                f"the optimizer of run {checkpoint.run!r} is {algorithm!r}, which runs on the trainers: its state "
                "cannot be converted"
            )
        groups.append({**torch_group(algorithm, group.hyperparameters), "params": list[str]()})
    layouts = checkpoint.manifest.units
    for unit in optimizer.units:
        for parameter, index in zip(layouts[unit.unit_index].parameters, unit.group_indices, strict=True):
            name = checkpoint.names[parameter.name][0]
            if index >= 0 and name not in groups[index]["params"]:  # another part may have come before
                groups[index]["params"].append(name)
    return groups


# ---- from torch ----


def dcp_to_checkpoint(
    source: str | Path,
    folder: str | Path,
    *,
    like: CheckpointReader,
    run: str | None = None,
    step: int | None = None,
    optimizer: str | None = None,
    note: NoteBytes = _nothing,
) -> str:
    """Writes a ``torch.distributed.checkpoint`` as a checkpoint of a run. Holds one tensor at a time.

    Args:
        source: Folder of the torch checkpoint.
        folder: Path or URL of the folder of checkpoints, as in ``join(checkpoint_dir=)``.
        like: A checkpoint of a run with the same model, at any step. Units, world and seed are taken from it.
        run: Name of the run. Default: that of ``like``.
        step: Number of committed steps. Default: the largest ``step`` in the optimizer's state.
        optimizer: Name of the optimizer, such as ``adamw``. Default: the one whose settings and state fit.
        note: Called for each tensor.

    Returns:
        Path or URL of the new checkpoint, for ``join(resume=)``.

    Raises:
        UsageError: The two models differ, or the step or the optimizer is not known.
        NotFoundError: ``source`` is no torch checkpoint, or a file is missing.
        CorruptDataError: ``source`` is damaged.
        ShardwellError: The folder cannot be written.
    """
    found = _TorchCheckpoint(DcpReader(source), like)
    algorithm = optimizer
    if algorithm is None and (found.states or found.groups):
        algorithm = find_algorithm(found.groups, {name for state in found.states.values() for name in state})
    if algorithm is not None and algorithm not in OPTIMIZERS:
        raise UsageError(f"optimizer {algorithm!r}: expected one of {', '.join(OPTIMIZERS)}")
    step = found.newest_step() if step is None else step
    if step and algorithm is None:
        raise UsageError(
            f"{source} has no optimizer, but step is {step}: name the optimizer (optimizer=, --optimizer), "
            "or pass step 0"
        )
    run_id, runs = uuid.uuid4().hex, RunFolder.of(folder, like.run if run is None else run)
    tensors = dict(found.pieces(algorithm))
    parts = [found.part(parameter, algorithm, step) for parameter in found.parameters]
    plan = FilePlan([*tensors], parts, run_id=run_id, step=step)
    commits = () if step == 0 or algorithm is None else (found.commit(algorithm, step),)
    kept = {key: value for key, value in like.manifest.extra.items() if key != RESIDUAL_RANKS}
    name = runs.begin(step, uuid.uuid4().hex[:8])
    url = runs.url_of(name)
    try:
        manifest = Manifest(
            run=runs.run,
            run_id=run_id,
            checkpoint_id=name.rpartition("-")[2],
            step=step,
            created=time.time(),
            world=like.manifest.world,
            seed=like.manifest.seed,
            units=like.manifest.units,
            files=(_write(url, plan, tensors, note),),
            commits=commits,
            run_state=_run_state(like, step),
            extra={**kept, "converted_from": "torch.distributed.checkpoint"},
        )
        runs.publish(name, manifest)
    except BaseException:  # also Ctrl-C
        runs.delete(name)
        raise
    return url


class _TorchCheckpoint:
    """A torch checkpoint by the names of a run's model.

    Attributes:
        states: Paths of optimizer state by parameter and name.
        groups: Parameter groups. ``params`` has names.
        parameters: The parameters and parts of all units, without parts that have no elements.

    Raises:
        UsageError: They have different models.
    """

    def __init__(self, reader: DcpReader, like: CheckpointReader) -> None:
        self._reader, self._like = reader, like
        self._model: dict[str, EntryPath] = {}
        self.states: dict[str, dict[str, EntryPath]] = {}
        self.groups: list[dict[str, Any]] = []
        units = like.manifest.units
        self.parameters = [each for unit in units for each in unit.parameters if each.numel or not each.is_part]
        if any(each.is_reshaped for each in self.parameters):
            raise UsageError(
                f"{like.url} is of a run whose buffers took their shape in its first step: torch checkpoints cannot be "
                "converted for it. Run one forward of the model before the optimizer is made"
            )
        self._find_entries()
        self._require_same_model()

    def _find_entries(self) -> None:
        reader = self._reader
        top = {str(path[0]) for path in (*reader.tensors, *reader.values)}
        key = next((key for key in _OPTIMIZER_KEYS if key in top), None)
        settings: dict[str, dict[str, Any]] = {}
        for path in (*reader.tensors, *reader.values):
            if path[0] != key:
                names = path[1:] if "model" in top and path[0] == "model" else path
                self._model[".".join(map(str, names))] = path
                continue
            # Nested as by default, or flattened: "state.NAME.exp_avg", "param_groups.NAME.lr".
            kind, _, rest = ".".join(map(str, path[1:])).partition(".")
            owner, _, name = rest.rpartition(".")
            if kind == "state":
                self.states.setdefault(owner, {})[name] = path
            elif kind == "param_groups" and path in reader.values:
                settings.setdefault(owner, {})[name] = reader.value(path)
        for owner, group in settings.items():
            if "params" in group:
                self.groups.append(group)
                continue
            equal = [each for each in self.groups if {**each, "params": None} == {**group, "params": None}]
            if equal:
                equal[0]["params"].append(owner)
            else:
                self.groups.append({**group, "params": [owner]})

    def _require_same_model(self) -> None:
        problems = []
        for parameter in self.parameters:
            path = self._path_of(parameter)
            described = self._reader.tensors.get(path) if path is not None else None
            dtype = getattr(torch, parameter.dtype)
            if described is None:
                problems.append(f"{self._name(parameter)!r} is missing")
            elif (described.shape, described.dtype) != (parameter.box.whole, dtype):
                problems.append(
                    f"{self._name(parameter)!r} is {described.dtype} {described.shape}, expected {dtype} "
                    f"{parameter.box.whole}"
                )
        if problems:
            raise UsageError(
                f"{self._reader.folder} has another model than {self._like.url}: {listed(problems, 5)}. Train one "
                "step of the same model with Shardwell, save a checkpoint, and pass that one"
            )

    def _path_of(self, parameter: Parameter) -> EntryPath | None:
        names = self._like.names[parameter.name]
        return next((self._model[name] for name in names if name in self._model), None)

    def _name(self, parameter: Parameter) -> str:
        return self._like.names[parameter.name][0]

    def newest_step(self) -> int:
        """Returns the largest number of updates in the optimizer's state."""
        steps = [self._number(state["step"]) for state in self.states.values() if "step" in state]
        if not steps:
            raise UsageError(
                f"the optimizer in {self._reader.folder} does not count steps: name the step (step=, --step)"
            )
        return int(max(steps))

    def _number(self, path: EntryPath) -> float:
        return float(self._reader.tensor(path) if path in self._reader.tensors else self._reader.value(path))

    def pieces(self, algorithm: str | None) -> Iterator[tuple[Piece, Callable[[], torch.Tensor]]]:
        """Yields the pieces of the new file, with functions that read them."""
        known = {tensor.name: tensor for tensor in OPTIMIZERS[algorithm].state} if algorithm is not None else {}
        for parameter in self.parameters:
            path = self._path_of(parameter)
            assert path is not None
            numel = parameter.numel
            yield (
                Piece(parameter.key, VALUES, 0, numel, parameter.dtype, (numel,)),
                lambda path=path, parameter=parameter: self._reader.tensor(path)[parameter.box.slices],  # type: ignore[misc]
            )
            for name, entry in self.states.get(self._name(parameter), {}).items():
                if name not in known:
                    raise UsageError(
                        f"{algorithm!r} has no state {name!r}, which {self._reader.folder} has of "
                        f"{self._name(parameter)!r}"
                    )
                yield self._state_piece(parameter, known[name], entry)

    def _state_piece(
        self, parameter: Parameter, spec: StateTensor, path: EntryPath
    ) -> tuple[Piece, Callable[[], torch.Tensor]]:
        if spec.shape is StateShape.SCALAR:
            piece = Piece(parameter.key, spec.name, 0, parameter.numel, "float32", (), "whole")
            return piece, lambda: torch.tensor(self._number(path), dtype=torch.float32)
        described = self._reader.tensors[path]
        dtype = str(described.dtype).removeprefix("torch.")
        is_elements = spec.shape in (StateShape.PARAMETER, StateShape.VECTOR)
        if dtype != parameter.dtype or (is_elements and described.shape != parameter.box.whole):
            raise UsageError(
                f"{spec.name!r} of {self._name(parameter)!r} is {described.dtype} {described.shape}, expected "
                f"{parameter.dtype} {parameter.box.whole}"
            )
        if parameter.is_part and not is_elements:
            raise UsageError(
                f"{spec.name!r} of {self._name(parameter)!r} has shape {described.shape} and cannot be divided among "
                "the tensor-parallel ranks of the run: convert it for a run with tp=1"
            )
        shape = (parameter.numel,) if is_elements else described.shape
        kind: PieceKind = "elements" if is_elements else "whole"
        piece = Piece(parameter.key, spec.name, 0, parameter.numel, dtype, shape, kind)
        box = parameter.box.slices if is_elements else ...
        return piece, lambda: self._reader.tensor(path)[box]

    def part(self, parameter: Parameter, algorithm: str | None, step: int) -> Part:
        """Returns what the new file says about a parameter's updates."""
        key, numel, state = parameter.key, parameter.numel, self.states.get(self._name(parameter), {})
        if not state or algorithm is None:
            return Part(key, 0, numel)
        return Part(key, 0, numel, algorithm, int(self._number(state["step"])) if "step" in state else step)

    def commit(self, algorithm: str, step: int) -> dict[str, Any]:
        """Returns the record of the last commit."""
        group_of = {name: number for number, group in enumerate(self.groups) for name in group["params"]}
        groups = [
            common_pb2.ParameterGroup(hyperparameters=hyperparameters(algorithm, group), algorithm=algorithm)
            for group in self.groups
        ]
        units = [
            common_pb2.UnitGroups(
                unit_index=index,
                group_indices=[group_of.get(self._name(parameter), NO_GROUP) for parameter in unit.parameters],
            )
            for index, unit in enumerate(self._like.manifest.units)
            if not unit.holds_buffers
        ]
        optimizer = common_pb2.OptimizerStep(algorithm=algorithm, groups=groups, units=units)
        return {
            "step": step - 1,
            "time": time.time(),
            "leader": _SERVER_ID,
            "optimizer": message_to_dict(optimizer),
            "clip_coefficient": 1.0,
            "unit_order": [unit.unit_index for unit in units],
            "grad_norm": 0.0,
            "norm_type": None,
            "other_norm": None,
            "skipped": False,
        }


def _write(
    url: str, plan: FilePlan, tensors: Mapping[Piece, Callable[[], torch.Tensor]], note: NoteBytes
) -> FileRecord:
    storage = open_storage(url)
    storage.make_folder("")
    writer = CheckpointFileWriter(storage, _SERVER_ID, plan)
    try:
        for piece, read in tensors.items():
            writer.write(piece, memory_of(read()))
            note(piece.size_bytes)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def _run_state(like: CheckpointReader, step: int) -> coordinator_pb2.RunState | None:
    """Returns a state in which all buffers have changed, so that trainers read them. Nothing is tracked."""
    units = [(index, unit) for index, unit in enumerate(like.manifest.units) if unit.holds_buffers]
    if not units or not step:
        return None
    versions = [
        coordinator_pb2.BufferVersions(unit_index=index, versions=[step] * len(unit.parameters))
        for index, unit in units
    ]
    return coordinator_pb2.RunState(step=step - 1, buffer_versions=versions)
