"""The pure parts of the benchmark's network: rates, counters, who may build one."""

import pytest

from benchmarks.line_process import unshared_bytes
from benchmarks.network import (
    LinkCounters,
    Network,
    NetworkError,
    Rate,
    parse_counters,
    require_means,
)
from benchmarks.slow_network import MODEL, Turns, count_parameters, parse_arguments, summarize, with_ratios
from benchmarks.wire_loss import LossCheck

PROC_NET_DEV = """\
Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    1234      10    0    0    0     0          0     0     1234      10    0    0    0     0       0         0
  eth0: 98765432    700    0    0    0     0          0     0  4567890     600    0    0    0     0       0         0
"""


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


def test_counters_are_read_by_column_and_subtracted() -> None:
    counters = parse_counters(PROC_NET_DEV, "eth0")
    assert counters == LinkCounters(received=98765432, sent=4567890)
    assert counters - LinkCounters(received=98765000, sent=4567000) == LinkCounters(received=432, sent=890)


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(NetworkError, match="no interface 'eth1'"):
        parse_counters(PROC_NET_DEV, "eth1")


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


def test_unshared_memory_is_the_private_pages() -> None:
    rollup = "Rss: 900 kB\nShared_Clean: 500 kB\nPrivate_Clean: 30 kB\nPrivate_Dirty: 370 kB\nPrivate_Hugetlb: 7 kB\n"
    assert unshared_bytes(rollup) == 400 * 1024


def test_ratios_are_to_ddp_and_to_the_better_fsdp2() -> None:
    seconds = {"ddp": 2.0, "fsdp2": 4.0, "fsdp2-prefetch": 3.0, "shardwell-int8": 1.0}
    turns = {kind: Turns(step_s=[time], received_bytes=[125e6]) for kind, time in seconds.items()}
    results = with_ratios({kind: summarize(found, Rate("1gbit")) for kind, found in turns.items()})
    assert results["shardwell-int8"]["step_vs_ddp"] == pytest.approx(1 / 2)
    assert results["shardwell-int8"]["step_vs_fsdp2"] == pytest.approx(1 / 3)
    assert results["ddp"]["link_s"] == pytest.approx(1.0)


def test_without_peers_there_are_no_ratios() -> None:
    results = with_ratios({"shardwell-fp32": summarize(Turns(step_s=[1.0], received_bytes=[1.0]), Rate("1gbit"))})
    assert results["shardwell-fp32"]["step_vs_ddp"] is results["shardwell-fp32"]["step_vs_fsdp2"] is None


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
