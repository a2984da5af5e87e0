"""Becomes a trainer that ends with its launcher: ``python -I trainer_start.py LAUNCHER_PID PROGRAM ARGUMENTS...``.

This is a separate program because code between fork and exec is unsafe in a launcher with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel to kill this process when its parent ends, then executes the program."""
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        raise SystemExit("the launcher has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
