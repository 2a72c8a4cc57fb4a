"""Where a model's transformer blocks are: the lists of like modules that hold its linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_fp4.linear import is_conv1d
from lightning_fp4.naming import clean_name


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """A list of blocks in a model.

    Args:
        name: clean qualified name of the list, empty if the model itself is the list.
        children: names of the blocks within the list, in order.
        block: class name of the blocks.
    """

    name: str
    children: tuple[str, ...]
    block: str

    @property
    def length(self) -> int:
        """Number of blocks."""
        return len(self.children)

    def index(self, name: str) -> int | None:
        """Which block the module with this clean name lies in, ``None`` if in none of this stack."""
        prefix = f"{self.name}." if self.name else ""
        head, _, _ = name.removeprefix(prefix).partition(".")
        return self.children.index(head) if name.startswith(prefix) and head in self.children else None

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.length} x {self.block})"


def find_block_stacks(model: nn.Module) -> list[BlockStack]:
    """The outermost ``nn.ModuleList`` and ``nn.Sequential`` whose children are blocks.

    Blocks are two or more children of one class (or, in a ``ModuleList`` of four or more, of mixed classes, as in
    hybrid models) of which each holds a linear layer without being one.
    """
    stacks: list[BlockStack] = []
    inside: tuple[str, ...] = ()
    for raw_name, module in model.named_modules():
        if raw_name.startswith(inside) or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [_unwrap(child) for child in module.children()]
        classes = {type(child) for child in children}
        alike = len(classes) == 1 or (isinstance(module, nn.ModuleList) and len(children) >= 4)
        if len(children) >= 2 and alike and all(_holds_linear(child) for child in children):
            names = sorted(c.__name__ for c in classes)
            stacks.append(
                BlockStack(
                    name=clean_name(raw_name), children=tuple(dict(module.named_children())), block="/".join(names)
                )
            )
            inside += (f"{raw_name}." if raw_name else "",)
    return stacks


def block_count(blocks: int | float, length: int) -> int:
    """A count of blocks as it is, or a fraction of ``length`` rounded to the nearest count; at most ``length``."""
    return min(int(blocks) if blocks >= 1 else int(blocks * length + 0.5), length)


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer of any kind."""
    return isinstance(module, nn.Linear) or any(is_conv1d(c) for c in type(module).__mro__)


def _holds_linear(module: nn.Module) -> bool:
    return not is_linear(module) and any(is_linear(m) for m in module.modules())


def _unwrap(module: nn.Module) -> nn.Module:
    for attribute in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        module = getattr(module, attribute, module)
    return module
