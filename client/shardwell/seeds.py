"""Derived seeds, which every process computes alike."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import sys

import torch


def derive_seed(*parts: int | str) -> int:
    """Returns a seed below 2**63 for numbers and names. Equal arguments give equal seeds on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int) -> None:
    """Seeds torch's default generators, as ``torch.manual_seed`` does."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed formats the call stack for each kind of device that is not in use, which takes longer.
        torch.default_generator.manual_seed(seed)


def seed_batch(seed: int) -> None:
    """Seeds all global generators from which making a batch may draw: torch's, Python's and NumPy's."""
    seed_generators(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def batch_generators() -> bytes:
    """Returns the states of these generators on the CPU."""
    version, numbers, gauss = random.getstate()
    states = {"torch": torch.get_rng_state().numpy().tobytes().hex(), "python": [version, numbers, gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return json.dumps(states).encode()


def restore_batch_generators(states: bytes) -> None:
    """Sets the states that ``batch_generators`` has returned in another process."""
    found = json.loads(states)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(found["torch"]), dtype=torch.uint8))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(found["numpy"])


@functools.cache
def _has_accelerator() -> bool:
    """True if this build of torch supports a device beside the CPU."""
    return torch.accelerator.current_accelerator() is not None
