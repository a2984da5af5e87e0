"""Reads tensors and values of a ``torch.distributed.checkpoint``, one at a time and in one process."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwell.weights.dcp_metadata import DcpItem, DcpTensor, read_metadata
from shardwell_wire.errors import CorruptDataError, NotFoundError

EntryPath = tuple[Any, ...]


class DcpReader:
    """An open checkpoint of ``torch.distributed.checkpoint``, by the paths of its nested state dict.

    Args:
        folder: The checkpoint's folder.

    Raises:
        NotFoundError: There is no checkpoint.
        CorruptDataError: Its metadata is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._metadata = read_metadata(self.folder)

    @property
    def tensors(self) -> Mapping[EntryPath, DcpTensor]:
        """Descriptions of all tensors."""
        return self._metadata.tensors

    @property
    def values(self) -> Mapping[EntryPath, DcpItem]:
        """Places of all entries that are not tensors."""
        return self._metadata.values

    def tensor(self, path: EntryPath) -> torch.Tensor:
        """Reads a tensor and joins its chunks.

        Raises:
            CorruptDataError: A chunk is damaged, or elements are missing.
        """
        described = self._metadata.tensors[path]
        whole, covered = torch.empty(described.shape, dtype=described.dtype), 0
        for chunk in described.chunks:
            values = self._load(chunk.item, path)
            if not isinstance(values, torch.Tensor) or (values.dtype, tuple(values.shape)) != (
                described.dtype,
                chunk.sizes,
            ):
                raise CorruptDataError(
                    f"{self.folder / chunk.item.path}: the chunk of {_text(path)} at {chunk.offsets} is not a tensor "
                    f"of {described.dtype} {chunk.sizes}"
                )
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box].copy_(values)
            covered += values.numel()
        if covered < math.prod(described.shape):
            raise CorruptDataError(f"{self.folder} has {covered} of the {whole.numel()} elements of {_text(path)}")
        return whole

    def value(self, path: EntryPath) -> Any:
        """Reads an entry that is not a tensor: numbers, text, tuples, lists and maps of them.

        Raises:
            CorruptDataError: It is damaged, or has an object of another class.
        """
        return self._load(self._metadata.values[path], path)

    def _load(self, item: DcpItem, path: EntryPath) -> Any:
        file_path = self.folder / item.path
        try:
            with file_path.open("rb") as file:
                file.seek(item.offset_bytes)
                data = file.read(min(item.length_bytes, max(0, file_path.stat().st_size - item.offset_bytes)))
        except FileNotFoundError as error:
            raise NotFoundError(f"{file_path} is missing, which contains {_text(path)}", path=file_path) from error
        if len(data) < item.length_bytes:
            raise CorruptDataError(f"{file_path} ends in the middle of {_text(path)}")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its parsers raise
            raise CorruptDataError(
                f"{_text(path)} in {file_path} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from error


def _text(path: EntryPath) -> str:
    return ".".join(map(str, path))
