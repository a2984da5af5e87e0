"""Tests of flat vectors mapped from segments of servers: updates are visible, and writes stay private."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shardwell.transport.shared_vector import SegmentLocation, SharedVector, WrittenPages
from shardwell_server.shard.memory.mapped_memory import ShardFile, SharedMemory
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.host.shared_memory import HEAD_BYTES, UPDATING
from shardwell_wire.model.layout import BLOCK_BYTES
from tests.support.fake_gpu import fake_gpu


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    with closing(SharedMemory()) as made:
        yield made


class Shards:
    """Consecutive segments, filled with numbers."""

    def __init__(self, shared: SharedMemory, *sizes: int, start_bytes: int = 0, version: int = 0) -> None:
        self.segments: list[ShardFile] = []
        self.places: list[SegmentLocation] = []
        for size in sizes:
            segment = shared.create_shard_file(size, "a shard")
            segment.buffer.copy_(torch.arange(start_bytes, start_bytes + size) % 251)
            segment.show(version)
            self.segments.append(segment)
            self.places.append(SegmentLocation(segment.shared.path, start_bytes, start_bytes + size))
            start_bytes += size

    def vector(self) -> SharedVector:
        return SharedVector("u", self.places)

    def in_files(self) -> list[bytes]:
        return [Path(segment.shared.path).read_bytes()[HEAD_BYTES:] for segment in self.segments]

    def show(self, *versions: int) -> None:
        for segment, version in zip(self.segments, versions, strict=True):
            segment.show(version)


def numbers(start: int, stop: int) -> torch.Tensor:
    return (torch.arange(start, stop) % 251).to(torch.uint8)


def maps_of(paths: Sequence[str]) -> int:
    """Returns how many mappings of these files the process has."""
    return sum(any(path in line for path in paths) for line in Path("/proc/self/maps").read_text().splitlines())


SIZES = [(1,), (BLOCK_BYTES,), (BLOCK_BYTES, BLOCK_BYTES, 777), (3 * BLOCK_BYTES, 0, BLOCK_BYTES + 1), (0, 64)]


@pytest.mark.parametrize("start_blocks", [0, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_segments_are_mapped_side_by_side(shared: SharedMemory, sizes: tuple[int, ...], start_blocks: int) -> None:
    start = start_blocks * BLOCK_BYTES
    vector = Shards(shared, *sizes, start_bytes=start).vector()
    assert torch.equal(vector.bytes, numbers(start, start + sum(sizes)))
    assert vector.forget_writes() is None


def test_update_in_place_is_visible(shared: SharedMemory) -> None:
    shards = Shards(shared, BLOCK_BYTES, 100)
    vector = shards.vector()
    assert torch.equal(vector.bytes, numbers(0, BLOCK_BYTES + 100))
    for segment in shards.segments:
        segment.buffer.fill_(200)
    assert set(vector.bytes.tolist()) == {200}


def test_version_is_shown_only_if_every_segment_shows_it(shared: SharedMemory) -> None:
    shards = Shards(shared, BLOCK_BYTES, 0, 100, version=3)
    vector = shards.vector()
    assert vector.shows(3)
    vector.check(3)
    for versions in ((3, 3, 4), (UPDATING, 3, 3), (3, 3, UPDATING), (4, 4, 4)):
        shards.show(*versions)
        assert not vector.shows(3)
        with pytest.raises(VersionGoneError, match="version 3 of unit 'u' was overwritten while this trainer read it"):
            vector.check(3)
    assert vector.shows(4)
    shards.show(4, UPDATING, 4)  # an empty shard has no bytes to read
    assert vector.shows(4)
    for segment in shards.segments:
        segment.close()
    assert not vector.shows(4)


def test_writes_are_private_to_the_process(shared: SharedMemory) -> None:
    shards = Shards(shared, BLOCK_BYTES, 2 * BLOCK_BYTES, 100)
    vector, other, before = shards.vector(), shards.vector(), shards.in_files()
    vector.bytes.fill_(255)
    assert shards.in_files() == before
    assert torch.equal(other.bytes, numbers(0, other.bytes.numel()))
    assert other.forget_writes() is None
    assert vector.forget_writes() == 0
    assert torch.equal(vector.bytes, other.bytes)


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 99])
def test_forget_writes_finds_and_discards_a_written_byte(shared: SharedMemory, at: int) -> None:
    vector = Shards(shared, BLOCK_BYTES, 2 * BLOCK_BYTES, 100).vector()
    parameter = torch.nn.Parameter(vector.bytes.float())  # reading must not count as a write
    assert vector.forget_writes() is None
    view = vector.bytes[at : at + 1]
    version = view._version
    view.data.add_(1)
    assert view._version == version, "torch does not count the write"
    assert vector.forget_writes() == at // BLOCK_BYTES * BLOCK_BYTES
    assert torch.equal(vector.bytes.float(), parameter.detach())
    assert vector.forget_writes() is None


@pytest.mark.parametrize("written", [0, 1, 2])
def test_written_page_is_found_among_many_vectors(shared: SharedMemory, written: int) -> None:
    vectors = [Shards(shared, size, BLOCK_BYTES).vector() for size in (BLOCK_BYTES, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES)]
    ranges, pages = [vector.pages for vector in vectors], WrittenPages()
    sums = [vector.bytes.sum() for vector in vectors]  # reading must not count as a write
    assert not pages.exist(ranges)
    assert not pages.exist(ranges)
    vectors[written].bytes[-1:].fill_(3)
    assert pages.exist(ranges)
    assert not pages.exist([vector.pages for number, vector in enumerate(vectors) if number != written])
    assert vectors[written].forget_writes() is not None
    assert not pages.exist(ranges)
    assert [vector.bytes.sum() for vector in vectors] == sums


def test_no_ranges_have_no_written_page() -> None:
    assert not WrittenPages().exist([])


def test_reader_waits_while_a_segment_is_replaced(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the new file's head is known, the old head would vouch for bytes of the new file."""
    shards, others = Shards(shared, BLOCK_BYTES, BLOCK_BYTES, version=3), Shards(shared, BLOCK_BYTES, version=4)
    vector = shards.vector()
    seen: list[bool] = []
    reader = threading.Thread(target=lambda: seen.append(vector.shows(3)))
    map_segment = vector._map_segment

    def map_slowly(place: SegmentLocation) -> memoryview:
        head = map_segment(place)
        reader.start()
        reader.join(0.1)
        assert not seen
        return head

    monkeypatch.setattr(vector, "_map_segment", map_slowly)
    vector.replace(others.places[0])
    reader.join()
    assert seen == [False]


def test_write_of_the_same_value_is_detected(shared: SharedMemory) -> None:
    """A write makes the page private, so it hides later updates of the server."""
    shards = Shards(shared, BLOCK_BYTES)
    vector = shards.vector()
    vector.bytes.copy_(numbers(0, BLOCK_BYTES))
    shards.segments[0].buffer.fill_(1)
    assert torch.equal(vector.bytes, numbers(0, BLOCK_BYTES)), "the page is private and hides the update"
    assert vector.forget_writes() == 0
    assert set(vector.bytes.tolist()) == {1}


def test_memory_is_unmapped_with_the_last_view(shared: SharedMemory) -> None:
    shards = Shards(shared, BLOCK_BYTES, 100)
    paths = [segment.shared.path for segment in shards.segments]
    servers = maps_of(paths)
    vector = shards.vector()
    assert maps_of(paths) == servers + 4, "two mappings per segment: its bytes and its header"
    view = vector.bytes[10:20]
    del vector
    gc.collect()
    assert maps_of(paths) == servers + 2
    assert torch.equal(view, numbers(10, 20))
    del view
    gc.collect()
    assert maps_of(paths) == servers


def test_segment_that_cannot_be_opened_raises(shared: SharedMemory) -> None:
    shards = Shards(shared, BLOCK_BYTES, 100)
    paths = [segment.shared.path for segment in shards.segments]
    before = maps_of(paths)
    shards.segments[1].close()
    with pytest.raises(FileNotFoundError):
        shards.vector()
    gc.collect()
    assert maps_of(paths) == before


def test_registered_memory_has_the_pages_of_the_file_and_not_those_that_this_process_wrote(
    shared: SharedMemory,
) -> None:
    shards = Shards(shared, 2 * BLOCK_BYTES)
    with fake_gpu() as gpu:
        vector = shards.vector()
        vector.bytes[:10] = 7  # a page of this process only
        registered = vector.registered
        assert registered is not None
        assert gpu.registered == {registered.data_ptr(): 2 * BLOCK_BYTES}
        assert torch.equal(registered, numbers(0, 2 * BLOCK_BYTES))
        shards.segments[0].buffer.fill_(9)
        assert torch.equal(registered, torch.full((2 * BLOCK_BYTES,), 9, dtype=torch.uint8))
        maps = Path("/proc/self/maps").read_text().splitlines()
        (line,) = (line for line in maps if line.startswith(f"{registered.data_ptr():x}-"))
        assert line.split()[1] == "r--s", "CUDA gives a private mapping pages of its own"
        assert vector.registered is registered, "registered once"
        del registered, vector
        gc.collect()
        assert not gpu.registered
