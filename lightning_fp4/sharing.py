"""What need not be quantised twice: an input that several layers are given, a weight between two optimizer steps.

Layers that are given the same tensor, as q/k/v and gate/up are, quantise it once (:func:`forms_of`). The quantised
input of the layer that ran last is remembered, in each thread, for as long as the tensor itself is alive and until
another tensor comes. It is used again only by **other** layers, given the very same object with the same version and
memory on the same stream: a layer that runs a second time starts a new forward pass, in which everything is quantised
anew, even if the tensor has been written to in ways that PyTorch does not count (a CUDA graph's replay, for one).

Weights are kept only where someone promises to say when they change (:class:`WeightForms`): optimizers, averages of
weights and other code write to them in ways that PyTorch does not count either.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fp4 import dispatch


class SharedForms:
    """The quantised forms of one tensor."""

    def __init__(self, source: Tensor, state: tuple) -> None:
        self._state = state
        self._users: list[object] = []
        self._made: list[tuple[Any, Any]] = []
        made = self._made
        self._source = weakref.ref(source, lambda _: made.clear())  # memory is not held longer than the tensor's own

    def admit(self, source: Tensor, state: tuple, user: object) -> bool:
        """Whether ``user`` may take what was made from ``source``: the same tensor, unchanged, for the first time."""
        if not self.is_of(source, state) or any(known is user for known in self._users):
            return False
        self._users.append(user)
        return True

    def is_of(self, source: Tensor, state: tuple) -> bool:
        """Whether they are those of ``source``, unchanged as far as PyTorch knows."""
        return self._source() is source and self._state == state

    def get(self, key: Any) -> Any:
        """What was kept under ``key``, ``None`` if nothing was."""
        return next((forms for known, forms in self._made if known == key), None)

    def keep(self, key: Any, forms: Any) -> None:
        """Keep ``forms`` in place of what was kept before."""
        self._made[:] = [(key, forms)]


def _state_of(x: Tensor) -> tuple:
    """Changes when ``x`` is written to or given other memory; and with the stream: no other would wait for results."""
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    return x._version, x.data_ptr(), x.shape, x.stride(), x.dtype, stream


def _may_keep(x: Tensor) -> bool:
    if not dispatch.is_eager((x,)) or x.is_inference():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class _Latest(threading.local):
    forms: SharedForms | None = None


_latest = _Latest()


def forms_of(source: Tensor, user: object) -> SharedForms | None:
    """Where the forms of a layer's input are shared; ``None`` where nothing may be.

    Nothing is shared under compilers and other observers (see :func:`dispatch.is_eager`), where a repeated operator is
    theirs to remove; in inference mode, whose tensors do not count their versions; while a CUDA graph is captured,
    which must not refer to results from before; and of parameters, which fused optimizers write to without counting.

    Args:
        source: the input, as the layer was given it.
        user: stands for the layer; the same object in each of its forward passes.
    """
    if isinstance(source, Parameter) or not _may_keep(source):
        return None
    state = _state_of(source)
    forms = _latest.forms
    if forms is None or not forms.admit(source, state, user):
        forms = _latest.forms = SharedForms(source, state)
        forms.admit(source, state, user)
    return forms


class WeightForms:
    """A layer's quantised weight, kept from one forward pass to the next.

    Whoever gives this to a layer (``layer.fp4_weight_forms``) takes it away before the weight changes. Changes that
    PyTorch counts, other memory and other recipes are noticed without that. Nobody promises anything for a copy of the
    layer, so copies and pickles of this are ``None``.
    """

    def __init__(self) -> None:
        self._forms: SharedForms | None = None

    def of(self, weight: Tensor) -> SharedForms | None:
        """Where the forms of ``weight`` are kept; ``None`` where :func:`forms_of` would not share either."""
        if not _may_keep(weight):
            return None
        state = _state_of(weight)
        forms = self._forms
        if forms is None or not forms.is_of(weight, state):
            forms = self._forms = SharedForms(weight, state)
        return forms  # not `self._forms`, which may be another thread's by now

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()
