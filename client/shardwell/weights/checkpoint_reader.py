"""Reads checkpoints of runs by name and element range, without a cluster and without the model's code.

>>> checkpoint = shardwell.open_checkpoint("checkpoints/gpt/step-000000042-6fd1c0a2")
>>> checkpoint.read("blocks.0.proj.weight")
>>> checkpoint.read("blocks.0.proj.weight", "exp_avg", start=0, stop=1000)
>>> model.load_state_dict(checkpoint.state_dict())

docs/checkpoints.md specifies the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import AVERAGE, KEPT_GRADIENT, RESIDUAL, TRAINER_STATE, VALUES
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.opening import open_storage
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.errors import CorruptDataError, NotFoundError

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
        return {parameter.name: parameter.shape for unit in units for parameter in unit.parameters}

    def states(self, name: str) -> Sequence[str]:
        """Returns what is stored of a parameter, such as ``values``, ``ema`` and ``exp_avg``, sorted.

        State that no step has created yet is absent, which differs from zeros.
        """
        return self._checkpoint.states(name)

    def optimizer(self, name: str) -> tuple[str | None, int]:
        """Returns the optimizer that updated a parameter last, and the number of its updates.

        The optimizer is None before the first update.
        """
        parts = [part for part in self._checkpoint.parts(name) if part.algorithm is not None]
        return (parts[0].algorithm, parts[0].step_count) if parts else (None, 0)

    def read(
        self, name: str, state: str = VALUES, *, start: int | None = None, stop: int | None = None
    ) -> torch.Tensor:
        """Reads values or state of a parameter or buffer, joined over all files.

        Args:
            name: Name of the parameter or buffer in the run.
            state: ``values``, ``ema``, or a name from ``states``.
            start: First element of the flattened parameter. None: the first.
            stop: End of the elements, exclusive. None: the end.

        Returns:
            A tensor on the CPU. Without a range: of the parameter's shape, or the state's own shape if it does not
            consist of elements (such as ``step``). With a range: flat. [stop - start]

        Raises:
            NotFoundError: The checkpoint has no such parameter or state.
            CorruptDataError: The checksum of a tensor differs; the message names the file and the tensor.
            ValueError: The range is not within the parameter, or the state does not consist of elements.
        """
        stored_states = self.states(name)
        parameter = self._checkpoint.parameters[name]
        first, last = 0 if start is None else start, parameter.numel if stop is None else stop
        if not 0 <= first <= last <= parameter.numel:
            raise ValueError(f"elements [{first}, {last}) of {name!r}: it has {parameter.numel}")
        if state not in stored_states and (state != VALUES or parameter.numel):  # no file has a part of an empty one
            raise NotFoundError(
                f"{self.url} has no {state!r} of {name!r}, only {', '.join(stored_states) or 'nothing'}", parameter=name
            )
        some = self._checkpoint.pieces(name, state)[:1]
        if some and some[0].piece.kind != "elements":
            if start is not None or stop is not None:
                raise ValueError(f"{state!r} of {name!r} does not consist of elements: read it without a range")
            return _tensor(self._checkpoint.read(some[0]), some[0].piece.dtype).view(some[0].piece.shape)
        flat = self._read_elements(name, state, first, last, some[0].piece.dtype if some else parameter.dtype)
        return flat if start is not None or stop is not None else flat.view(parameter.shape)

    def _read_elements(self, name: str, state: str, first: int, last: int, dtype: str) -> torch.Tensor:
        flat, done = torch.empty(last - first, dtype=getattr(torch, dtype)), first
        for stored in self._checkpoint.pieces(name, state, first, last):
            piece = stored.piece
            low, high = max(first, piece.start), min(last, piece.stop)
            if low != done or piece.dtype != dtype:
                break
            target = flat[low - first : high - first].view(torch.uint8).numpy()
            self._checkpoint.read_into(stored, target, (low - piece.start) * piece.item_size)
            done = high
        if done != last:
            raise CorruptDataError(
                f"{self.url} has {state!r} of {name!r} only up to element {done} of [{first}, {last})", parameter=name
            )
        return flat

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the whole optimizer state of a parameter by torch's names. Empty before the first update."""
        names = [state for state in self.states(name) if not state.startswith(_NO_OPTIMIZER_STATE)]
        return {state.removeprefix(TRAINER_STATE): self.read(name, state) for state in names}

    def optimizer_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the optimizer state of a parameter on the meta device, by its names in the checkpoint."""
        found, shape = {}, self._checkpoint.parameters[name].shape
        for state in self.states(name):
            if not state.startswith(_NO_OPTIMIZER_STATE):
                piece = self._checkpoint.pieces(name, state)[0].piece
                own = shape if piece.kind == "elements" else piece.shape
                found[state] = torch.empty(own, dtype=getattr(torch, piece.dtype), device="meta")
        return found

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and persistent buffers by name.

        Args:
            ema: Return moving averages instead of values where there are any.
        """
        return {
            name: self.read(name, AVERAGE if ema and AVERAGE in self.states(name) else VALUES)
            for name in self._checkpoint.parameters
        }


def _tensor(data: bytearray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0, dtype=getattr(torch, dtype))
