"""Loss scaling: ``torch.amp.GradScaler`` for gradients that are on the shard servers.

Small gradients vanish in float16, so the loss is multiplied by a large scale before the backward. Only the servers can
detect whether a gradient then became infinite. The commit of a step updates every parameter on every server or none,
and reports the same result to all trainers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell_wire.errors import UsageError


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for the optimizers of ``shardwell.optim``, with the same methods and scale rule.

    >>> scaler = shardwell.amp.GradScaler()
    >>> session.track(scaler=scaler)
    >>> for step in session.steps(1000):
    ...     for batch in step.batches(dataset, batch_size=8):
    ...         scaler.scale(model(batch).loss).backward()
    ...     scaler.unscale_(optimizer)  # optional, before clipping
    ...     optimizer.clip_grad_norm_(1.0)
    ...     scaler.step(optimizer)
    ...     scaler.update()

    ``step`` commits the step on every trainer. If a gradient on any server is not finite, the update is skipped: the
    parameters and the optimizer's state do not change, and ``update`` lowers the scale on all trainers. Optimizers of
    ``torch.optim`` are handled as torch does.

    Args:
        device: Device of the optimizers that are not sharded.
        init_scale: The first scale. A power of two does not round gradients.
        growth_factor: Factor of the scale after ``growth_interval`` steps without a skip.
        backoff_factor: Factor of the scale after a skipped step.
        growth_interval: Number of consecutive steps without a skip before the scale grows.
        enabled: If False, ``step`` calls the optimizer's, and the other methods do nothing.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._repeats = False
        """True if the last ``step`` committed nothing, because the loop repeats the step."""
        if self._enabled:
            # A trainer that joins a run may call `update` before it has scaled a loss.
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer divide its gradients by the scale; needed only before clipping.

        Raises:
            RuntimeError: ``unscale_`` or ``step`` was already called in this step.
        """
        if not isinstance(optimizer, ShardedOptimizer) or not self._enabled:
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        optimizer.unscale(self.get_scale())
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Commits the step. The parameters change only if every gradient on every server is finite.

        Raises:
            RuntimeError: ``step`` was already called in this step.
            UsageError: A closure was passed.
        """
        if not isinstance(optimizer, ShardedOptimizer) or not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise UsageError("GradScaler.step takes no closure: compute the loss and scale it before the call")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        optimizer.step()
        self._repeats = optimizer.repeats
        state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(optimizer.skipped))}
        state["stage"] = OptState.STEPPED
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale, as in torch. No effect if ``step`` committed nothing because the step is repeated."""
        if not self._repeats:
            super().update(new_scale)
            return
        self._repeats = False
        self._per_optimizer_states.clear()
