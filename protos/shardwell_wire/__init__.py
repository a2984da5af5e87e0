"""What clients and servers must agree on, byte for byte."""
