"""The largest score before attention's softmax, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_SCORES = 2**26  # held at a time
_CAUSAL_QUERIES = 1024  # multiplied at a time, with the keys that some of them see


def pre_softmax_max(query: Tensor, key: Tensor, *, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """The largest score ``scale * query @ key.T`` that attention's softmax sees, as a float32 scalar.

    Some heads are multiplied at a time, to keep the scores small. Masks other than the causal one are not applied. With
    a negative scale it is ``scale`` times the largest product.

    Args:
        query: ``[batch..., heads, T, D]``, or one head ``[T, D]``.
        key: ``[batch..., kv_heads, S, D]``; fewer heads than ``query`` are repeated, as grouped-query attention does.
        scale: ``D ** -0.5`` if not given.
        is_causal: leave out keys after the query, both counted from the first.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[-3] // key.shape[-3] if min(query.dim(), key.dim()) > 2 else 1
    if groups > 1:
        key = key.repeat_interleave(groups, dim=-3)
    if query.shape[:-2] != key.shape[:-2]:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = (x.expand(*batch, *x.shape[-2:]) for x in (query, key))
    queries, keys = (x.reshape(-1, *x.shape[-2:]) for x in (query, key))
    rows = max(1, min(_CAUSAL_QUERIES, queries.shape[-2]) if is_causal else queries.shape[-2])
    heads = max(1, _MOST_SCORES // max(1, rows * keys.shape[-2]))
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1) if is_causal else None
    largest = []
    for q, k in zip(queries.split(heads), keys.split(heads), strict=True):
        for start in range(0, max(1, q.shape[-2]), rows):
            some = q[:, start : start + rows]
            scores = some @ (k if future is None else k[:, : start + rows]).transpose(-1, -2)
            if future is not None:
                later = scores[..., start:]
                later.masked_fill_(future[: later.shape[-2], : later.shape[-1]], -torch.inf)
            largest.append(scores.amax())
    return (largest[0] if len(largest) == 1 else torch.stack(largest).amax()).float() * scale
