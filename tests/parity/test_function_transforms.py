"""Transforms of ``torch.func`` compute through a sharded model what they compute through a plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.support.module_parity import Sharded, wrap_children

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it

X, V = torch.ones(4), torch.arange(4.0)

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda model: jvp(model, (X,), (V,))[1],
    "vjp": lambda model: vjp(model, X)[1](V)[0],
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "jacrev": lambda model: jacrev(model)(X),
    "jacfwd": lambda model: jacfwd(model)(X),
    "hessian": lambda model: hessian(lambda x: model(x).pow(2).sum())(X),
    "vmap": lambda model: vmap(model)(torch.stack([X, V])),
    "vmap of grad": lambda model: vmap(grad(lambda x: model(x).sum()))(torch.stack([X, V])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    sharded = Sharded(copy.deepcopy(plain), wrap_children, prefetch_bytes=0)
    for _ in range(3):  # between steps, whose graphs are ordinary ones
        assert torch.equal(TRANSFORMS[name](sharded.model), TRANSFORMS[name](plain))
        sharded.model(X).sum().backward()
        sharded.step()
        plain.load_state_dict(sharded.state())
