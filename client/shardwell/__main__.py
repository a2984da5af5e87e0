"""``python -m shardwell``: the same as the command ``shardwell``."""

import sys

from shardwell.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
