"""Mixtures of experts: each expert is a unit, which a trainer gathers only if its tokens are routed to it.

Hugging Face's models hold the parameters of all experts of a layer in one module, which would be gathered as a whole.
``split_experts`` replaces this module by one module per expert.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from shardwell.module.fully_shard import ShardedModule, sharding_of
from shardwell_wire.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)


class SplitExperts(nn.ModuleList):
    """The experts of a layer, one module each. ``split_experts`` makes it.

    Expert ``i`` is a module of the original class that holds the parameters ``[i : i + 1]`` of the original. It runs
    for the tokens that are routed to it. ``load_state_dict`` also accepts the original's entries.

    Args:
        experts: A module of Hugging Face's that holds the parameters of all experts.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__(_part(experts, number) for number in range(_num_experts(experts)))
        self.train(experts.training)
        self.register_load_state_dict_pre_hook(_cut_state)  # type: ignore[no-untyped-call]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the sum of the experts' outputs for each token, added in the order of the experts.

        Args:
            hidden_states: [tokens, width]
            top_k_index: Experts of each token. Numbers from ``len(self)`` stand for no expert. [tokens, k]
            top_k_weights: Factors of their outputs. [tokens, k]
        """
        result = torch.zeros_like(hidden_states)
        numbers = [number for number in sorted(set(top_k_index.flatten().tolist())) if number < len(self)]
        chosen = [self[number] for number in numbers]
        gathered = 0
        for position, (number, expert) in enumerate(zip(numbers, chosen, strict=True)):
            if gathered < len(chosen):
                gathered = position + _gather_ahead(chosen[position:])
            # The tokens in the order of the original forward, which decides how the sums of gradients are rounded.
            slot, token = torch.where((top_k_index == number).T)
            only = torch.zeros_like(token)[:, None]
            output = expert(hidden_states[token], only, top_k_weights[token, slot, None])
            result.index_add_(0, token, output.to(result.dtype))
        return result


def split_experts(model: Model) -> Model:
    """Replaces modules that hold the parameters of all experts of a layer by one module per expert, in place.

    For models of Hugging Face (Mixtral, Qwen MoE, OLMoE, DeepSeek, GPT-OSS, ...), before ``auto_wrap``, which makes
    each expert a unit. A trainer then gathers, computes and pushes only the experts that its tokens are routed to.

    The results are those of the model's own loop over the experts (``experts_implementation="eager"``) bit for bit.
    Other implementations add in another order. An expert without a token in the whole step gets no gradient, and
    optimizers skip it. In the original model, its gradient is zero.

    Expert ``i`` has the parameters ``experts.i.NAME`` instead of the rows ``i`` of ``experts.NAME``.
    ``load_state_dict`` of the result accepts both. ``merge_experts`` reverts the call.

    Args:
        model: A model that is not sharded. Its parameters may be on the meta device.

    Returns:
        The argument.

    Raises:
        UsageError: The model has no such module, or its experts cannot be split; the message says why.
    """
    found = [
        (parent, name, module)
        for parent in list(model.modules())
        if not isinstance(parent, SplitExperts)
        for name, module in parent.named_children()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and isinstance(_num_experts(module), int)
    ]
    if not found:
        raise UsageError(
            f"split_experts: {type(model).__name__} has no module of Hugging Face's that holds the parameters of "
            "several experts. If each expert is a module, pass its class: auto_wrap(model, session, experts={Expert})"
        )
    for _, name, module in found:
        _check(name, module)
    made: dict[nn.Module, SplitExperts] = {}
    for parent, name, module in found:
        if module not in made:
            made[module] = SplitExperts(module)
        setattr(parent, name, made[module])
    return model


def merge_experts(model: Model) -> Model:
    """Reverts ``split_experts`` in place: the parameters of a layer's experts become those of one module again.

    Args:
        model: A model that is not sharded; ``unwrap`` makes a sharded one plain.

    Returns:
        The argument.

    Raises:
        UsageError: The model has no split experts, or they are sharded.
    """
    found = [
        (parent, name, module)
        for parent in list(model.modules())
        for name, module in parent.named_children()
        if isinstance(module, SplitExperts)
    ]
    if not found:
        raise UsageError(f"merge_experts: {type(model).__name__} has no experts that split_experts has made")
    if any(isinstance(part, ShardedModule) for _, _, module in found for part in module.modules()):
        raise UsageError("merge_experts: the experts are sharded: call shardwell.unwrap(model) first")
    made: dict[nn.Module, nn.Module] = {}
    for parent, name, module in found:
        if module not in made:
            made[module] = _merged(module)
        setattr(parent, name, made[module])
    return model


def experts_of(model: nn.Module, kinds: Collection[type[nn.Module]] = ()) -> list[nn.Module]:
    """Returns the modules of the given classes, and the experts that ``split_experts`` has made."""
    classes = tuple(kinds)
    found = [part for part in model.modules() if isinstance(part, classes)]
    return found + [expert for part in model.modules() if isinstance(part, SplitExperts) for expert in part]


def _gather_ahead(experts: Sequence[nn.Module]) -> int:
    """Starts to gather the experts that run next, and returns the number of those that are gathered or on their way."""
    sharded = [expert for expert in experts if isinstance(expert, ShardedModule)]
    if len(sharded) < len(experts):
        return len(experts)
    units = [unit for expert in sharded for unit in sharding_of(expert).own_units]
    if len(units) != len(experts):  # the experts have no unit each: the unit around them is gathered
        return len(experts)
    return sharding_of(experts[0]).units.passes.gather_ahead(units)


def _num_experts(module: nn.Module) -> Any:
    return getattr(module, "num_experts", None)


def _check(name: str, module: nn.Module) -> None:
    """Raises UsageError if a module cannot be divided by experts."""
    kind, number = type(module).__name__, _num_experts(module)
    if isinstance(module, ShardedModule):
        raise UsageError(f"split_experts: {name!r} ({kind}) is sharded already: call split_experts before auto_wrap")
    shapes = {key: tuple(value.shape) for key, value in module.named_parameters()}
    unfit = [f"{key} {shape}" for key, shape in shapes.items() if "." in key or shape[:1] != (number,)]
    unfit += [f"{key} (buffer)" for key, _ in module.named_buffers()]
    if unfit:
        raise UsageError(
            f"split_experts: {name!r} ({kind}) has {', '.join(unfit)}, expected parameters of its own whose first "
            f"dim is the number of experts, {number}: leave the model as it is; its layers are gathered as a whole"
        )


def _with_parameters(module: nn.Module, parameters: dict[str, nn.Parameter | None], num_experts: int) -> Any:
    """Returns a copy of a module with other parameters."""
    parts = copy.copy(module)
    own = {key: copy.copy(value) if isinstance(value, dict | set) else value for key, value in vars(module).items()}
    parts.__dict__ = {**own, "num_experts": num_experts}  # hooks are kept in dicts, which two modules must not share
    parts._parameters = parameters
    parts._modules = copy.deepcopy(module._modules)
    return parts


def _part(experts: nn.Module, number: int) -> nn.Module:
    """Returns a module with the parameters of one expert, in memory of their own."""
    parameters = {
        name: None
        if value is None
        else nn.Parameter(value.detach()[number : number + 1].clone(), requires_grad=value.requires_grad)
        for name, value in experts._parameters.items()
    }
    part: nn.Module = _with_parameters(experts, parameters, 1)
    return part


def _merged(experts: SplitExperts) -> nn.Module:
    parameters: dict[str, nn.Parameter | None] = {}
    for name, value in experts[0]._parameters.items():
        if value is None:
            parameters[name] = None
        else:
            rows = [expert.get_parameter(name).detach() for expert in experts]
            parameters[name] = nn.Parameter(torch.cat(rows), requires_grad=value.requires_grad)
    merged: nn.Module = _with_parameters(experts[0], parameters, len(experts))
    return merged.train(experts.training)


def _cut_state(module: SplitExperts, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Replaces the entries of the original module by entries of the experts."""
    errors: list[str] = others[-1]
    for name in list(module[0]._parameters):
        whole = state.pop(f"{prefix}{name}", None)
        if whole is None:
            continue
        if whole.dim() == 0 or whole.shape[0] != len(module):
            errors.append(f"size mismatch for {prefix}{name}: got {tuple(whole.shape)}, expected {len(module)} experts")
            continue
        state.update({f"{prefix}{number}.{name}": whole[number : number + 1] for number in range(len(module))})
