"""How an operator is registered, and called without PyTorch's dispatcher where nobody watches.

Operators are registered with ``torch.library``, opaque to ``torch.compile`` (a compiler that fused their lines could
change their rounding), and unaffected by autocast. In eager mode their bodies are called without the dispatcher, which
takes longer than most of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn import Parameter

#: The types of tensors that leave operators as they are; other subclasses act on them.
PLAIN = (Tensor, Parameter)


def is_eager(args: tuple) -> bool:
    """Whether operators on these arguments run at once and nobody watches them go by.

    Compilers, tracers, modes (of tools that count operations, of selective checkpointing), function transforms, tensor
    subclasses and meta tensors act on operators.
    """
    if torch.compiler.is_compiling():
        return False
    # There are no public ways to ask for three of these, and a slow one for tracing.
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    for x in args:
        if type(x) in PLAIN:
            if x.is_meta:
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def is_lasting(*tensors: Tensor) -> bool:
    """Whether what is computed from these may outlive the call: not if they belong to a function transform or are
    fake or meta tensors, which have no values. Compiled code that Dynamo made computes from others than it saw.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None or detect_fake_mode(tensors) is not None:
        return False
    return not any(x.is_meta for x in tensors)


def is_unobserved(args: tuple) -> bool:
    """Whether an operator's body does what the operator does on these arguments: they are eager, and no autograd."""
    return not _wants_gradients(args) and is_eager(args)


def _wants_gradients(args: tuple) -> bool:
    if torch.is_grad_enabled():
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


_LIBRARY = torch.library.Library("lightning_fp4", "DEF")


class _Operator:
    """A function whose first argument is a tensor, registered as ``lightning_fp4::name`` and run outside autocast.

    Called, it takes its registered form wherever someone would see the difference.
    """

    def __init__(self, name: str, body: Callable, mutates: tuple[str, ...]) -> None:
        @functools.wraps(body)
        def body_outside_autocast(first: Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
            return outside_autocast(first, body, first, *args, **kwargs)

        self.body = body_outside_autocast
        # Not `torch.library.custom_op`, whose wrappers in Python take three times as long as the dispatcher.
        schema = torch.library.infer_schema(body, mutates_args=mutates)
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, body_outside_autocast, "CompositeExplicitAutograd")
        self.registered = getattr(torch.ops.lightning_fp4, name).default
        self.register_fake = torch.library.register_fake(f"lightning_fp4::{name}", lib=_LIBRARY)

    def __call__(self, *args: Any) -> Any:
        if is_unobserved(args):
            return self.body(*args)
        if _wants_gradients(args) and not torch.compiler.is_compiling():
            return _WithoutDerivative.apply(self.registered, *args)
        return self.registered(*args)


class _WithoutDerivative(torch.autograd.Function):
    """An operator on tensors that require gradients, which it cannot give."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> Any:
        ctx.name = operator.name()
        return operator(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"`{ctx.name}` has no derivative: rounding has none, and `lightning_fp4.linear.fp4_linear` gives the "
            "gradients of a whole linear layer. Use that, or detach what the operator is given."
        )


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable], _Operator]:
    """Make a function an operator of this name; ``mutates`` names the arguments that it writes to."""
    return lambda body: _Operator(name, body, mutates)


def outside_autocast(x: Tensor, body: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call ``body`` with autocast off for the device of ``x``."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return body(*args, **kwargs)
    # What `torch.autocast(device_type, enabled=False)` does, without its checks of every setting.
    torch.set_autocast_enabled(device_type, False)
    try:
        return body(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device_type, True)
