"""Reads checkpoints of runs by name and element range, without a cluster and without the model's code.

>>> checkpoint = shardwell.weights.open_checkpoint("checkpoints/gpt/step-000000042-6fd1c0a2")
>>> checkpoint.read("blocks.0.proj.weight")
>>> checkpoint.read("blocks.0.proj.weight", "exp_avg", start=0, stop=1000)
>>> model.load_state_dict(checkpoint.state_dict())

docs/checkpoints.md specifies the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import AVERAGE, KEPT_GRADIENT, RESIDUAL, TRAINER_STATE, VALUES, Piece
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.errors import CorruptDataError, NotFoundError
from shardwell_wire.model.layout import Parameter, by_any_name, shown_names

_NO_OPTIMIZER_STATE = (VALUES, AVERAGE, KEPT_GRADIENT, RESIDUAL)


def open_checkpoint(url: str | Path, *, run: str | None = None) -> CheckpointReader:
    """Opens a checkpoint. Reads the manifest and the headers of all files.

    Args:
        url: Path or URL of the checkpoint's folder. With ``run``, of the folder of all runs, as in
            ``join(checkpoint_dir=)``.
        run: Name of the run whose newest complete checkpoint is opened.

    Raises:
        NotFoundError: There is no complete checkpoint, or a file is missing.
        CorruptDataError: The manifest or a header is damaged.
        UnavailableError: The storage cannot be reached.
    """
    if run is not None:
        entry = RunFolder.of(url, run).newest()
        if entry is None:
            raise NotFoundError(f"{url} contains no complete checkpoint of run {run!r}", run=run)
        url = entry.url
    return CheckpointReader(Checkpoint(open_storage(url)))


class CheckpointReader:
    """An open checkpoint. Created by ``open_checkpoint``.

    Every read compares the checksums of the tensors that it touches. Methods may be called from any thread.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names: Mapping[str, tuple[str, ...]] = shown_names(self.manifest.units)
        """All names of each parameter and buffer, by its name in the run."""
        self._name_in_run = by_any_name(self.names)
        self._parts: dict[str, list[Parameter]] = {}
        """Entries of each parameter or buffer by its name in the run: one, or the parts that have elements."""
        for unit in self.manifest.units:
            for parameter in unit.parameters:
                if parameter.name in self.names and (parameter.numel or not parameter.is_part):
                    self._parts.setdefault(parameter.name, []).append(parameter)

    @property
    def manifest(self) -> Manifest:
        """The manifest: world, seed, commit records, tracked state, units and files."""
        return self._checkpoint.manifest

    @property
    def url(self) -> str:
        """Path or URL of the checkpoint's folder."""
        return self._checkpoint.url

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.manifest.run

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.manifest.step

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters by name, in the order of the units. Tied parameters have their first name."""
        return self._shapes(holds_buffers=False)

    @property
    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the persistent buffers by name."""
        return self._shapes(holds_buffers=True)

    def _shapes(self, *, holds_buffers: bool) -> dict[str, tuple[int, ...]]:
        units = [unit for unit in self.manifest.units if unit.holds_buffers == holds_buffers]
        return {
            self.names[each.name][0]: each.box.whole
            for unit in units
            for each in unit.parameters
            if each.name in self.names
        }

    def states(self, name: str) -> Sequence[str]:
        """Returns what is stored of a parameter, such as ``values``, ``ema`` and ``exp_avg``, sorted.

        State that no step has created yet is absent, which differs from zeros.
        """
        return self._checkpoint.states(self._entries(name)[0].key)

    def _entries(self, name: str) -> Sequence[Parameter]:
        """Returns the entries of a parameter. A key, such as ``NAME@0,8``, names one part."""
        if (name_in_run := self._name_in_run.get(name)) in self._parts:
            return self._parts[name_in_run]
        if name in self._checkpoint.parameters:
            return [self._checkpoint.parameters[name]]
        raise NotFoundError(f"{self.url} has no parameter or buffer {name!r}", parameter=name)

    def optimizer(self, name: str) -> tuple[str | None, int]:
        """Returns the optimizer that updated a parameter last, and the number of its updates.

        The optimizer is None before the first update.
        """
        parts = [part for part in self._checkpoint.parts(self._entries(name)[0].key) if part.algorithm is not None]
        return (parts[0].algorithm, parts[0].step_count) if parts else (None, 0)

    def read(
        self, name: str, state: str = VALUES, *, start: int | None = None, stop: int | None = None
    ) -> torch.Tensor:
        """Reads values or state of a parameter or buffer, joined over all files and all parts.

        Args:
            name: Name of the parameter or buffer, in the model or in the run. ``NAME@OFFSET,OFFSET`` is one part of a
                parameter that tensor parallelism splits, with its name in the run.
            state: ``values``, ``ema``, or a name from ``states``.
            start: First element of the flattened parameter. None: the first.
            stop: End of the elements, exclusive. None: the end.

        Returns:
            A tensor on the CPU. Without a range: of the parameter's shape, or the state's own shape if it does not
            consist of elements (such as ``step``). With a range: flat. [stop - start]

        Raises:
            NotFoundError: The checkpoint has no such parameter or state.
            CorruptDataError: The checksum of a tensor differs; the message names the file and the tensor.
            ValueError: The range is not within the parameter, the state does not consist of elements, or each part has
                a state of its own.
        """
        entries, stored_states = self._entries(name), self.states(name)
        is_part = entries[0].is_part and name == entries[0].key
        shape = entries[0].shape if is_part else entries[0].box.whole
        numel = math.prod(shape)
        first, last = 0 if start is None else start, numel if stop is None else stop
        if not 0 <= first <= last <= numel:
            raise ValueError(f"elements [{first}, {last}) of {name!r}: it has {numel}")
        if state not in stored_states and (state != VALUES or numel):  # no file has a part of an empty one
            raise NotFoundError(
                f"{self.url} has no {state!r} of {name!r}, only {', '.join(stored_states) or 'nothing'}", parameter=name
            )
        some = self._checkpoint.pieces(entries[0].key, state)[:1]
        if some and some[0].piece.kind != "elements":
            if start is not None or stop is not None:
                raise ValueError(f"{state!r} of {name!r} does not consist of elements: read it without a range")
            self._require_common(name, entries, some[0].piece)
            return _tensor(self._checkpoint.read(some[0]), some[0].piece.dtype).view(some[0].piece.shape)
        dtype = some[0].piece.dtype if some else entries[0].dtype
        if is_part or not entries[0].is_part:
            flat = self._read_elements(entries[0].key, state, first, last, dtype)
        else:
            flat = self._join(entries, state, dtype).view(-1)[first:last]
        return flat if start is not None or stop is not None else flat.view(shape)

    def _require_common(self, name: str, entries: Sequence[Parameter], piece: Piece) -> None:
        """Raises ValueError unless a state that does not consist of elements belongs to all parts together."""
        if len(entries) > 1 and piece.shape:
            raise ValueError(
                f"each part of {name!r} has a {piece.state!r} of its own, of shape {piece.shape}: read it by the name "
                f"of the part, one of {', '.join(repr(entry.key) for entry in entries)}"
            )

    def _join(self, parts: Sequence[Parameter], state: str, dtype: str) -> torch.Tensor:
        """Reads all parts of a parameter. [shape of the whole]"""
        whole = torch.empty(parts[0].box.whole, dtype=getattr(torch, dtype))
        for part in parts:
            whole[part.box.slices] = self._read_elements(part.key, state, 0, part.numel, dtype).view(part.shape)
        missing = whole.numel() - sum(part.numel for part in parts)
        if missing:
            raise CorruptDataError(
                f"{self.url} lacks {missing} of the {whole.numel()} elements of {parts[0].name!r}",
                parameter=parts[0].name,
            )
        return whole

    def _read_elements(self, key: str, state: str, first: int, last: int, dtype: str) -> torch.Tensor:
        flat, done = torch.empty(last - first, dtype=getattr(torch, dtype)), first
        for stored in self._checkpoint.pieces(key, state, first, last):
            piece = stored.piece
            low, high = max(first, piece.start), min(last, piece.stop)
            if low != done or piece.dtype != dtype:
                break
            target = flat[low - first : high - first].view(torch.uint8).numpy()
            self._checkpoint.read_into(stored, target, (low - piece.start) * piece.item_size)
            done = high
        if done != last:
            raise CorruptDataError(
                f"{self.url} has {state!r} of {key!r} only up to element {done} of [{first}, {last})", parameter=key
            )
        return flat

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the whole optimizer state of a parameter by torch's names. Empty before the first update."""
        names = [state for state in self.states(name) if not state.startswith(_NO_OPTIMIZER_STATE)]
        return {state.removeprefix(TRAINER_STATE): self.read(name, state) for state in names}

    def optimizer_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the optimizer state of a parameter on the meta device, by its names in the checkpoint."""
        entries, found = self._entries(name), {}
        shape = entries[0].box.whole
        for state in self.states(name):
            if not state.startswith(_NO_OPTIMIZER_STATE):
                piece = self._checkpoint.pieces(entries[0].key, state)[0].piece
                if piece.kind != "elements":
                    self._require_common(name, entries, piece)
                own = shape if piece.kind == "elements" else piece.shape
                found[state] = torch.empty(own, dtype=getattr(torch, piece.dtype), device="meta")
        return found

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and persistent buffers by name.

        Args:
            ema: Return moving averages instead of values where there are any.
        """
        names = [self.names[name][0] for name in self._parts]
        return {name: self.read(name, AVERAGE if ema and AVERAGE in self.states(name) else VALUES) for name in names}


def _tensor(data: bytearray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0, dtype=getattr(torch, dtype))
