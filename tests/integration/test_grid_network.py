"""The bytes that a grid sends between two hosts, which are network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.grid import Grid, pipeline_grid, tensor_grid
from benchmarks.grid_network import NUM_HOSTS, measure_link
from benchmarks.network import Network, NetworkError
from examples.gpt import GPTConfig

MODEL = GPTConfig(vocab_size=512, context=16, num_layers=2, num_heads=4, width=256, tied=False)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(NUM_HOSTS)
    try:
        network.__enter__()
    except NetworkError as error:
        pytest.skip(str(error))
    try:
        yield network
    finally:
        network.__exit__()


@pytest.mark.long
@pytest.mark.parametrize("grid", [pipeline_grid(MODEL, length=16), tensor_grid(MODEL, length=16)], ids=["pp", "tp"])
def test_bytes_between_hosts_are_those_of_weights_and_gradients(network: Network, grid: Grid) -> None:
    link = measure_link(network, grid, steps=3)
    assert 0 <= link.deviation < 0.02, link
