"""Something around a module's forward, inside whatever hooks the module has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Around = Callable[..., Any]
"""Called with the module's forward and its arguments; returns what the forward returns."""


class WrappedForward:
    """A module's ``forward`` attribute. An object rather than a closure, so that it is copied with its module.

    Args:
        forward: What was the module's forward.
        around: Calls it.
    """

    def __init__(self, forward: Callable[..., Any], around: Around) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._around = forward, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._forward, *args, **kwargs)


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Has ``around`` call the module's forward from now on; what was put around it before is inside."""
    _leave_out_of_graphs()
    module.forward = WrappedForward(module.forward, around)


@functools.cache
def _leave_out_of_graphs() -> None:
    """Has ``torch.compile`` compile what is wrapped, not the wrapper.

    Not while this module is imported: that would import the compiler, which takes seconds.
    """
    leave_out = torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    WrappedForward.__call__ = leave_out(WrappedForward.__call__)  # type: ignore[method-assign]
