"""Generated protobuf stubs of package shardwell_wire.v1; see the .proto files beside them."""
