"""Gradients over all ranks: their parameters, their norm, and how to drop them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def local(x: Tensor) -> Tensor:
    """The part of ``x`` on this rank: of a ``DTensor`` its shard, of which changes in place are changes of ``x``."""
    return x.to_local() if isinstance(x, DTensor) else x


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients together as a float32 scalar, over the shards of ``DTensor`` too.

    Sums are float32 at least: half precision would overflow, and bfloat16 leave eight bits. Every rank that holds a
    shard has to call it.
    """
    kinds: dict[tuple[object, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        place = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else gradient.device
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        kinds.setdefault((place, gradient.dtype), []).append(values)
    norms = [
        _norm(torch._foreach_norm(tensors, 2, torch.promote_types(dtype, torch.float32)))
        for (_, dtype), tensors in kinds.items()
    ]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else _norm([norm.to(norms[0].device) for norm in norms])


def _norm(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(list(norms))).float()


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients in place, by their parts on this rank: PyTorch refuses to mix ``DTensor`` and ``Tensor``."""
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)


def drop(optimizer: Optimizer) -> None:
    """Take the gradients away: the optimizer's next step changes neither weights nor its own state."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def index_of(trainer: pl.Trainer, optimizer: Optimizer) -> int:
    """The position of an optimizer among the Trainer's."""
    return next(i for i, candidate in enumerate(trainer.optimizers) if candidate is optimizer)


def refuse_hidden_gradients(trainer: pl.Trainer, callback: str) -> None:
    """Raise for strategies whose gradients a callback cannot see whole.

    Raises:
        MisconfigurationException: for DeepSpeed and for FSDP1.
    """
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise MisconfigurationException(
            f"`{callback}` does not support `{type(trainer.strategy).__name__}`, which keeps gradients in flat shards "
            "of its own. Use `ModelParallelStrategy` (FSDP2) or `DDPStrategy`."
        )
