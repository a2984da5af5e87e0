"""``shardwell.open_checkpoint``: values and optimizer state by name and range, joined over files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwell
from shardwell_wire.checkpoints.format import Piece
from tests.support.checkpoints import as_bytes, state_tensors, write_checkpoint


def joined(step: int, name: str, state: str) -> torch.Tensor:
    found = [
        t.view(-1) for part in state_tensors(step) for p, t in part.items() if (p.parameter, p.state) == (name, state)
    ]
    return torch.cat(found)


def test_tensors_are_joined_over_files(tmp_path: Path) -> None:
    checkpoint = shardwell.open_checkpoint(write_checkpoint(tmp_path, 3))
    assert (checkpoint.run, checkpoint.step) == ("gpt", 3)
    assert list(checkpoint.parameters) == ["blocks.0.weight", "blocks.0.bias", "head.weight", "head.scale"]
    assert checkpoint.buffers == {"freqs": (4,)}
    for name, shape in {**checkpoint.parameters, **checkpoint.buffers}.items():
        assert torch.equal(checkpoint.read(name), joined(3, name, "values").view(shape))
    weight = joined(3, "blocks.0.weight", "values")
    for start in range(0, 36, 5):
        for stop in range(start, 36, 4):
            assert torch.equal(checkpoint.read("blocks.0.weight", start=start, stop=stop), weight[start:stop])
    state = checkpoint.optimizer_state("blocks.0.weight")
    assert torch.equal(state["exp_avg"].view(-1), joined(3, "blocks.0.weight", "exp_avg"))
    assert torch.equal(state["step"], torch.tensor(3.0))
    assert checkpoint.optimizer_state("head.scale") == {}
    assert checkpoint.optimizer("blocks.0.weight") == ("adamw", 3)
    assert set(checkpoint.state_dict()) == {*checkpoint.parameters, *checkpoint.buffers}


def test_the_newest_of_a_run_is_opened(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step, created=1000.0 + step)
    write_checkpoint(tmp_path, 3, publish=False)
    assert shardwell.open_checkpoint(tmp_path, run="gpt").step == 2
    with pytest.raises(shardwell.NotFoundError, match="no complete checkpoint of run 'other'"):
        shardwell.open_checkpoint(tmp_path, run="other")


def test_impossible_reads_are_refused(tmp_path: Path) -> None:
    checkpoint = shardwell.open_checkpoint(write_checkpoint(tmp_path, 1))
    with pytest.raises(shardwell.NotFoundError, match="no parameter or buffer 'nothing'"):
        checkpoint.read("nothing")
    with pytest.raises(shardwell.NotFoundError, match=r"no 'exp_avg' of 'head.scale', only values"):
        checkpoint.read("head.scale", "exp_avg")
    with pytest.raises(ValueError, match=r"elements \[0, 36\)"):
        checkpoint.read("blocks.0.weight", stop=36)
    with pytest.raises(ValueError, match="does not consist of elements"):
        checkpoint.read("blocks.0.weight", "step", start=0)


def test_state_with_a_gap_is_reported(tmp_path: Path) -> None:
    files = state_tensors(1)
    for piece in list(files[1]):
        if piece.state == "exp_avg":
            del files[1][piece]
    checkpoint = shardwell.open_checkpoint(write_checkpoint(tmp_path, 1, files=files))
    with pytest.raises(shardwell.CorruptDataError, match=r"'exp_avg' of 'blocks.0.weight' only up to element 11"):
        checkpoint.read("blocks.0.weight", "exp_avg")
    assert torch.equal(
        checkpoint.read("blocks.0.weight", "exp_avg", stop=11), joined(1, "blocks.0.weight", "exp_avg")[:11]
    )


def test_missing_values_are_found_when_the_checkpoint_is_opened(tmp_path: Path) -> None:
    files = state_tensors(1)
    del files[1][next(piece for piece in files[1] if piece.name.startswith("blocks.0.weight|values"))]
    url = write_checkpoint(tmp_path, 1, files=files)
    with pytest.raises(shardwell.CorruptDataError, match=r"has 11 of the 35 values of 'blocks.0.weight'"):
        shardwell.open_checkpoint(url)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    files = state_tensors(1)
    piece = Piece("blocks.0.weight", "values", 30, 36, "float32", (6,))
    files[0][piece] = torch.zeros(6)
    assert len(as_bytes(files[0][piece])) == 24
    with pytest.raises(shardwell.CorruptDataError, match=r"'blocks.0.weight\|values\|30:36' overlaps"):
        shardwell.open_checkpoint(write_checkpoint(tmp_path, 1, files=files))


def test_a_parameter_without_elements_is_read_although_no_server_has_a_part_of_it(tmp_path: Path) -> None:
    files = [{piece: t for piece, t in part.items() if piece.parameter != "head.weight"} for part in state_tensors(1)]
    checkpoint = shardwell.open_checkpoint(write_checkpoint(tmp_path, 1, files=files))
    assert checkpoint.read("head.weight").shape == checkpoint.state_dict()["head.weight"].shape == (3, 0)
    assert checkpoint.read("head.weight", start=0, stop=0).dtype == torch.bfloat16
    with pytest.raises(shardwell.NotFoundError, match=r"no 'exp_avg' of 'head\.weight', only nothing"):
        checkpoint.read("head.weight", "exp_avg")
