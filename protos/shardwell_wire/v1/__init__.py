"""Generated protobuf stubs of package shardwell.v1; see the .proto files beside them."""
