"""Tests for the benchmark of the cost of a unit: arithmetic, table, arguments, and variants without Shardwell."""

import pytest

from benchmarks.unit_cost import PLAIN, Point, Turn, parse_arguments, start_variant, to_section

pytestmark = pytest.mark.usefixtures("_forked_workers")


def turn(step_s: float, trainers_s: float, shards_s: float = 0.0, coordinator_s: float = 0.0) -> Turn:
    return Turn(
        seconds=[step_s] * 10, trainers_cpu_s=trainers_s, shards_cpu_s=shards_s, coordinator_cpu_s=coordinator_s
    )


def measured() -> Point:
    turns = {PLAIN: [turn(0.01, 0.2), turn(0.02, 0.2)], "shm": [turn(0.06, 1.2, 0.8, 0.2), turn(0.08, 1.2, 0.8, 0.2)]}
    return Point(units=100, width=64, dp=2, servers=2, turns=turns)


def test_costs_are_per_unit_and_trainer_beyond_plain_trainers() -> None:
    costs = measured().costs("shm")
    assert costs["wall"] == pytest.approx((70 - 15) / 100)
    assert costs["trainers"] == pytest.approx((1200 - 200) / 10 / 100 / 2)
    assert costs["shards"] == pytest.approx(800 / 10 / 100 / 2)
    assert costs["coordinator"] == pytest.approx(200 / 10 / 100 / 2)
    assert costs["cpu"] == pytest.approx(1.0)
    assert costs["ratio"] == pytest.approx(70 / 15)


def test_the_table_has_a_row_per_transport_and_names_failures() -> None:
    text = to_section(measured(), ["shm", "grpc"], {"grpc": "a worker ended"})
    assert "| shm | 0.55 | 1.00 | 0.50 | 0.40 | 0.10 | 4.67 |" in text
    assert "grpc: failed (a worker ended)" in text


def test_small_models_take_more_steps_per_turn() -> None:
    assert Point(units=10, width=64, dp=1, servers=1).steps == 200
    assert Point(units=1000, width=64, dp=1, servers=1).steps == 10


@pytest.mark.parametrize(
    "arguments",
    [["--units", "0"], ["--dp", "0"], ["--rounds", "0"], ["--transports", "udp"], ["--references", "tcp"]],
)
def test_bad_arguments_are_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)


def losses(variant: str) -> list[float]:
    """Returns the mean loss of each trainer of a variant."""
    with start_variant(Point(units=3, width=8, dp=2, servers=2), variant) as group:
        return [answer["loss"] for answer in group.run(steps=4)]


@pytest.fixture(scope="module")
def plain_losses(_forked_workers: None) -> list[float]:
    return losses(PLAIN)


@pytest.mark.parametrize("variant", ["hooks", "ddp", "floor_shm", "floor_socket"])
def test_references_train_as_plain_trainers_do(variant: str, plain_losses: list[float]) -> None:
    assert losses(variant) == pytest.approx(plain_losses, rel=1e-5)
