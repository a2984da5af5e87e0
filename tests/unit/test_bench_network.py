"""The pure parts of the benchmark's network: rates, counters, who may build one."""

import pytest

from benchmarks.network import (
    LinkCounters,
    Network,
    NetworkError,
    Rate,
    parse_counters,
    require_means,
)

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
        Network(num_hosts, None)
