"""Loads every committed stub and serializes a message of each. Run by `make test-protobuf`."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import version

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message_factory import GetMessageClass

import shardwell_wire.v1


def main() -> None:
    count = 0
    for module in pkgutil.iter_modules(shardwell_wire.v1.__path__, "shardwell_wire.v1."):
        stubs = importlib.import_module(module.name)
        descriptor = getattr(stubs, "DESCRIPTOR", None)
        if isinstance(descriptor, FileDescriptor):
            for message in descriptor.message_types_by_name.values():
                empty = GetMessageClass(message)()
                assert type(empty).FromString(empty.SerializeToString()) == empty
                count += 1
    assert count, "no stubs found"
    print(f"protobuf {version('protobuf')}: {count} message types load")


if __name__ == "__main__":
    main()
