"""Formatting of sizes for human readers."""

from __future__ import annotations


def format_size(count_bytes: int) -> str:
    """Returns a size in the binary unit that keeps the number short, such as ``1.5 MiB``."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
