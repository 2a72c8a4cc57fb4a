"""FP4Precision for Lightning Fabric."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.utilities.types import Optimizable
from torch import nn
from typing_extensions import override

from lightning_fp4.plugin import FP4Plugin


class FP4Precision(FP4Plugin, FSDPPrecision):
    """Compute linear layers in four bits under Fabric: ``Fabric(plugins=[FP4Precision()])``.

    ``fabric.setup(model, optimizer)`` converts the model in place; the optimizer may be made before or after. Arguments
    and errors are those of ``lightning_fp4.FP4Precision``, without ``eval_precision`` and ``reuse_weights``. The model
    moves to its device after that, so the log line lacks what depends on the device; ``report()`` has it. To resume
    with the same random bits add the plugin to what you save::

        state = {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}
        fabric.save(path, state)

    The hot channels of the default recipe ``"chon"`` are picked in the first training step and are, from the first
    ``optimizer.step()`` on, rank 0's on all ranks. Here no callback chooses them anew: ``start_scoring``,
    ``stop_scoring`` and ``choose_channels`` of ``lightning_fp4.callbacks.hot_channel_refresh`` are its parts.
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
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """The step; the first one with hot channels shares them among the ranks."""
        result = super().optimizer_step(optimizer, **kwargs)
        if not self._shared_hot_channels:
            self._share_first_hot_channels(
                "To choose them anew as it goes on, call `start_scoring`, `stop_scoring` and `choose_channels` of "
                "`lightning_fp4.callbacks.hot_channel_refresh`."
            )
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        """The steps of the layers' random states and their hot channels, plain data."""
        return self._fp4_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._load_fp4_state(state_dict)
