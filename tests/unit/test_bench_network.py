"""The pure parts of the slow network's benchmark: rates, who may build one, tables, arguments."""

import pytest

from benchmarks.network import Network, NetworkError, Rate, require_means
from benchmarks.network_trainer import KINDS
from benchmarks.slow_network import MODEL, NAMES, Turns, count_parameters, parse_arguments, to_section
from benchmarks.wire_loss import LossCheck


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("1gbit", 1e9), ("200mbit", 2e8), ("64kbit", 64_000), ("9600bit", 9600)],
)
def test_a_rate_is_read_as_tc_writes_it(text: str, bits_per_s: float) -> None:
    assert Rate(text).bits_per_s == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "0mbit", "1.5gbit", "-1mbit", "1gbps", "1 gbit", "1GBIT", "1gbit; ls"]
)
def test_a_rate_that_tc_would_misread_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        Rate(text)


def test_the_bucket_is_a_millisecond_and_never_too_small_for_a_segment() -> None:
    assert Rate("10gbit").burst_bytes == 1_250_000
    assert Rate("200mbit").burst_bytes == 128 << 10
    assert Rate("200mbit").qdisc() == ["tbf", "rate", "200mbit", "burst", "131072", "latency", "50ms"]


def test_the_least_time_of_a_transfer_follows_from_the_rate() -> None:
    assert Rate("1gbit").seconds(125_000_000) == 1.0


def test_only_root_may_build_a_network_and_missing_tools_are_named() -> None:
    with pytest.raises(NetworkError, match="need root"):
        require_means(1000, [])
    with pytest.raises(NetworkError, match="not installed: ip, tc"):
        require_means(0, ["ip", "tc"])
    require_means(0, [])


@pytest.mark.parametrize("num_hosts", [0, -1, 201])
def test_an_impossible_number_of_hosts_is_refused(num_hosts: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 200"):
        Network(num_hosts)


def test_the_model_has_the_size_that_the_tables_name() -> None:
    assert count_parameters(MODEL) == 29_479_936


def turns(seconds: float) -> Turns:
    return Turns(step_s=[seconds], received_bytes=[125e6])


def test_ratios_are_to_ddp_and_to_the_best_fsdp2() -> None:
    measured = {"ddp": turns(2.0), "fsdp2": turns(4.0), "fsdp2-keep": turns(3.0), "shardwell-int8": turns(1.5)}
    section = to_section(Rate("1gbit"), measured)
    assert "| Shardwell, int8 both ways | 1.50 (1.50 - 1.50) | 0.50 | 0.75 | 125.0 | 1.00 |" in section
    assert "| DDP (gloo) | 2.00 (2.00 - 2.00) | 0.67 | 1.00 | 125.0 | 1.00 |" in section


def test_without_peers_there_are_no_ratios() -> None:
    section = to_section(Rate("1gbit"), {"shardwell-fp32": turns(1.0)})
    assert "| Shardwell, fp32 | 1.00 (1.00 - 1.00) | - | - | 125.0 | 1.00 |" in section


def test_every_kind_has_a_name() -> None:
    assert set(NAMES) == set(KINDS)


@pytest.mark.parametrize("wrong", [["--rates", "fast"], ["--rounds", "0"], ["--steps", "-1"], ["--groups", "nccl"]])
def test_arguments_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(wrong)


def test_the_loss_table_compares_equal_seeds() -> None:
    check = LossCheck(
        steps=10, parameters=1_000_000, unigram_entropy=5.5, losses={"fp32": [3.0, 3.2], "int8": [3.01, 3.17]}
    )
    assert "| fp32 | 3.1000 | 0.2000 | +0.0000 (+0.0000) |" in check.to_markdown()
    assert "| int8 | 3.0900 | 0.1600 | -0.0100 (-0.0300) |" in check.to_markdown()
