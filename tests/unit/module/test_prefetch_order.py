"""Predictions of ``UsageOrder``: which units come next."""

from __future__ import annotations

from shardwell.module.residency import MAX_UNITS_AHEAD, Phase, UnitSettings, UsageOrder

F, B = Phase.FORWARD, Phase.BACKWARD


class FakeUnit:
    """A unit with an index and settings only."""

    def __init__(self, index: int) -> None:
        self.index, self.settings = index, UnitSettings()


def observe(order: UsageOrder, events: list[tuple[FakeUnit, Phase]]) -> list[list[int]]:
    """Returns the prediction after each event."""
    predicted = []
    for unit, phase in events:
        order.observe(unit, phase)
        predicted.append([following.index for following in order.upcoming()])
    return predicted


def test_nothing_is_predicted_at_first_and_everything_in_the_second_step() -> None:
    a, b, c = FakeUnit(0), FakeUnit(1), FakeUnit(2)
    step = [(a, F), (b, F), (c, F), (c, B), (b, B), (a, B)]
    order = UsageOrder()
    assert observe(order, step) == [[], [], [], [], [], []]
    observe(order, step)
    assert observe(order, step) == [[1, 2], [2], [], [1, 0], [0], []]


def test_two_uses_of_a_unit_are_distinguished_by_the_preceding_use() -> None:
    tied, a, b = FakeUnit(0), FakeUnit(1), FakeUnit(2)
    forward = [(tied, F), (a, F), (b, F), (tied, F)]
    order = UsageOrder()
    for _ in range(2):
        observe(order, [*forward, (tied, B), (b, B), (a, B), (tied, B)])
    assert observe(order, forward) == [[1, 2, 0], [2, 0], [0], []]


def test_forward_only_loop_predicts_the_next_round() -> None:
    a, b = FakeUnit(0), FakeUnit(1)
    order = UsageOrder()
    for _ in range(2):
        observe(order, [(a, F), (b, F)])
    assert observe(order, [(a, F)]) == [[1, 0] * (MAX_UNITS_AHEAD // 2)]


def test_repeated_use_counts_once() -> None:
    a, b = FakeUnit(0), FakeUnit(1)
    order = UsageOrder()
    observe(order, [(a, F), (b, F), (b, B), (a, B), (a, F), (b, F), (b, B), (b, B), (b, B), (a, B)])
    assert observe(order, [(a, F), (a, F)]) == [[1], [1]]


def test_look_ahead_is_bounded() -> None:
    many = [FakeUnit(index) for index in range(2 * MAX_UNITS_AHEAD)]
    order = UsageOrder()
    for _ in range(2):
        observe(order, [(unit, F) for unit in many])
    assert len(observe(order, [(many[0], F)])[0]) == MAX_UNITS_AHEAD


def test_forward_order_restarts_after_a_backward_or_the_end_of_a_step() -> None:
    a, b = FakeUnit(3), FakeUnit(5)
    order = UsageOrder()
    observe(order, [(a, F), (b, F), (a, F)])
    assert order.forward == [3, 5]
    observe(order, [(b, B), (b, F)])
    assert order.forward == [5]
    order.end_forward()
    assert order.forward == [5]
    observe(order, [(a, F)])
    assert order.forward == [3]
