"""Context parallelism: the ranks of a replica compute on parts of the same sequences, and attend over all of them.

Note: [Attention over parts]
    A layer's keys and values are gathered for one call of attention at a time, and again in its backward, which
    computes the attention a second time. So a trainer keeps only its part of the sequences for the backward. The
    gradients of keys and values are exchanged and added in rank order, which gives the same bits in every run.

    With balanced parts, rank ``r`` of ``n`` has the chunks ``r`` and ``2n - 1 - r`` of ``2n``. Under a causal mask, a
    chunk attends to the chunks up to its own, so all ranks have equally much to compute.

Note: [Replacing attention]
    The attribute of ``torch.nn.functional`` is replaced in the ``with`` block, and a mode of torch catches calls by
    scripts that imported the function before. The mode alone is not enough: torch disables it in a backward, which may
    compute checkpointed layers again, and in functions such as ``multi_head_attention_forward``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from shardwell.grid.process_group import is_lost_peer
from shardwell.seeds import derive_seed, seed_generators
from shardwell.training.batch_fingerprint import fingerprint
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.session import Session

_PLAIN: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

_SEQUENCE_DIM = 2
"""Dimension of queries, keys and values, ``[batch, heads, length, width]``, that is the sequence."""


class ContextParallel:
    """Divides sequences over the context-parallel ranks of a replica. Made after ``join``, in ``train``.

    In its ``with`` block, ``torch.nn.functional.scaled_dot_product_attention`` attends over whole sequences. All other
    layers must treat the positions of a sequence separately. Every rank pushes its gradients, and the shard servers
    compute the mean over all data ranks and context-parallel ranks. So a loss that is the mean over a rank's tokens
    trains with the mean over all tokens::

        context = ContextParallel(session)
        for step in session.steps(1000):
            for tokens, targets in step.batches(batch):                # whole sequences, the same on all ranks
                tokens, targets = context.split(tokens, targets)
                positions = context.positions(tokens)
                with context:
                    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())
                    loss.backward()

    Also works in a world with ``cp=1``, where it changes nothing. In an evaluation between two steps, all trainers of
    the replica compute the same batches in the block. It raises ``ReplicaLostError`` if one of them is lost.

    Args:
        session: The session. If ``cp`` is above 1, all trainers of the replica make the object together.
        load_balance: Whether ranks have equally much to compute under a causal mask. A rank then has two separate
            chunks of each sequence, and lengths must be multiples of ``2 * cp``. False: one contiguous chunk, and
            multiples of ``cp``, which models need that make a mask from positions.
        device_type: Device type of the replica's mesh.

    Raises:
        UsageError: This trainer plays no logical rank or several.
        DeadlineError: The other trainers of the replica did not call in ``wait_limit_s``.
    """

    def __init__(self, session: Session, *, load_balance: bool = True, device_type: str = "cpu") -> None:
        self.cp, self.cp_rank, self._session = session.world.cp, session.cp_rank or 0, session
        self._items, self._balanced, self._device_type = session.in_flight.items, load_balance, device_type
        self._group = session.replica_mesh(device_type)["cp"].get_group() if self.cp > 1 else None
        self._entered: list[ExitStack] = []

    def split(self, *tensors: torch.Tensor, dim: int = 1) -> Any:
        """Returns this rank's part of whole sequences.

        All context-parallel ranks of a replica must call it with equal tensors. It compares the bytes of all ranks.

        Args:
            *tensors: Tensors with equally long sequences, such as tokens and targets ``[batch, length]``. Targets must
                have been shifted: the next token of a part's last one belongs to another rank.
            dim: The dimension that is the sequence.

        Returns:
            The part of the tensor, or a tuple of the parts of several.

        Raises:
            UsageError: The length is not a multiple of the number of chunks, or the ranks have different tensors.
        """
        if not tensors:
            raise UsageError("ContextParallel.split needs at least one tensor")
        if self._group is not None:
            for tensor in tensors:
                self._check_length(tensor, dim)
            self._require_same(tensors)
        parts = tuple(self._part(tensor, dim) for tensor in tensors)
        return parts if len(parts) > 1 else parts[0]

    def positions(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Returns the positions in the whole sequence of the elements of a part. int64. [1, length of the part]

        Pass them to the model, as ``position_ids`` to those of Hugging Face: a rank's part begins at another position.

        Args:
            part: A result of ``split``, on the device of the positions.
            dim: The dimension that is the sequence.
        """
        whole = torch.arange(part.shape[dim] * self.cp, device=part.device)
        return self._part(whole, 0).unsqueeze(0)

    def __enter__(self) -> Self:
        stack = ExitStack()
        if self._group is not None:
            # Dropout must differ between the parts of a sequence. What the script draws afterwards must not.
            seed = derive_seed(int(torch.randint(1 << 62, ())), "context", self.cp_rank)
            devices: list[int] | None = None if self._device_type == "cuda" else []
            stack.enter_context(self._session.replica_in_use())
            stack.enter_context(torch.random.fork_rng(devices=devices))
            seed_generators(seed)
            stack.enter_context(_replaced_attention(self))
            stack.enter_context(_AttentionMode(self))
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)
        if error is not None and self._group is not None and is_lost_peer(error):
            raise self._session.replica_lost_error(error) from error

    # ---- the parts ----

    @property
    def _num_chunks(self) -> int:
        return self.cp * 2 if self._balanced else self.cp

    def _chunks_of(self, cp_rank: int) -> list[int]:
        """Returns the chunks of a rank's part, in the order of the part."""
        return [cp_rank, 2 * self.cp - 1 - cp_rank] if self._balanced else [cp_rank]

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self._group is None:
            return tensor
        chunks = tensor.chunk(self._num_chunks, dim)
        return torch.cat([chunks[index] for index in self._chunks_of(self.cp_rank)], dim)

    def _check_length(self, tensor: torch.Tensor, dim: int) -> None:
        length = tensor.shape[dim]
        if length == 0 or length % self._num_chunks:
            balance = ", or load_balance=False for multiples of cp" if self._balanced else ""
            raise UsageError(
                f"a sequence has length {length} (dim {dim} of {tuple(tensor.shape)}), but cp={self.cp} needs a "
                f"multiple of {self._num_chunks}: pad or cut the sequences{balance}"
            )

    def _require_same(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Raises UsageError if the ranks have different sequences, which would train silently with a mixture."""
        number = fingerprint(tensors)
        most = torch.tensor([number, -number], device=self._control_device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        if most[0] != -most[1]:
            own = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
            raise UsageError(
                f"the context-parallel ranks of this replica split different sequences (rank {self.cp_rank}: {own}): "
                "each of them must get the whole batch of its dp rank, and split it in the same order"
            )

    @property
    def _control_device(self) -> str:
        return "cpu" if dist.get_backend(self._group) == "gloo" else self._device_type

    # ---- attention ----

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, **options: Any
    ) -> torch.Tensor:
        """Returns the attention of this rank's queries to the keys and values of all ranks.

        Args:
            query: This rank's queries. [batch, heads, length of the part, width]
            is_causal: Whether a position attends only to itself and those before it.
            **options: ``scale`` and ``enable_gqa``.
        """
        self._items.attention_calls += 1
        if torch.is_autocast_enabled(query.device.type):  # the backward runs without autocast
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        apply: Callable[..., torch.Tensor] = _Attention.apply
        return apply(self, is_causal, options, query, key, value)

    def attend_to_whole(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        """Returns the attention of this rank's queries to the keys and values of whole sequences."""
        with _plain_attention():
            return self._attend_to_whole(query, keys, values, is_causal, options)

    def _attend_to_whole(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        if not is_causal:
            return _PLAIN(query, keys, values, **options)
        own = self._chunks_of(self.cp_rank)
        size = query.shape[_SEQUENCE_DIM] // len(own)
        found = []
        for chunk, queries in zip(own, query.chunk(len(own), _SEQUENCE_DIM), strict=True):
            stop = (chunk + 1) * size
            seen_keys, seen_values = keys.narrow(_SEQUENCE_DIM, 0, stop), values.narrow(_SEQUENCE_DIM, 0, stop)
            mask = {"attn_mask": causal_lower_right(size, stop)} if chunk else {"is_causal": True}
            found.append(_PLAIN(queries, seen_keys, seen_values, **mask, **options))
        return torch.cat(found, _SEQUENCE_DIM)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns whole sequences of keys or values, from the parts of all ranks."""
        part = part.contiguous()
        parts = part.new_empty(self.cp, *part.shape)
        dist.all_gather(list(parts.unbind()), part, group=self._group)
        chunks: dict[int, torch.Tensor] = {}
        for cp_rank, each in enumerate(parts):
            own = self._chunks_of(cp_rank)
            chunks.update(zip(own, each.chunk(len(own), _SEQUENCE_DIM), strict=True))
        return torch.cat([chunks[index] for index in range(self._num_chunks)], _SEQUENCE_DIM)

    def add_up(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the sum over the ranks of gradients of whole sequences. Adds in rank order."""
        chunks = whole.chunk(self._num_chunks, _SEQUENCE_DIM)
        parts = [
            torch.cat([chunks[index] for index in self._chunks_of(cp_rank)], _SEQUENCE_DIM)
            for cp_rank in range(self.cp)
        ]
        sent = torch.stack(parts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=self._group)
        total = received[0]
        for each in received[1:]:
            total = total + each
        return total


class _Local(threading.local):
    is_plain = False
    """Whether calls of attention in this thread are those of this module."""


_local = _Local()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Lets calls of attention in this thread through. The function must be torch's own: ``CausalBias`` compares it."""
    before, _local.is_plain = _local.is_plain, True
    replaced, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _PLAIN
    try:
        yield
    finally:
        _local.is_plain, F.scaled_dot_product_attention = before, replaced


@contextmanager
def _replaced_attention(context: ContextParallel) -> Iterator[None]:
    """Replaces attention in all threads: backwards on a GPU run in a thread of their own."""

    @functools.wraps(_PLAIN)
    def attention(*args: Any, **options: Any) -> torch.Tensor:
        return _PLAIN(*args, **options) if _local.is_plain else _attend(context, *args, **options)

    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


class _AttentionMode(TorchFunctionMode):
    """Replaces calls of attention in this thread. See Note: [Replacing attention]."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _PLAIN and not _local.is_plain:
            return _attend(self._context, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    context: ContextParallel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Checks a call of ``scaled_dot_product_attention``, whose arguments these are."""
    if attn_mask is not None:
        raise UsageError(
            f"context parallelism: attention got an attn_mask of shape {tuple(attn_mask.shape)}, which covers a part "
            "of the sequences only. Use is_causal=True or no mask. For a model that makes a mask from positions, use "
            "ContextParallel(session, load_balance=False), and pass no padding mask"
        )
    if dropout_p:
        raise UsageError(
            f"context parallelism: dropout of attention weights is not supported, got dropout_p={dropout_p}: set it to "
            "0"
        )
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in (query, key, value))
    if not plain or query.ndim != 4 or not query.shape[2] == key.shape[2] == value.shape[2]:
        shapes = ", ".join(f"{type(each).__name__}{tuple(each.shape)}" for each in (query, key, value))
        raise UsageError(
            "context parallelism: expected queries, keys and values of equal length as tensors "
            f"[batch, heads, length, width], got {shapes}. Cross-attention and caches of earlier tokens are not "
            "supported"
        )
    return context.attend(query, key, value, is_causal=is_causal, **options)


class _Attention(torch.autograd.Function):
    """See Note: [Attention over parts]."""

    @staticmethod
    def forward(
        ctx: Any,
        context: ContextParallel,
        is_causal: bool,
        options: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        ctx.context, ctx.is_causal, ctx.options = context, is_causal, options
        ctx.save_for_backward(query, key, value)
        return context.attend_to_whole(query, context.gather(key), context.gather(value), is_causal, options)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        context, (query, key, value) = ctx.context, ctx.saved_tensors
        inputs = [query.detach(), context.gather(key), context.gather(value)]
        with torch.enable_grad():
            for each in inputs:
                each.requires_grad_()
            output = context.attend_to_whole(*inputs, ctx.is_causal, ctx.options)
        of_query, of_keys, of_values = torch.autograd.grad(output, inputs, gradients[0])
        return None, None, None, of_query, context.add_up(of_keys), context.add_up(of_values)
