"""Files of weights: ``from_safetensors`` reads them, ``write_safetensors`` writes them.

Both have a few MiB or one unit in memory at a time. Initial values are streamed from the files to the shard servers.
The files of an export appear together.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwell.module.mixed_precision import local_box, local_part
from shardwell.module.new_units import NAMES_IN_MODEL, InitFunction
from shardwell.module.parameter_store import InitialValues
from shardwell.module.parameters import FoundParameter, Site
from shardwell.module.unit import owner_of
from shardwell_wire.checkpoints.format import LENGTH_BYTES, SAFETENSORS_DTYPES, header_size, make_header, parse_header
from shardwell_wire.errors import CorruptDataError, NotFoundError, UsageError
from shardwell_wire.model.layout import Box, Segment, UnitLayout
from shardwell_wire.v1 import initialization_pb2

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
"""File names in a model's folder, as in Hugging Face's libraries."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, (dtype, _) in SAFETENSORS_DTYPES.items()}

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""The format's names of dtypes."""

WINDOW_BYTES = 4 << 20
"""Bytes of a tensor that are in memory at a time, per upload."""

_EXPORTED_FILE = re.compile(rf"model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE_NAME)}|{re.escape(INDEX_NAME)}")

Values = Iterator[tuple[str, torch.Tensor]]
Rename = Callable[[str], str | None]
"""Maps a name in the checkpoint to the name in the model, or to None to skip the tensor."""


def from_safetensors(
    model: nn.Module,
    path: str | Path,
    *,
    rename: Rename | None = None,
    cast: bool = False,
    init: InitFunction | None = None,
) -> SafetensorsSource:
    """Returns a source of initial values for ``fully_shard`` and ``auto_wrap``, read from a checkpoint.

    Call it before the first ``fully_shard``. It reads the headers of the files and checks that all tensors fit. The
    trainer that uploads a unit reads the unit's values when the unit is made, a few MiB at a time. All trainers load
    buffers and parameters that are not sharded. If the run already has values, it keeps them.

    >>> with torch.device("meta"):
    ...     model = Model(config)
    >>> source = shardwell.from_safetensors(model, "checkpoint")
    >>> shardwell.auto_wrap(model, session, policy, source=source)

    Args:
        model: The whole model. May be on the meta device.
        path: A safetensors file, a Hugging Face index (``model.safetensors.index.json``), or a folder with either.
        rename: Maps names in the checkpoint to names in the model.
        cast: Whether to convert floating-point values to the model's dtypes.
        init: Initialises modules with non-persistent buffers on the meta device, which a checkpoint does not contain,
            such as a Transformers model's ``_init_weights``. Default: their ``reset_parameters``.

    Raises:
        UsageError: Tensors are missing, unexpected, or have other shapes or dtypes; the message lists all of them.
        NotFoundError: The checkpoint does not exist.
        CorruptDataError: A file is damaged or truncated.
    """
    stored = _renamed(find_tensors(path), rename, path)
    places, problems = _match(model, stored, cast)
    if problems:
        raise UsageError(f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}", path=path)
    return SafetensorsSource(places, str(path), init)


@dataclass(frozen=True)
class SafetensorsSource:
    """A checkpoint that fits a model. Created by ``from_safetensors``."""

    places: Mapping[Site, StoredTensor] = field(repr=False)
    """Stored tensors by the places where modules hold parameters and buffers."""
    path: str
    init: InitFunction | None

    def unit_values(self, layout: UnitLayout, found: Sequence[FoundParameter], seed: int) -> InitialValues:
        """See ``ValueSource.unit_values``."""
        stored = []
        for entry in found:
            if entry.sites[0] not in self.places:
                raise UsageError(
                    f"parameter {entry.names[0]!r} was not in the model when from_safetensors({self.path!r}) compared "
                    "it with the checkpoint: pass the model whose modules are sharded, and do not change it afterwards",
                    parameter=entry.names[0],
                )
            box, dtype = local_box(entry.parameter), entry.parameter.dtype
            stored.append(_Part(self.places[entry.sites[0]], box, dtype))
        return _StoredValues(stored)

    def fill(self, site: Site, tensor: torch.Tensor) -> bool:
        """See ``ValueSource.fill``."""
        if (stored := self.places.get(site)) is None:
            return False
        with torch.no_grad():
            flat, local = local_part(tensor), local_box(tensor)
            values = b"".join(_Part(stored, local, tensor.dtype).read(0, flat.numel()))
            if values:
                flat.copy_(torch.frombuffer(bytearray(values), dtype=tensor.dtype).view(flat.shape))
        return True


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a stored tensor that one process holds, converted to the model's dtype."""

    stored: StoredTensor
    box: Box
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Yields elements of the flattened part, window by window."""
        window = WINDOW_BYTES // max(self.dtype.itemsize, self.stored.dtype.itemsize)
        for first in range(start, stop, window):
            data = self.stored.read(self.box.runs(first, min(first + window, stop)))
            if self.stored.dtype != self.dtype:
                values = torch.frombuffer(bytearray(data), dtype=self.stored.dtype).to(self.dtype)
                data = values.view(torch.uint8).numpy().tobytes()
            yield data


@dataclass(frozen=True)
class _StoredValues:
    parts: Sequence[_Part]
    """Parts by parameter index."""

    @property
    def draws(self) -> Mapping[int, initialization_pb2.ParameterDraw]:
        return {}

    def read(self, segment: Segment) -> Iterator[bytes | memoryview]:
        return self.parts[segment.parameter_index].read(segment.start_element, segment.stop_element)


def _renamed(tensors: Mapping[str, StoredTensor], rename: Rename | None, path: str | Path) -> dict[str, StoredTensor]:
    if rename is None:
        return dict(tensors)
    renamed: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        new = rename(name)
        if new in renamed:
            raise UsageError(f"{path}: rename gives {renamed[new].name!r} and {name!r} the same name {new!r}")
        if new is not None:
            renamed[new] = stored
    return renamed


@dataclass(slots=True)
class _Wanted:
    """A parameter or persistent buffer, with all its names in the model."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)


def _match(
    model: nn.Module, stored: Mapping[str, StoredTensor], cast: bool
) -> tuple[dict[Site, StoredTensor], list[str]]:
    """Matches stored tensors with the model. Returns them by place, and a list of the problems."""
    places: dict[Site, StoredTensor] = {}
    missing, differing, used = [], [], set()
    for wanted in _wanted(model):
        present = [name for name in wanted.names if name in stored]
        used.update(present)
        if not present:
            missing.append(" or ".join(map(repr, wanted.names)))
            continue
        tensor = stored[present[-1]]  # the last of tied names wins, as in load_state_dict
        found = differences(tensor.shape, tensor.dtype, wanted.tensor, "checkpoint", cast=cast)
        differing += [f"{present[-1]!r} is {how}" for how in found]
        places.update(dict.fromkeys(wanted.sites, tensor))
    elsewhere = vars(model).get(NAMES_IN_MODEL, ())  # a pipeline stage loads its part of the model's checkpoint
    unexpected = [repr(name) for name in stored if name not in used and name not in elsewhere]
    kinds = (kind.__module__ for part in model.modules() for kind in type(part).__mro__)
    problems = [
        *([f"it lacks {listed(missing)}"] if missing else []),
        *([f"the model lacks {listed(unexpected)} (to skip tensors, let rename return None)"] if unexpected else []),
        *([listed(differing)] if differing else []),
        *([_CONVERSION] if missing and unexpected and any(name.startswith("transformers.") for name in kinds) else []),
    ]
    return places, problems


_CONVERSION = (
    "Transformers converts some checkpoints when it loads them, such as those of mixtures of experts. Save this one "
    "once with the names of the model: model = AutoModelForCausalLM.from_pretrained(FOLDER), "
    "shardwell.wrapping.split_experts(model) if it is called here, too, and model.save_pretrained(OTHER, "
    "save_original_format=False)"
)


def _wanted(model: nn.Module) -> list[_Wanted]:
    wanted: dict[int, _Wanted] = {}
    whole = vars(model).get(NAMES_IN_MODEL, {})  # of a stage: what another stage stores has values here, too
    for prefix, part in model.named_modules(remove_duplicate=False):
        buffers = {
            name: item
            for name, item in part._buffers.items()
            if name not in part._non_persistent_buffers_set or (f"{prefix}.{name}" if prefix else name) in whole
        }
        for own_name, tensor in (*part._parameters.items(), *buffers.items()):
            if tensor is None or is_lazy(tensor):
                continue
            name = f"{prefix}.{own_name}" if prefix else own_name
            if owner_of(tensor) is not None:
                raise UsageError(f"parameter {name!r} is already sharded: call from_safetensors before fully_shard")
            entry = wanted.setdefault(id(tensor), _Wanted(tensor))
            entry.names += [other for other in whole.get(name, (name,)) if other not in entry.names]
            entry.sites.append(Site(part, own_name))
    return list(wanted.values())


def differences(
    shape: Sequence[int], dtype: torch.dtype, tensor: torch.Tensor, where: str, *, cast: bool
) -> Iterator[str]:
    """Yields how a tensor of a shape and dtype, stored in ``where``, differs from that of a model.

    If ``cast``, floating-point values are converted to the model's dtype.
    """
    if tuple(shape) != tuple(tensor.shape):
        yield f"of shape {tuple(shape)} in the {where}, {tuple(tensor.shape)} in the model"
    both_floating = dtype.is_floating_point and tensor.dtype.is_floating_point
    if dtype != tensor.dtype and not (cast and both_floating):
        advice = " (pass cast=True to convert)" if both_floating else ""
        yield f"{dtype} in the {where}, {tensor.dtype} in the model{advice}"


def listed(names: Sequence[str], limit: int = 10) -> str:
    """Returns the first names of a list, for an error."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ---- reading ----


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    """Position in the file."""

    def read(self, runs: Iterable[tuple[int, int]]) -> bytes:
        """Reads some elements.

        Args:
            runs: ``(first element, number of elements)`` in the flattened tensor.

        Raises:
            CorruptDataError: The file was truncated.
            OSError: The file cannot be read.
        """
        size, parts = self.dtype.itemsize, []
        with self.path.open("rb", buffering=0) as file:
            for first, count in runs:
                file.seek(self.start_bytes + first * size)
                part = file.read(count * size)
                if len(part) != count * size:
                    raise CorruptDataError(f"{self.path} ends in the middle of tensor {self.name!r}")
                parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def find_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by name. Reads headers only.

    Args:
        path: A safetensors file, an index of several (``*.index.json``), or a folder with either.

    Raises:
        NotFoundError: There is no such file.
        CorruptDataError: A file is not a safetensors file or is truncated, or the index contradicts the files.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise NotFoundError(f"no safetensors file or index at {path}", path=path)
    return _of_index(path) if path.name.endswith(".json") else read_header(path)


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE_NAME, INDEX_NAME):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:5]) or "none"
        raise NotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, and not exactly one other safetensors file "
            f"({found}): pass the file or the index",
            path=folder,
        )
    return files[0]


def _of_index(path: Path) -> dict[str, StoredTensor]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: path.parent / file for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{path} is not an index of safetensors files: expected a JSON object with a weight_map"
        ) from error
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for file in dict.fromkeys(files.values()):
        if not file.is_file():
            raise NotFoundError(f"{path} refers to {file.name}, which does not exist", path=file)
        headers[file] = read_header(file)
    for name, file in files.items():
        if name not in headers[file]:
            raise CorruptDataError(f"{path} refers to tensor {name!r} in {file.name}, which does not contain it")
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name.

    Raises:
        CorruptDataError: The file is not a safetensors file, or is truncated.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        header = start + file.read(header_size(start, size_bytes, str(path)) - LENGTH_BYTES)
    entries, _ = parse_header(header, size_bytes, str(path))
    return {
        name: StoredTensor(path, name, _DTYPES[entry.dtype], entry.shape, entry.start_bytes)
        for name, entry in entries.items()
    }


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of one file by name, without reading them. Writes to them do not reach the file."""
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    tensors = dict[str, torch.Tensor]()
    for name, stored in read_header(path).items():
        stop_bytes = stored.start_bytes + math.prod(stored.shape) * stored.dtype.itemsize
        part = data[stored.start_bytes : stop_bytes]
        if stored.start_bytes % stored.dtype.itemsize:
            part = part.clone()  # misaligned, because it follows a tensor with smaller elements
        tensors[name] = part.view(stored.dtype).view(stored.shape)
    return tensors


# ---- writing ----


def write_safetensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Values,
    *,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
) -> list[Path]:
    """Writes ``model.safetensors``, or several files with an index, as Hugging Face's libraries do.

    Args:
        folder: Created if it does not exist. Files of an earlier export are removed.
        tensors: Names and tensors with the right shapes and dtypes. Their memory is not read.
        values: The same names in the same order, with values.
        max_shard_bytes: Largest size of the tensors in one file. A larger tensor gets its own file.
        metadata: Additional strings for the headers of the files.

    Returns:
        The files with tensors.

    Raises:
        UsageError: The format does not support a dtype, or ``max_shard_bytes`` is not positive.
        OSError: The files cannot be written. The folder is unchanged.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: expected at least 1")
    _described(tensors)
    files = _cut(tensors, max_shard_bytes)
    with staged(
        folder, markers=(INDEX_NAME, SINGLE_NAME), is_exported=lambda name: bool(_EXPORTED_FILE.fullmatch(name))
    ) as stage:
        for name, contained in files.items():
            with (stage / name).open("wb") as file:
                write_file(file, contained, values, {"format": "pt", **metadata})
        if len(files) > 1:
            weight_map = {name: file for file, contained in files.items() for name in contained}
            index = {"metadata": {"total_size": total_bytes(tensors)}, "weight_map": weight_map}
            (stage / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [folder / name for name in files]


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the size of all values."""
    return sum(map(_size_bytes, tensors.values()))


@contextmanager
def staged(folder: Path, *, markers: Collection[str], is_exported: Callable[[str], bool]) -> Iterator[Path]:
    """Yields a folder on the same disk; files written to it are moved into ``folder`` when all are complete.

    A reader of ``folder`` finds a marker only if every file of one export is present, also after a crash. If the block
    raises, for example because the disk is full, ``folder`` does not change.

    Args:
        folder: Destination of the files. Created if it does not exist.
        markers: Files without which readers do not recognise the checkpoint. They are removed first and moved last.
        is_exported: Returns whether a file name belongs to an earlier export. Such files are removed.
    """
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        yield stage
        _sync(stage)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        if not existed:
            folder.rmdir()
        raise
    names = {path.name for path in stage.iterdir()}
    for marker in markers:
        (folder / marker).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in names and is_exported(path.name):
            path.unlink()
    for name in sorted(names, key=lambda name: (name in markers, name)):
        (stage / name).replace(folder / name)
    stage.rmdir()
    _sync(folder)


def _sync(folder: Path) -> None:
    """Makes the files of a folder and the folder itself durable."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _size_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _cut(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Distributes tensors over files, in order. Returns the tensors of each file by its name."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        size = _size_bytes(tensor)
        if size > room and parts[-1]:
            parts.append({})
            room = max_bytes
        parts[-1][name] = tensor
        room -= size
    count = len(parts)
    if count == 1:
        return {SINGLE_NAME: parts[0]}
    return {f"model-{number:05}-of-{count:05}.safetensors": part for number, part in enumerate(parts, 1)}


def write_file(
    file: IO[bytes], tensors: Mapping[str, torch.Tensor], values: Values, metadata: Mapping[str, str]
) -> None:
    """Writes one file with the next values, which belong to ``tensors``. Raises as ``write_safetensors``."""
    file.write(make_header(_described(tensors), metadata))
    for expected in tensors:
        name, value = next(values)
        assert name == expected
        file.write(memory_of(value))
        del value  # before the next unit is gathered


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UsageError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors files do not support", parameter=name
            )
    return {name: (_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def memory_of(value: torch.Tensor) -> memoryview:
    """Returns a view of a tensor's bytes, which is valid as long as the tensor."""
    flat = value.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
