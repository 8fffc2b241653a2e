"""Two layers that replace torch's after some cuts. Both are subclasses, so ``isinstance`` checks still pass."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadwiseAttention(nn.MultiheadAttention):
    """A `MultiheadAttention` that has lost heads.

    torch derives all sizes from the width of the query. This class takes them from the weights, so heads can be removed
    while the width stays. Parameters, arguments and results are those of torch.
    """

    # torch's fused path would derive the sizes from the query again. It is taken only if this attribute is True.
    _qkv_same_embed_dim = property(lambda _: False, lambda _self, _value: None)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is an attention that can lose heads."""
        # forward() below does not implement bias_k and add_zero_attn, which append a key and a value to every sequence.
        return isinstance(module, nn.MultiheadAttention) and module.bias_k is None and not module.add_zero_attn

    def forward(  # noqa: D102 - torch's own, argument by argument
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # the words of torch
        if query.is_nested:
            return self._nested(query, need_weights=need_weights, average_attn_weights=average_attn_weights)
        single = query.dim() == 2
        swap = not single and not self.batch_first
        sequences = [_batched(tensor, single=single, swap=swap) for tensor in (query, key, value)]
        queries, keys, values = self._projected(sequences)
        mask = self._mask(attn_mask, key_padding_mask, queries)
        mixed, weights = self._attend(queries, keys, values, mask, need_weights=need_weights)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if single:
            return output[0], None if weights is None else weights[0]
        return (output.transpose(0, 1) if swap else output), weights

    def _nested(self, sequences: Tensor, **options: bool) -> tuple[Tensor, Tensor | None]:
        """Attention over a nested tensor, which a `TransformerEncoder` in eval mode makes of padded sequences."""
        # forward() works on plain tensors, so the sequences are padded, masked and nested again.
        lengths = [len(sequence) for sequence in sequences.unbind()]
        padded = sequences.to_padded_tensor(0.0)
        ends = torch.tensor(lengths, device=padded.device)
        padding = torch.arange(padded.shape[1], device=padded.device) >= ends[:, None]
        mixed, weights = self(padded, padded, padded, key_padding_mask=padding, **options)
        return torch.nested.as_nested_tensor([row[:end] for row, end in zip(mixed, lengths, strict=True)]), weights

    def _projected(self, sequences: list[Tensor]) -> list[Tensor]:
        """Queries, keys and values as (batch, heads, length, head width)."""
        weights = self._weights()
        sizes = [len(weight) for weight in weights]
        biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, sizes)
        return [
            _split_heads(F.linear(tensor, weight, bias), self.num_heads)
            for tensor, weight, bias in zip(sequences, weights, biases, strict=True)
        ]

    def _weights(self) -> Sequence[Tensor]:
        """The weights of queries, keys and values, which torch stores separately if their inputs differ in width."""
        of_all: Tensor | None = self.in_proj_weight
        if of_all is None:
            return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        return of_all.chunk(3)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores."""
        masks = [] if padding is None else [_additive(padding, like).view(len(like), 1, 1, -1)]
        if attn_mask is not None:
            mask = _additive(attn_mask, like)
            masks.append(mask.view(len(like), self.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask)
        return sum(masks[1:], masks[0]) if masks else None

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The mixed values, and the attention weights if they are needed."""
        rate = self.dropout if self.training else 0.0
        if not need_weights:  # the fused kernel is faster and does not return weights
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=rate), None
        scores = queries / math.sqrt(queries.shape[-1]) @ keys.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        weights = F.dropout(weights, rate)
        return weights @ values, weights


def _split_heads(tensor: Tensor, heads: int) -> Tensor:
    """(batch, length, heads * width) as (batch, heads, length, width)."""
    return tensor.view(*tensor.shape[:-1], heads, -1).transpose(1, 2)


def _batched(tensor: Tensor, *, single: bool, swap: bool) -> Tensor:
    """A sequence as (batch, length, width), whether it came without a batch or with the length first."""
    if single:
        return tensor[None]
    return tensor.transpose(0, 1) if swap else tensor


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask to add to scores: -inf where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


SELECTED = "selected_channels"


def selecting(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a BatchNorm class that reads a selection of its input's channels.

    >>> selecting(nn.BatchNorm2d)
    <class 'keepk.model.layers.SelectingBatchNorm2d'>
    """
    if hasattr(kind, "reads_selection"):  # it was cut before and already selects
        return kind
    return _selecting_subclass(kind)  # type: ignore[arg-type]  # mypy takes the class for unhashable


@cache
def _selecting_subclass(kind: type[nn.Module]) -> type[nn.Module]:
    # The selection is saved in the state_dict without being a buffer, because an EMA or an average of models would
    # average the indices. That is why moving, saving and loading are written out here.
    class Selecting(kind):  # type: ignore[misc, valid-type]  # of any BatchNorm, known at run time only
        reads_selection = True

        def forward(self, channels: Tensor) -> Tensor:
            return super().forward(channels.index_select(1, getattr(self, SELECTED)))  # type: ignore[no-any-return]

        def _apply(self, move: Callable[[Tensor], Tensor], *further: Any) -> nn.Module:
            super()._apply(move, *further)
            selected, moved = getattr(self, SELECTED), move(getattr(self, SELECTED))
            # These are indices, so only their device changes, never their dtype. A meta tensor (to_empty) has no values
            # to move.
            setattr(self, SELECTED, moved if selected.is_meta else selected.to(moved.device))
            return self

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + SELECTED] = getattr(self, SELECTED)

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *further: Any) -> None:
            super()._load_from_state_dict(state, prefix, *further)
            _load_selection(self, state, prefix + SELECTED, *further[2:])

        def __reduce_ex__(self, _protocol: Any) -> Any:
            """Pickle by the class it extends, since a class made at run time cannot be found by name."""
            return _rebuilt, (kind,), self.__dict__

    Selecting.__name__ = Selecting.__qualname__ = f"Selecting{kind.__name__}"
    return Selecting


def _load_selection(
    module: nn.Module, state: dict[str, Any], key: str, missing: list[str], unexpected: list[str], errors: list[str]
) -> None:
    """Load a selection from a state_dict, with the same errors as a buffer."""
    own = getattr(module, SELECTED)
    if key in unexpected:
        unexpected.remove(key)
    if key not in state:
        missing.append(key)
    elif state[key].shape != own.shape:
        errors.append(f"size mismatch for {key}: {list(state[key].shape)} in the state, {list(own.shape)} here")
    else:
        setattr(module, SELECTED, state[key].detach().to(own.device, copy=True))


def _rebuilt(kind: type[nn.Module]) -> nn.Module:
    made = selecting(kind)
    return made.__new__(made)
