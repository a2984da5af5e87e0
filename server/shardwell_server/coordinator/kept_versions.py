"""The older versions of a run that readers can read: published ones, and the last ones before the newest.

The coordinator decides which versions the servers keep, and names them in each ``Update``. The servers reserve memory
for ``RunSettings.keep_versions`` of them, so training never needs this memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from shardwell_wire.errors import CapacityError, InvalidRequestError, NotFoundError, VersionGoneError

_MAX_NAME = 200
_MAX_LOST = 100


class KeptVersions:
    """Which versions a run keeps besides the newest. ``limit``: ``RunSettings.keep_versions``."""

    def __init__(self, run: str, limit: int) -> None:
        self._run, self._limit = run, limit
        self.names: dict[str, int] = {}
        """Published versions by name."""
        self.lost: dict[str, tuple[int, str]] = {}
        """Published versions that are lost, by name, and why."""
        self._lost: dict[int, str] = {}
        """Why the servers do not have versions that would be kept."""
        self._since = 0
        """No server has older versions than this one, except published ones."""

    def before(self, newest: int) -> list[int]:
        """Returns the versions that are kept while ``newest`` is the newest version, in order.

        Published versions use the same memory: with each of them, one unpublished version less is kept.
        """
        named = {version for version in self.names.values() if version < newest}
        return sorted({*named, *self._unnamed(named, newest)})

    def _unnamed(self, named: set[int], newest: int) -> list[int]:
        first = max(self._since, newest - self._limit)
        others = [version for version in range(first, newest) if version not in named]
        kept = others[-free:] if (free := self._limit - len(named)) > 0 else []
        return [version for version in kept if version not in self._lost]

    def _forget_gap(self, newest: int) -> None:
        """Call before a name is removed or moved: the servers do not have the versions that its memory could keep."""
        left = self._unnamed({version for version in self.names.values() if version < newest}, newest)
        self._since = max(self._since, left[0] if left else newest)

    def check_kept(self, version: int, newest: int) -> None:
        """Raises VersionGoneError if a version is older than ``newest`` and is not kept."""
        if version >= newest or version in (kept := self.before(newest)):
            return
        listed = ", ".join(map(str, kept))
        older = f", and it keeps {listed}" if kept else " and keeps no older ones"
        lost = self._lost.get(version)
        raise VersionGoneError(
            f"run {self._run!r} is at version {newest}{older}: version {version} is no longer available"
            + (". A new run with join(keep_versions=N) keeps more" if lost is None else f": {lost}"),
            version=version,
            newest=newest,
            kept=listed,
        )

    def publish(self, name: str, version: int, newest: int) -> None:
        """Names a version.

        Raises:
            InvalidRequestError: The name is empty, too long, not printable or a number, or the version does not exist.
            VersionGoneError: The version is not kept any more.
            CapacityError: All versions that the run keeps are published under other names.
        """
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise InvalidRequestError(f"name={name!r}: expected 1 to {_MAX_NAME} printable characters")
        if name.isdecimal():
            raise InvalidRequestError(f"name={name!r}: expected a name that is not a number, which means a version")
        if version > newest:
            raise InvalidRequestError(f"run {self._run!r} is at version {newest}: version {version} does not exist yet")
        self.check_kept(version, newest)
        used = {published for other, published in self.names.items() if other != name} | {version}
        if len(used) > self._limit:
            names = ", ".join(sorted(repr(other) for other in self.names if other != name))
            taken = f", and all are published: {names}" if names else ""
            advice = "remove one (shardwell publish RUN NAME --remove), or " if names else ""
            raise CapacityError(
                f"run {self._run!r} keeps {self._limit} older versions{taken}: {advice}create a new run with "
                f"join(keep_versions={len(used)})",
                run=self._run,
            )
        if name in self.names:
            self._forget_gap(newest)
        self.names[name] = version
        self.lost.pop(name, None)

    def remove(self, name: str, newest: int) -> int:
        """Removes a name. Returns the version. Raises NotFoundError if no version has it."""
        if name in self.lost:
            return self.lost.pop(name)[0]
        self.find(name)
        self._forget_gap(newest)
        return self.names.pop(name)

    def find(self, name: str) -> int:
        """Returns the version that is published under a name.

        Raises:
            VersionGoneError: The version is lost.
            NotFoundError: No version has the name.
        """
        if name in self.lost:
            version, why = self.lost[name]
            raise VersionGoneError(f"run {self._run!r} has lost {name!r}, version {version}: {why}", version=version)
        if name not in self.names:
            known = ", ".join(sorted(map(repr, self.names))) or "none"
            raise NotFoundError(f"run {self._run!r} has no version {name!r}; published versions: {known}", name=name)
        return self.names[name]

    def lose(self, versions: Iterable[int], newest: int, why: str) -> str:
        """Notes that versions cannot be read any more. Returns what is lost by this, for users. Empty: nothing.

        The names of published versions stay, without the memory, until they are removed.
        """
        gone = sorted(set(versions).intersection(self.before(newest)))
        self._lost = {old: reason for old, reason in self._lost.items() if old >= newest - self._limit}
        self._lost.update(dict.fromkeys(gone, why))
        if named := {name: version for name, version in self.names.items() if version in gone}:
            self._forget_gap(newest)
        self.lost.update({name: (self.names.pop(name), why) for name in named})
        for name in list(self.lost)[:-_MAX_LOST]:
            del self.lost[name]
        known = [f"{version}" + "".join(f" ({name})" for name in named if named[name] == version) for version in gone]
        return f"versions that readers could read are lost: {', '.join(known)}: {why}" if gone else ""

    def start_anew(self, version: int) -> str:
        """Drops all versions, because the run was loaded from a checkpoint at a version. Returns as ``lose``."""
        newest = max([version, *self.names.values()]) + 1
        lost = self.lose(self.names.values(), newest, f"the run was loaded from its checkpoint of step {version}")
        self._lost, self._since = {}, version
        return lost

    def to_json(self) -> str:
        """Returns the durable state as text, for ``restore``."""
        gone = list(self._lost.items())
        return json.dumps({"names": self.names, "since": self._since, "lost": self.lost, "gone": gone})

    def restore(self, text: str) -> None:
        """Restores what ``to_json`` returned, after a coordinator restart. Empty: a run of an older release."""
        if text:
            stored = json.loads(text)
            self.names, self._since = stored["names"], stored["since"]
            self.lost, self._lost = stored.get("lost", {}), dict(stored.get("gone", []))
