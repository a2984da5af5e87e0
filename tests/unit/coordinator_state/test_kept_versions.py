"""Which versions a run keeps besides the newest, and what their names cost."""

from __future__ import annotations

import json

import pytest

from shardwell_server.coordinator.kept_versions import KeptVersions
from shardwell_wire.errors import CapacityError, InvalidRequestError, NotFoundError, VersionGoneError


def kept(limit: int, **names: int) -> KeptVersions:
    found = KeptVersions("r", limit)
    found.restore(json.dumps({"names": names, "since": 0}))
    return found


@pytest.mark.parametrize(
    "limit, names, newest, expected",
    [
        (0, {}, 5, []),
        (2, {}, 0, []),
        (2, {}, 1, [0]),
        (2, {}, 5, [3, 4]),
        (3, {"a": 1}, 9, [1, 7, 8]),
        (3, {"a": 1, "b": 1}, 9, [1, 7, 8]),
        (3, {"a": 8}, 9, [6, 7, 8]),
        (2, {"a": 1, "b": 4}, 9, [1, 4]),
        (2, {"a": 9}, 9, [7, 8]),
    ],
)
def test_newest_and_published_versions_share_the_memory(
    limit: int, names: dict[str, int], newest: int, expected: list[int]
) -> None:
    assert kept(limit, **names).before(newest) == expected


def test_published_version_stays_kept_from_the_next_update_on() -> None:
    versions = kept(3)
    oldest = versions.before(20)[0]
    versions.publish("a", oldest, 20)
    assert all(oldest in versions.before(newest) for newest in range(20, 60))
    assert versions.remove("a", 60) == oldest
    assert versions.before(60) == [58, 59], "the servers have dropped version 57"
    assert versions.before(61) == [58, 59, 60]


def test_version_that_no_server_has_is_not_listed_when_a_name_moves() -> None:
    versions = kept(3, best=4)
    assert versions.before(10) == [4, 8, 9]
    versions.publish("best", 10, 10)
    assert versions.before(10) == [8, 9]
    assert versions.before(12) == [9, 10, 11]
    restored = KeptVersions("r", 3)
    restored.restore(versions.to_json())
    assert restored.before(10) == [8, 9]


def test_names_that_use_all_memory_leave_no_other_version() -> None:
    versions = kept(2, a=3, b=5)
    versions.remove("a", 9)
    assert (versions.before(9), versions.before(10)) == ([5], [5, 9])


def test_run_that_was_loaded_has_no_older_versions() -> None:
    versions = kept(3, a=98)
    assert versions.start_anew(100) == (
        "versions that readers could read are lost: 98 (a): the run was loaded from its checkpoint of step 100"
    )
    assert (versions.names, versions.before(100), versions.before(102)) == ({}, [], [100, 101])
    with pytest.raises(VersionGoneError, match="at version 100 and keeps no older ones"):
        versions.publish("a", 98, 100)


def test_versions_that_a_server_lacks_are_not_listed_and_say_why() -> None:
    versions = kept(3, a=1, b=1)
    assert versions.before(9) == [1, 7, 8]
    assert versions.lose([1, 2, 7], 9, "server 's1' burnt") == (
        "versions that readers could read are lost: 1 (a) (b), 7: server 's1' burnt"
    )
    assert versions.lose([1, 7], 9, "again") == "", "each loss is told once"
    restored = KeptVersions("r", 3)
    restored.restore(versions.to_json())
    for found in (versions, restored):
        assert found.before(9) == [8], "the servers do not have version 6"
        assert found.before(12) == [9, 10, 11], "the names of lost versions take no memory"
        with pytest.raises(VersionGoneError, match="version 7 is no longer available: server 's1' burnt"):
            found.check_kept(7, 9)
        with pytest.raises(VersionGoneError, match="has lost 'a', version 1: server 's1' burnt"):
            found.find("a")
        assert found.remove("a", 9) == 1
        found.publish("b", 9, 9)
        assert (found.find("b"), found.lost) == (9, {})


def test_version_that_does_not_exist_yet_is_not_published() -> None:
    with pytest.raises(InvalidRequestError, match="is at version 10: version 12 does not exist yet"):
        kept(3).publish("a", 12, 10)


def test_version_that_is_gone_is_not_published() -> None:
    with pytest.raises(VersionGoneError, match="at version 9, and it keeps 7, 8: version 3 is no longer") as caught:
        kept(2).publish("a", 3, 9)
    assert caught.value.data["kept"] == "7, 8"


def test_no_more_versions_are_published_than_are_kept() -> None:
    versions = kept(2, a=3, b=5)
    with pytest.raises(CapacityError, match=r"keeps 2 older versions, and all are published: 'a', 'b': remove one"):
        versions.publish("c", 9, 9)
    versions.publish("c", 5, 9)  # the same version under another name takes no memory
    versions.remove("b", 9)
    versions.remove("c", 9)
    versions.publish("c", 9, 9)
    assert versions.names == {"a": 3, "c": 9}


def test_run_that_keeps_nothing_publishes_nothing() -> None:
    with pytest.raises(CapacityError, match=r"keeps 0 older versions: create a new run with join\(keep_versions=1\)"):
        kept(0).publish("a", 9, 9)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "1200"])
def test_unusable_names_are_refused(name: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"expected (1 to 200 printable characters|a name that is not a number)"
    ):
        kept(2).publish(name, 9, 9)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="no version 'x'; published versions: 'a', 'b'"):
        kept(2, b=1, a=2).find("x")
