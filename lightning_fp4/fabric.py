"""FP4Precision for Lightning Fabric."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.plugins.precision.precision import Precision
from torch import nn
from typing_extensions import override

from lightning_fp4.plugin import FP4Plugin


class FP4Precision(FP4Plugin, FSDPPrecision):
    """Compute linear layers in four bits under Fabric: ``Fabric(plugins=[FP4Precision("nvfp4")])``.

    ``fabric.setup(model, optimizer)`` converts the model in place; the optimizer may be made before or after. Arguments
    and errors are those of ``lightning_fp4.FP4Precision``, without ``eval_precision`` and ``reuse_weights``. To resume
    with the same random bits add the plugin to what you save::

        state = {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}
        fabric.save(path, state)
    """

    # There is no loss scaler here, and an overridden `backward` would make a plain `loss.backward()` an error.
    backward = Precision.backward

    def __repr__(self) -> str:
        # Shown by a Trainer that was given this class in place of `lightning_fp4.FP4Precision`.
        return f"lightning_fp4.fabric.{super().__repr__()}"

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert ``module`` in place; called by ``fabric.setup`` and ``fabric.setup_module``."""
        self._convert(module)
        return module

    @override
    def state_dict(self) -> dict[str, Any]:
        """The steps of the layers' random states, plain data."""
        return self._fp4_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._load_fp4_state(state_dict)
