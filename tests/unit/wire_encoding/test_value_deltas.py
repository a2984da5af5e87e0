"""Deltas between two streams of 16-bit values: exact, never larger than they must be, and checked when applied."""

import contextlib

import numpy as np
import pytest

from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.value_deltas import BLOCK_NUMEL, GROUP_BLOCKS
from shardwell_wire.errors import CorruptDataError

GROUP = GROUP_BLOCKS * BLOCK_NUMEL
SIZES = [0, 1, 17, 255, 256, 257, 4096, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 300]


def delta_of(before: np.ndarray, after: np.ndarray) -> bytes:
    pieces = value_deltas.encode(before.tobytes(), after.tobytes(), 2 * before.nbytes + 1000)
    assert pieces is not None
    return b"".join(pieces)


def applied(delta: bytes, before: np.ndarray) -> np.ndarray:
    stream = bytearray(before.tobytes())
    value_deltas.apply(delta, memoryview(stream), "unit 'layer'")
    return np.frombuffer(stream, dtype=np.uint16)


def changed_copy(before: np.ndarray, share: float, largest: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    steps = random.integers(-largest, largest + 1, len(before))
    steps[random.random(len(before)) >= share] = 0
    return (before + steps.astype(np.int64)).astype(np.uint16)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("largest", [1, 127, 128, 70_000])
def test_an_applied_delta_gives_the_new_stream(numel, share, largest):
    before = np.random.default_rng(1).integers(0, 1 << 16, numel, dtype=np.uint16)
    after = changed_copy(before, share, largest)
    delta = delta_of(before, after)
    np.testing.assert_array_equal(applied(delta, before), after)
    assert len(delta) <= -(-numel // BLOCK_NUMEL) * (1 + 2 * BLOCK_NUMEL)


def test_every_pattern_of_bits_arrives():
    """Also infinities, NaN with any payload, and both zeros: a delta knows integers only."""
    before = np.arange(1 << 16, dtype=np.uint16)
    after = np.random.default_rng(0).permutation(before)
    np.testing.assert_array_equal(applied(delta_of(before, after), before), after)


def test_an_unchanged_block_takes_one_byte():
    before = np.random.default_rng(1).integers(0, 1 << 16, 10 * BLOCK_NUMEL, dtype=np.uint16)
    assert delta_of(before, before) == bytes(10)


@pytest.mark.parametrize(
    ("changed", "step", "size_bytes"),
    [
        (1, 1, 1 + 2),  # place and difference
        (31, -127, 1 + 62),
        (31, 128, 1 + 62 + 62),  # place, escape and value
        (32, 1, 1 + 32 + 32),  # mask and differences
        (223, 1, 1 + 32 + 223),
        (224, 1, 1 + 256),  # all differences
        (256, -128, 1 + 512),  # new values
        (256, 1, 1 + 256),
    ],
)
def test_a_block_has_the_smallest_encoding(changed, step, size_bytes):
    before = np.full(BLOCK_NUMEL, 1000, dtype=np.uint16)
    after = before.copy()
    after[:changed] += np.uint16(step & 0xFFFF)
    delta = delta_of(before, after)
    assert len(delta) == size_bytes
    np.testing.assert_array_equal(applied(delta, before), after)


def test_a_delta_beyond_the_limit_is_given_up():
    before = np.zeros(GROUP * 3, dtype=np.uint16)
    after = np.random.default_rng(0).integers(0, 1 << 16, GROUP * 3, dtype=np.uint16)
    assert value_deltas.encode(before.tobytes(), after.tobytes(), before.nbytes // 2) is None


def test_a_stream_of_odd_size_is_refused():
    with pytest.raises(ValueError, match="a stream of 3 bytes"):
        value_deltas.encode(b"abc", b"abd", 100)


BEFORE = np.full(BLOCK_NUMEL + 10, 7, dtype=np.uint16)


@pytest.mark.parametrize(
    ("delta", "problem"),
    [
        (b"", "has 0 of the 2 bytes of the table, at byte 0 of 0"),
        (b"\x00", "has 1 of the 2 bytes of the table"),
        (b"\x00\x00\x00", "has 1 bytes more than its blocks, at byte 2 of 3"),
        (b"\x23\x00", "has table entry 35, expected at most 34"),
        (b"\xff\x00", "has table entry 255"),
        (b"\x02\x00\x05", "has 1 of the 2 bytes of the places"),
        (b"\x02\x00\x05\x05\x01\x01", "lists places of changed values that do not rise"),
        (b"\x02\x00\x05\x04\x01\x01", "lists places of changed values that do not rise"),
        (b"\x02\x00\x04\x05\x01", "has 1 of the 2 bytes of the differences"),
        (b"\x01\x00\x04\x80\x01", "has 1 of the 2 bytes of the values"),
        (b"\x20\x00" + bytes(31), "has 31 of the 32 bytes of the masks"),
        (b"\x22\x00" + bytes(511), "has 511 of the 512 bytes of the values"),
        (b"\x00\x01\x0a\x01", "changes values after the end of the stream"),
        (b"\x00\x22" + b"\x01" * 512, "changes values after the end of the stream"),
    ],
)
def test_a_malformed_delta_is_refused(delta, problem):
    with pytest.raises(CorruptDataError) as refused:
        applied(delta, BEFORE)
    assert f"unit 'layer': the delta {problem}" in str(refused.value)


@pytest.mark.parametrize("seed", range(40))
def test_any_bytes_are_applied_or_refused(seed):
    """Damaged deltas never raise another error, and never write beyond the stream."""
    random = np.random.default_rng(seed)
    numel = int(random.integers(1, 3000))
    before = random.integers(0, 1 << 16, numel, dtype=np.uint16)
    delta = bytearray(delta_of(before, changed_copy(before, random.random(), int(random.integers(1, 300)), seed)))
    for _ in range(int(random.integers(1, 8))):
        action, place = random.integers(0, 3), int(random.integers(0, max(1, len(delta))))
        if action == 0 and delta:
            delta[place % len(delta)] = int(random.integers(0, 256))
        elif action == 1:
            del delta[place : place + int(random.integers(1, 50))]
        else:
            delta[place:place] = random.bytes(int(random.integers(1, 50)))
    memory = np.full(numel + 1000, 0xABCD, dtype=np.uint16)
    memory[:numel] = before
    with contextlib.suppress(CorruptDataError):
        value_deltas.apply(bytes(delta), memoryview(memory).cast("B")[: 2 * numel], "a stream")
    assert (memory[numel:] == 0xABCD).all()
