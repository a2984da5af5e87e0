"""Parsing of memory sizes."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40})


def parse_size(text: str) -> int:
    """Returns the bytes in a text such as ``4GiB``, ``512 MB`` or ``65536``. For argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a value such as 4GiB, 512MB or 65536")
    return int(float(match[1]) * _UNITS[match[2].upper()])
