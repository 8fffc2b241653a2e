"""Deprecated alias of `keepk.model.layers`, kept for one release: models that were pickled after a cut name it."""

from keepk.model.layers import HeadwiseAttention, _rebuilt

__all__ = ["HeadwiseAttention", "_rebuilt"]
