"""Step proposals of a replica: the union of its trainers' proposals, and comparison on the units that they hold."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.steps.proposals import Proposals, StepProposal, require_same_proposal, union_of
from shardwell_wire.errors import HyperparameterMismatchError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.v1 import common_pb2


def part(rank: int) -> Parameter:
    return Parameter("w", (2,), "float32", whole_shape=(4,), offsets=(2 * rank,))


LAYOUTS = [
    UnitLayout("a", (Parameter("a", (3,), "float32"),)),
    UnitLayout("b@tp0", (part(0),)),
    UnitLayout("c", (Parameter("c", (3,), "float32"),), pp_ranks=(1,)),
    UnitLayout("b@tp1", (part(1),), tp_rank=1),
]
"""Units of a grid with two tensor-parallel ranks and two stages."""

HELD = {"t0p0": (1, 0), "t0p1": (2,), "t1p0": (0, 3), "t1p1": (2,)}
"""Units that each trainer holds, in the order of its forward."""

LEADERS = list(HELD)


def proposal(trainer: str, *, lr: float = 0.1, group: int = 0, units: tuple[int, ...] | None = None) -> StepProposal:
    held = HELD[trainer.partition("/")[0]] if units is None else units
    optimizer = common_pb2.OptimizerStep(
        algorithm="adamw",
        groups=[common_pb2.ParameterGroup(hyperparameters={"lr": lr}), common_pb2.ParameterGroup()],
        units=[common_pb2.UnitGroups(unit_index=unit, group_indices=[group]) for unit in held],
    )
    return StepProposal(trainer, f"trainer {trainer}", optimizer, 1.0, held, None)


def all_but(*absent: str, **options: StepProposal) -> Proposals:
    proposals = Proposals()
    for trainer in HELD:
        if trainer not in absent:
            proposals.add(options.get(trainer, proposal(trainer)))
    return proposals


def test_the_union_names_the_units_of_all_trainers() -> None:
    leading = all_but().leading(LEADERS, LAYOUTS)
    assert leading is not None
    assert [unit.unit_index for unit in leading.optimizer.units] == [0, 1, 2, 3]
    assert leading.unit_order == (1, 0, 3, 2), "stage by stage"
    assert (leading.trainer, leading.optimizer.algorithm, len(leading.optimizer.groups)) == ("t0p0", "adamw", 2)
    alone = proposal("t0p0")
    assert union_of([alone], LAYOUTS) is alone


def test_nothing_is_committed_before_all_leaders_have_proposed() -> None:
    for absent in HELD:
        assert all_but(absent).leading(LEADERS, LAYOUTS) is None
    assert all_but().leading([], LAYOUTS) is None


@pytest.mark.parametrize(
    ("trainer", "other", "message"),
    [
        ("t0p1", proposal("t0p1", lr=0.2), "lr of parameter group 0 is 0.1 at trainer t0p0.* 0.2 at trainer t0p1"),
        ("t1p0", proposal("t1p0", group=1), "parameter group of 'a' is 0 at trainer t0p0"),
        ("t1p1", proposal("t1p1", group=1), "parameter group of 'c' is 0 at trainer t0p1"),
    ],
)
def test_a_leader_that_differs_is_rejected(trainer: str, other: StepProposal, message: str) -> None:
    proposals = all_but(**{trainer: other})
    assert proposals.leading(LEADERS, LAYOUTS) is None
    with pytest.raises(HyperparameterMismatchError, match=message):
        proposals.reject_if_different(trainer, LEADERS, LAYOUTS)
    assert trainer not in proposals
    for same in LEADERS[:1]:
        proposals.reject_if_different(same, LEADERS, LAYOUTS)


def test_other_replicas_are_compared_on_the_units_that_they_hold() -> None:
    proposals = all_but()
    for trainer in HELD:
        proposals.add(proposal(f"{trainer}/1"))
        proposals.reject_if_different(f"{trainer}/1", LEADERS, LAYOUTS)
    proposals.add(proposal("t0p0/1", units=(1,)))
    proposals.reject_if_different("t0p0/1", LEADERS, LAYOUTS)
    proposals.add(proposal("t0p0/1", group=1))
    with pytest.raises(HyperparameterMismatchError, match="parameter group of 'a'"):
        proposals.reject_if_different("t0p0/1", LEADERS, LAYOUTS)
    assert proposals.leading(LEADERS, LAYOUTS) is not None


def test_without_a_grid_a_missing_unit_is_a_difference() -> None:
    layouts = [UnitLayout(name, (Parameter(name, (3,), "float32"),)) for name in "ab"]
    proposals = Proposals()
    for trainer, units in (("x", (0, 1)), ("y", (0,)), ("z", ())):
        proposals.add(proposal(trainer, units=units))
    with pytest.raises(
        HyperparameterMismatchError, match=r"parameter group of 'b' is 0 at trainer x.* -1 at trainer y"
    ):
        proposals.reject_if_different("y", ["x"], layouts)
    with pytest.raises(
        HyperparameterMismatchError, match=r"parameter group of 'a' is 0 at trainer x.* -1 at trainer z"
    ):
        proposals.reject_if_different("z", ["x"], layouts)


def test_leaders_agree_on_a_unit_that_their_stages_share() -> None:
    layouts = [*LAYOUTS, UnitLayout("w", (Parameter("w", (3,), "float32"),), pp_ranks=(0, 1))]
    first, last = proposal("t0p0", units=(1, 0, 4)), proposal("t0p1", units=(4, 2))
    union = union_of([first, last], layouts)
    assert [unit.unit_index for unit in union.optimizer.units] == [0, 1, 2, 4]
    assert union.unit_order == (1, 0, 4, 2), "the shared unit has the place that the first stage gives it"
    require_same_proposal(first, last, layouts)
    with pytest.raises(HyperparameterMismatchError, match=r"parameter group of 'w' is 0 at .*, but 1 at"):
        require_same_proposal(first, proposal("t0p1", units=(4, 2), group=1), layouts)
