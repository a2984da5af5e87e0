"""Becomes a trainer that dies with its launcher: ``python -I trainer_start.py LAUNCHER_PID PROGRAM ARGUMENTS...``.

A program of its own, because code between fork and exec is unsafe in a launcher that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel to end this process with its parent, then becomes the program named."""
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        raise SystemExit("the launcher is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
