"""``python -m shardwell_server``: the same as the command ``shardwell-server``."""

import sys

from shardwell_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
