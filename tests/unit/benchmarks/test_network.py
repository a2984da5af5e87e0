"""Tests for the slow-network benchmark: rates, requirements, tables and arguments."""

import pytest

from benchmarks.network import Network, NetworkError, Rate, check_requirements
from benchmarks.network_trainer import KINDS
from benchmarks.slow_network import MODEL, NAMES, Samples, count_parameters, parse_arguments, to_section


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("1gbit", 1e9), ("200mbit", 2e8), ("64kbit", 64_000), ("9600bit", 9600)],
)
def test_rate_is_parsed_in_notation_of_tc(text: str, bits_per_s: float) -> None:
    assert Rate(text).bits_per_s == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "0mbit", "1.5gbit", "-1mbit", "1gbps", "1 gbit", "1GBIT", "1gbit; ls"]
)
def test_rate_with_ambiguous_notation_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        Rate(text)


def test_bucket_holds_a_millisecond_and_at_least_two_segments() -> None:
    assert Rate("10gbit").burst_bytes == 1_250_000
    assert Rate("200mbit").burst_bytes == 128 << 10
    assert Rate("200mbit").qdisc() == ["tbf", "rate", "200mbit", "burst", "131072", "latency", "50ms"]


def test_minimum_transfer_time_follows_from_rate() -> None:
    assert Rate("1gbit").seconds(125_000_000) == 1.0


def test_network_requires_root_and_names_missing_tools() -> None:
    with pytest.raises(NetworkError, match="need root"):
        check_requirements(1000, [])
    with pytest.raises(NetworkError, match="not installed: ip, tc"):
        check_requirements(0, ["ip", "tc"])
    check_requirements(0, [])


@pytest.mark.parametrize("num_hosts", [0, -1, 201])
def test_invalid_number_of_hosts_is_rejected(num_hosts: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 200"):
        Network(num_hosts)


def test_model_has_documented_number_of_parameters() -> None:
    assert count_parameters(MODEL) == 29_479_936


def samples(seconds: float) -> Samples:
    return Samples(step_s=[seconds], received_bytes=[125e6])


def test_section_shows_ratios_to_ddp_and_best_fsdp2() -> None:
    measured = {"ddp": samples(2.0), "fsdp2": samples(4.0), "fsdp2-keep": samples(3.0), "shardwell-int8": samples(1.5)}
    section = to_section(Rate("1gbit"), measured)
    assert "| Shardwell, int8 both ways | 1.50 (1.50 - 1.50) | 0.50 | 0.75 | 125.0 | 1.00 |" in section
    assert "| DDP (gloo) | 2.00 (2.00 - 2.00) | 0.67 | 1.00 | 125.0 | 1.00 |" in section


def test_section_without_baselines_has_no_ratios() -> None:
    section = to_section(Rate("1gbit"), {"shardwell-fp32": samples(1.0)})
    assert "| Shardwell, fp32 | 1.00 (1.00 - 1.00) | - | - | 125.0 | 1.00 |" in section


def test_every_kind_has_a_name() -> None:
    assert set(NAMES) == set(KINDS)


@pytest.mark.parametrize("wrong", [["--rates", "fast"], ["--rounds", "0"], ["--steps", "-1"], ["--groups", "nccl"]])
def test_invalid_arguments_are_rejected(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(wrong)
