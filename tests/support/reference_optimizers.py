"""Simple implementations of optimizers that torch does not have, from their papers."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion, as in github.com/google/automl/blob/master/lion/lion_pytorch.py."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = moment * beta1 + p.grad * (1 - beta1)
                p.add_(torch.sign(update), alpha=-group["lr"])
                moment.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Lamb(torch.optim.Optimizer):
    """LAMB: You et al. 2020, Algorithm 2, with the identity as scaling function."""

    def __init__(self, params: Any, lr: float, betas=(0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p] or {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                self.state[p] = state
                state["t"] += 1
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m = state["m"] / (1 - beta1 ** state["t"])
                v = state["v"] / (1 - beta2 ** state["t"])
                r = m / (v.sqrt() + group["eps"])
                if group["weight_decay"]:
                    r = r.add(p, alpha=group["weight_decay"])
                x_norm, r_norm = p.norm().item(), r.norm().item()
                ratio = x_norm / r_norm if x_norm > 0 and r_norm > 0 else 1.0
                p.add_(r, alpha=-group["lr"] * ratio)
