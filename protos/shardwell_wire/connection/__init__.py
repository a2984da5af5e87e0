"""Connections: gRPC channels, frames of the socket transport and of calls, protocol versions."""
