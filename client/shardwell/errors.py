"""Every error that Shardwell raises, below ``ShardwellError``. Importing them needs no torch.

>>> try:
...     with reader.pin(version) as pinned:
...         values = pinned.values()
... except shardwell.errors.VersionGoneError as error:
...     print(error.data["kept"])

``shardwell_wire/errors.py`` defines them and shows the tree. ``shardwell.ShardwellError`` and ``shardwell.UsageError``
are the same classes.
"""

from shardwell_wire.errors import *  # noqa: F403
from shardwell_wire.errors import __all__  # noqa: F401
