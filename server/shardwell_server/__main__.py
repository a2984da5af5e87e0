"""``python -m shardwell_server``: the ``shardwell-server`` command."""

import sys

from shardwell_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
