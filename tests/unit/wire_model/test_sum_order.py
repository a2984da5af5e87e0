"""The order of additions that reduction groups name, compared with numpy bit for bit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from shardwell_server.coordinator.checkpoints.manifests import require_same_run
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.shard.arithmetic.reduction import reduce_shard
from shardwell_server.shard.restart import shard_record
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_wire.checkpoints.manifest import REDUCTION_GROUPS, Manifest
from shardwell_wire.errors import RunMismatchError, WorldError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.model.topology import World, checked_groups
from shardwell_wire.v1 import common_pb2, coordinator_pb2

Array = np.ndarray[tuple[int], np.dtype[np.generic]]

NUMEL = 700_001
"""Several of the slices in which a server adds fp32 values, with an odd rest."""


def gradients(dp: int, dtype: torch.dtype = torch.float32, numel: int = 501) -> list[torch.Tensor]:
    """Returns values of very different sizes, so that every order of additions has its own bits."""
    generator = torch.Generator().manual_seed(dp)
    exponents = torch.randint(-8, 9, (dp, numel), generator=generator)
    return list((torch.randn(dp, numel, generator=generator) * 2.0**exponents).to(dtype))


def numpy_sum(terms: Mapping[int, Array], dp: int, groups: Sequence[int]) -> Array | None:
    """Adds in the order of the groups, written without regard to memory. None: no rank has a gradient."""
    sums: list[Array | None] = [terms.get(rank) for rank in range(dp)]
    for size in groups or (dp,):
        sums = [in_order(sums[start : start + size]) for start in range(0, len(sums), size)]
    (total,) = sums
    return total


def in_order(terms: Sequence[Array | None]) -> Array | None:
    total: Array | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else np.add(total, term)
    return total


def added(terms: Mapping[int, torch.Tensor], dp: int, groups: Sequence[int]) -> torch.Tensor:
    out = torch.full_like(next(iter(terms.values())), float("nan"))
    return SumOrder(dp, groups).add(sorted(terms.items()), out, Scratch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("dp", "groups"), [(8, ()), (8, (4, 2)), (8, (2, 4)), (8, (2, 2, 2)), (6, (3, 2)), (12, (2, 3, 2)), (1, ())]
)
def test_groups_are_added_from_the_innermost_outwards(dp: int, groups: tuple[int, ...], dtype: torch.dtype) -> None:
    terms = gradients(dp, dtype)
    expected = numpy_sum({rank: term.numpy() for rank, term in enumerate(terms)}, dp, groups)
    assert expected is not None
    assert added(dict(enumerate(terms)), dp, groups).numpy().tobytes() == expected.tobytes()


def test_every_order_has_its_own_bits() -> None:
    terms = dict(enumerate(gradients(8)))
    sums = [added(terms, 8, groups).numpy().tobytes() for groups in ((), (4, 2), (2, 4), (2, 2, 2))]
    assert len(set(sums)) == 4


def test_ranks_without_a_gradient_are_left_out() -> None:
    terms = gradients(8)
    for count in (1, 2, 3, 5):
        for present in itertools.combinations(range(8), count):
            some = {rank: terms[rank] for rank in present}
            expected = numpy_sum({rank: term.numpy() for rank, term in some.items()}, 8, (2, 2, 2))
            assert expected is not None
            assert added(some, 8, (2, 2, 2)).numpy().tobytes() == expected.tobytes(), present


def test_minus_zero_survives() -> None:
    term = torch.tensor([-0.0])
    assert added({5: term}, 8, (4, 2)) is term
    assert np.signbit(added({1: term, 5: term}, 8, (4, 2)).item())


@pytest.mark.parametrize("groups", [(), (2, 2), (4,)])
def test_server_reduces_slice_by_slice_with_the_same_bits(groups: tuple[int, ...]) -> None:
    terms = gradients(4, numel=NUMEL)
    out = torch.empty_like(terms[0])
    reduce_shard([list(enumerate(terms))], SumOrder(4, groups), [out], [192], buffer=None)
    expected = numpy_sum({rank: term.numpy() for rank, term in enumerate(terms)}, 4, groups)
    assert expected is not None
    assert out.numpy().tobytes() == (expected / np.float32(4)).tobytes()


def test_16_bit_gradients_are_added_in_float32_and_rounded_once() -> None:
    terms = gradients(4, torch.bfloat16)
    for present in ([0, 1, 2, 3], [0, 2], [1, 2, 3]):
        out = torch.empty_like(terms[0])
        own = [(rank, terms[rank]) for rank in present]
        reduce_shard([own], SumOrder(4, (2, 2)), [out], [0], buffer=None)
        expected = numpy_sum({rank: term.float().numpy() for rank, term in own}, 4, (2, 2))
        assert expected is not None
        assert torch.equal(out, torch.from_numpy(expected / np.float32(4)).bfloat16()), present


def test_groups_of_a_rank() -> None:
    order = SumOrder(12, (2, 3, 2))
    assert order.groups_of(7) == [range(6, 8), range(6, 12), range(12)]
    assert SumOrder(3).groups_of(1) == [range(3)]
    assert all(map(order.is_group, ([6, 7], [0, 1, 2, 3, 4, 5], list(range(12)))))
    assert not any(map(order.is_group, ([], [7], [7, 8], [7, 6], [6, 7, 8], [6, 7, 8, 9], [12, 13, 14])))


def test_one_group_is_the_default() -> None:
    assert checked_groups(8, ()) == checked_groups(8, [8]) == checked_groups(1, [1]) == ()
    assert checked_groups(8, [4, 2]) == (4, 2)


@pytest.mark.parametrize(
    ("dp", "groups", "message"),
    [
        (
            8,
            (4, 4),
            "reduction_groups=(4, 4): expected sizes that multiply to dp=8, the number of data ranks, got 4 * 4 = 16",
        ),
        (6, (4,), "expected sizes that multiply to dp=6, the number of data ranks, got 4 = 4"),
        (8, (2,) * 17, "reduction_groups has 17 sizes: expected at most 16 of at least 2"),
        (8, (8, 1), "reduction_groups=(8, 1): expected integers of at least 2, got 1"),
        (8, (-4, -2), "expected integers of at least 2, got -4"),
        (8, (4.0, 2), "expected integers of at least 2, got 4.0"),
    ],
)
def test_groups_that_do_not_fit_the_world_are_refused(dp: int, groups: tuple[int, ...], message: str) -> None:
    with pytest.raises(WorldError, match=re.escape(message)):
        checked_groups(dp, groups)


def settings_of(*groups: int) -> RunSettings:
    config = coordinator_pb2.RunConfig(world=World(dp=8).to_proto(), reduction_groups=groups)
    return RunSettings.from_proto(config, world_size=0)


def test_settings_of_a_run_keep_the_groups() -> None:
    settings = settings_of(4, 2)
    assert settings.reduction_groups == (4, 2)
    assert RunSettings.from_proto(settings.to_proto(), world_size=0) == settings
    assert settings_of(8) == settings_of()
    with pytest.raises(RunMismatchError, match=r"has reduction_groups=\(4, 2\), but .* asks for reduction_groups=\(\)"):
        settings.require_same("r", settings_of())


def test_checkpoint_belongs_to_runs_with_its_groups() -> None:
    manifest = Manifest(
        run="r",
        run_id="1",
        checkpoint_id="c",
        step=0,
        created=0.0,
        world=World(dp=8),
        seed=0,
        units=(),
        files=(),
        extra={REDUCTION_GROUPS: [4, 2]},
    )
    require_same_run(manifest, "r", settings_of(4, 2), "c")
    with pytest.raises(RunMismatchError, match=r"has reduction_groups=\(4, 2\), but this .* reduction_groups=\(2, 4\)"):
        require_same_run(manifest, "r", settings_of(2, 4), "c")


def test_record_of_a_shard_keeps_the_groups() -> None:
    layout = UnitLayout.from_proto(common_pb2.UnitSpec(name="u"))
    spec = ShardSpec(
        run=RunIdentity("r", "1"),
        layout=layout,
        index=0,
        start_bytes=0,
        stop_bytes=0,
        dp=8,
        reduction_groups=(4, 2),
    )
    description = shard_record.ShardDescription(spec=spec, version=0, values="v", files={})
    assert shard_record.decode(description.encode(shard_record.encode_spec(spec))).spec == spec


def test_mean_over_context_parallel_ranks_divides_by_all_parts_of_sequences() -> None:
    order, terms = SumOrder(2, num_contributors=4, cp=2), gradients(8, numel=5)
    out = torch.empty(5)
    reduced = reduce_shard([list(enumerate(terms))], order, [out], [0], buffer=None)
    expected = (((terms[0] + terms[1]) + terms[2]) + terms[3]) + (((terms[4] + terms[5]) + terms[6]) + terms[7])
    assert reduced.gradients[0] is not None and torch.equal(reduced.gradients[0], expected / 4)
    assert order.key != SumOrder(2, num_contributors=4).key
