"""Models load from safetensors files that the original libraries wrote."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwell
from shardwell import SizePolicy, auto_wrap, from_safetensors
from shardwell.module.fully_shard import fully_shard
from shardwell.module.units import Units
from shardwell.parallel import split_model
from shardwell.weights import weight_files
from shardwell.weights.state_dict import full_state_dict
from shardwell.weights.weight_files import StoredTensor
from shardwell_wire.errors import CorruptDataError, NotFoundError, UsageError
from shardwell_wire.model.layout import Box
from tests.support.hugging_face import FAMILIES
from tests.support.hugging_face import make as make_family
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Gpt, gpt, gpt_loss


def session(num_shards: int = 3) -> Any:
    return SimpleNamespace(units=Units(InMemoryStore(num_shards)))


def meta_gpt() -> Gpt:
    with torch.device("meta"):
        return Gpt()


def assert_same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def write(path: Path, state: dict[str, torch.Tensor]) -> Path:
    """Writes a state with the original library, which rejects tensors that share memory."""
    unique = {name: value for name, value in state.items() if name != "head.weight"}
    safetensors.torch.save_file(unique, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "model.safetensors", gpt().state_dict())


@pytest.mark.parametrize("window_bytes", [64, 1 << 20])
@pytest.mark.parametrize("meta", [True, False])
def test_file_that_stores_tied_weights_once_loads(
    checkpoint: Path, meta: bool, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "WINDOW_BYTES", window_bytes)
    model = meta_gpt() if meta else Gpt()
    auto_wrap(model, session(), SizePolicy(1000), source=from_safetensors(model, checkpoint))
    assert_same(gpt().state_dict(), full_state_dict(model))
    assert model.head.weight is model.tokens.weight
    gpt_loss(model, 0).backward()


@pytest.mark.parametrize("splits", [False, True])
def test_converted_checkpoint_of_transformers_loads_in_stages_after_the_advice(splits: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    original: Any = make_family("mixtral")
    original.save_pretrained(tmp_path / "original")

    def stages(model: Any) -> list[nn.Module]:
        split = split_model(shardwell.split_experts(model) if splits else model, 2)
        return [split.module(0), split.module(1)]

    with torch.device("meta"):
        model: Any = FAMILIES["mixtral"]()
    parts = stages(model)
    with pytest.raises(UsageError, match=r"lacks .*experts.*save_pretrained\(OTHER, save_original_format=False\)"):
        from_safetensors(parts[0], tmp_path / "original")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    (shardwell.split_experts(loaded) if splits else loaded).save_pretrained(
        tmp_path / "new", save_original_format=False
    )
    for part, expected in zip(parts, stages(original), strict=True):
        source = from_safetensors(part, tmp_path / "new", init=model._init_weights)
        auto_wrap(part, session(), source=source)
        assert_same(expected.state_dict(), full_state_dict(part))


def test_units_load_when_their_names_differ_from_the_model(checkpoint: Path) -> None:
    model, held = meta_gpt(), session()
    source = from_safetensors(model, checkpoint.parent)
    for block in model.blocks:
        fully_shard(block, held, source=source)
    fully_shard(model, held, source=source)
    assert_same(gpt().state_dict(), full_state_dict(model))


def test_tensors_may_be_renamed_cast_and_left_out(tmp_path: Path) -> None:
    state = {f"model.{name}": value.half() for name, value in gpt().state_dict().items() if name != "head.weight"}
    path = write(tmp_path / "half.safetensors", {**state, "optimizer.step": torch.ones(3)})
    model = meta_gpt()

    def rename(name: str) -> str | None:
        return name.removeprefix("model.") if name.startswith("model.") else None

    auto_wrap(model, session(), SizePolicy(1000), source=from_safetensors(model, path, rename=rename, cast=True))
    assert_same({name: value.half().float() for name, value in gpt().state_dict().items()}, full_state_dict(model))


def test_buffers_and_ignored_parameters_are_loaded(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    plain(torch.randn(5, 3))
    path = write(tmp_path / "m.safetensors", plain.state_dict())
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1] = nn.Linear(3, 3)
    source = from_safetensors(model, path)
    fully_shard(model, session(), ignored_params=[model[1].weight], source=source)
    assert_same(plain.state_dict(), full_state_dict(model))
    assert model[0].num_batches_tracked.item() == 1 and torch.equal(model[1].weight, plain[1].weight)


class Rotary(nn.Module):
    """Has a buffer that is in no checkpoint and that only the constructor creates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.frequencies


def test_buffer_outside_the_checkpoint_needs_init(tmp_path: Path) -> None:
    plain = Rotary()
    path = write(tmp_path / "m.safetensors", plain.state_dict())
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(UsageError, match=r"Rotary .* init= for buffers"):
        fully_shard(model, session(), source=from_safetensors(model, path))
    source = from_safetensors(model, path, init=lambda module: module.frequencies.copy_(torch.arange(3.0)))  # type: ignore
    fully_shard(model, session(), source=source)
    x = torch.randn(3)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_folder_written_by_transformers_loads(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model_class, config = hugging_face(family)
    torch.manual_seed(0)
    plain = model_class(config)
    plain.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.device("meta"):
        model = model_class(config)
    source = from_safetensors(model, tmp_path, init=model._init_weights)
    auto_wrap(model, session(), SizePolicy(2000), source=source)
    assert_same(plain.state_dict(), full_state_dict(model))
    tokens = torch.arange(12).view(2, 6)
    plain.eval(), model.eval()
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def hugging_face(family: str) -> tuple[Any, Any]:
    import transformers

    if family == "gpt2":
        sizes = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=16)
        return transformers.GPT2LMHeadModel, sizes
    llama = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=97
    )
    return transformers.LlamaForCausalLM, llama


def test_one_error_names_every_mismatch(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.safetensors",
        {
            "0.weight": torch.ones(3, 4),
            "0.bias": torch.ones(3).half(),
            "extra": torch.ones(2),
            "1.bias": torch.ones(3).int(),
        },
    )
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(UsageError) as caught:
        from_safetensors(model, path)
    for part in (
        "it lacks '1.weight'",
        "the model lacks 'extra' (to skip tensors, let rename return None",
        "'0.weight' is of shape (3, 4) in the checkpoint, (3, 3) in the model",
        "'0.bias' is torch.float16 in the checkpoint, torch.float32 in the model (pass cast=True to convert)",
        "'1.bias' is torch.int32 in the checkpoint, torch.float32 in the model",
    ):
        assert part in str(caught.value)
    many = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    with pytest.raises(UsageError, match=r"'6.weight' and 27 more"):
        from_safetensors(many, path)


def test_wrong_use_is_rejected(checkpoint: Path) -> None:
    model, held = Gpt(), session()
    with pytest.raises(UsageError, match=r"rename gives 'blocks.0.down.bias' and .* the same name 'x'"):
        from_safetensors(model, checkpoint, rename=lambda name: "x")
    source = from_safetensors(model, checkpoint)
    with pytest.raises(UsageError, match="was not in the model when from_safetensors"):
        fully_shard(nn.Linear(3, 3), held, source=source)
    fully_shard(model.blocks[0], held, source=source)
    with pytest.raises(UsageError, match=r"'blocks.0.norm1.weight' is already sharded"):
        from_safetensors(model, checkpoint)


def test_missing_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no safetensors file or index at .*nowhere"):
        from_safetensors(gpt(), tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"has neither model.safetensors nor .*\(none\)"):
        from_safetensors(gpt(), tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NotFoundError, match=r"refers to model-00001-of-00002.safetensors, which does not exist"):
        from_safetensors(gpt(), tmp_path)
    write(tmp_path / "model-00001-of-00002.safetensors", {"b": torch.ones(1)})
    with pytest.raises(CorruptDataError, match="refers to tensor 'a' in"):
        from_safetensors(gpt(), tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], r"is truncated: \d+ bytes of tensors, expected \d+"),
        (lambda data: data[:100], "is not a safetensors file, or is truncated: 100 bytes"),
        (lambda data: data[:5], "is not a safetensors file, or is truncated: 5 bytes"),
        (lambda data: b"", "is not a safetensors file, or is truncated: 0 bytes"),
        (lambda data: data + b"x", "is longer than its header says"),
        (lambda data: data.replace(b'"F32"', b'"F99"', 1), "has unknown dtype 'F99'"),
        (lambda data: data.replace(b'"F32"', b'"F64"', 1), r"has bytes \[\d+, \d+\) in the header"),
        (lambda data: data.replace(b'{"', b'["', 1), "its header does not parse"),
        (lambda data: b"\xff" * 8 + data[8:], "is not a safetensors file, or is truncated"),
        (lambda data: (4).to_bytes(8, "little") + b"1234", "its header does not parse"),
    ],
)
def test_damaged_file_is_rejected(checkpoint: Path, damage: Any, message: str) -> None:
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(CorruptDataError, match=message) as caught:
        from_safetensors(gpt(), checkpoint)
    assert str(checkpoint) in str(caught.value)


def test_file_truncated_during_the_upload_is_rejected(
    checkpoint: Path, cluster: shardwell.LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The read error passes through the RPC unchanged, and the run can continue."""
    model, data = Gpt(), checkpoint.read_bytes()
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as joined:
        source = from_safetensors(model, checkpoint)
        checkpoint.write_bytes(data[:-1000])
        with pytest.raises(CorruptDataError, match="ends in the middle of tensor"):
            fully_shard(model, joined, source=source)
        checkpoint.write_bytes(data)
        fully_shard(model, joined, source=source)
        assert_same(gpt().state_dict(), full_state_dict(model))


def test_box_runs_match_tensor_slices() -> None:
    whole = torch.arange(4 * 5 * 6).view(4, 5, 6)
    for slices in (
        (slice(1, 3), slice(2, 5), slice(0, 6)),
        (slice(0, 4), slice(0, 5), slice(2, 4)),
        (slice(2, 3),) * 3,
    ):
        part = whole[slices]
        box = Box((4, 5, 6), tuple(item.start for item in slices), tuple(part.shape))
        for start, stop in ((0, part.numel()), (1, part.numel() - 1), (3, 3)):
            got = [value for first, count in box.runs(start, stop) for value in range(first, first + count)]
            assert got == part.flatten()[start:stop].tolist()
    assert list(Box((), (), ()).runs(0, 1)) == [(0, 1)]
    assert list(Box((4, 5), (0, 0), (4, 5)).runs(3, 17)) == [(3, 14)]


BIG_BYTES, LIMIT_BYTES = 256 << 20, 40 << 20


class Big(nn.Module):
    """One unit of two tensors, each larger than the memory limit."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(BIG_BYTES // 8))
        self.b = nn.Parameter(torch.empty(BIG_BYTES // 8))

    def forward(self) -> None:
        pass


def test_large_file_loads_within_a_memory_limit(
    tmp_path: Path, cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "big.safetensors"
    values = torch.arange(BIG_BYTES // 8, dtype=torch.float32)
    safetensors.torch.save_file({"a": values, "b": values + 1}, path)
    del values
    used: list[int] = []
    read = StoredTensor.read

    def measured(stored: StoredTensor, runs: Iterable[tuple[int, int]]) -> bytes:
        data = read(stored, runs)
        used.append(psutil.Process().memory_full_info().uss)
        return data

    monkeypatch.setattr(StoredTensor, "read", measured)
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as joined:
        fully_shard(nn.Linear(8, 8), joined)  # takes one-time costs out of the measurement
        with torch.device("meta"):
            model = Big()
        source = from_safetensors(model, path)
        before = psutil.Process().memory_full_info().uss
        fully_shard(model, joined, source=source)
        assert max(used) - before < LIMIT_BYTES, f"{(max(used) - before) / 1e6:.1f} MB"
        assert len(used) >= BIG_BYTES // weight_files.WINDOW_BYTES
        sample = next(shardwell.iter_full_state_dict(model))[1][::100_003]
        assert torch.equal(sample, torch.arange(0, BIG_BYTES // 8, 100_003, dtype=torch.float32))


@pytest.fixture
def two_process_mesh() -> Iterable[Any]:
    """Returns the mesh of the second of two processes. The first does not exist: nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_parameter_loads_its_part(two_process_mesh: Any, dim: int, tmp_path: Path) -> None:
    plain = nn.Linear(6, 5, bias=False)
    path = write(tmp_path / "m.safetensors", plain.state_dict())
    expected = plain.weight.detach().tensor_split([3], dim)[1]
    local = torch.empty_like(expected, device="meta")
    whole = DTensor.from_local(
        local, two_process_mesh, [Shard(dim)], run_check=False, shape=plain.weight.shape, stride=plain.weight.stride()
    )
    model = nn.Linear(6, 5, bias=False, device="meta")
    model.weight = parameter = nn.Parameter(whole)
    fully_shard(model, session(), source=from_safetensors(model, path))
    model.unshard()  # type: ignore[operator]
    assert model.weight is parameter and model.weight.shape == (5, 6) and model.weight.device.type == "cpu"
    assert torch.equal(model.weight.to_local(), expected)  # type: ignore[attr-defined]
