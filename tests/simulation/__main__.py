"""``python -m tests.simulation``: explores schedules, or replays one."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Explores random schedules.")
    parser.add_argument("--schedules", type=int, default=10_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--seed", type=int, help="run this schedule only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no schedule after this time")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many failed schedules")
    parser.add_argument(
        "--old-kinds", action="store_true", help="leave out the kinds of faults and jobs that were added last"
    )
    parser.add_argument("--asynchronous", action="store_true", help="asynchronous modes only")
    parser.add_argument("--trace", action="store_true", help="print what happens, with virtual times in seconds")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    from tests.simulation.schedules import ASYNCHRONOUS_SHARE, Simulation

    logging.disable(logging.DEBUG if options.trace else logging.WARNING)
    logging.getLogger().setLevel(logging.INFO)
    share = 1.0 if options.asynchronous else ASYNCHRONOUS_SHARE
    seeds = range(options.first, options.first + options.schedules) if options.seed is None else [options.seed]
    started, failed, kinds, total = time.monotonic(), [], Counter[str](), 0
    gc.disable()
    sys.unraisablehook = lambda _: None  # the cleanup code of tasks that are left at the end of a schedule
    for seed in seeds:
        outcome = Simulation(seed, with_more=not options.old_kinds, asynchronous=share, trace=options.trace).run()
        total += 1
        kinds.update(" ".join(fault.split()[1:]).split(" is ")[-1].split(" for ")[0] for fault in outcome.faults)
        for line in outcome.lines:
            print(line)
        if outcome.problems:
            failed.append(seed)
            only = " --asynchronous" if options.asynchronous else ""
            print(f"FAILED: python -m tests.simulation --seed {seed}{only} --trace")
            for fault in outcome.faults:
                print(f"    {fault}")
            for problem in outcome.problems[:5]:
                print(f"  {problem}", flush=True)
        if total % 200 == 0:
            gc.collect()
        if len(failed) >= options.failures or time.monotonic() - started > options.seconds:
            break
    wall_s = time.monotonic() - started
    print(f"{total} schedules in {wall_s:.1f} s, {sum(kinds.values())} faults, {len(failed)} failed: {failed[:20]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
