"""Where the transformer blocks are, in the ways that people build models."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lightning_fp4.blocks import block_count, find_block_stacks
from tests.helpers import MLP, Attention, Block, TinyModel


def _found(model):
    return [(stack.name, stack.length, stack.block) for stack in find_block_stacks(model)]


def test_module_list_inside_a_model():
    assert _found(TinyModel(blocks=3)) == [("layers", 3, "Block")]


def test_the_model_itself_is_the_stack():
    stacks = find_block_stacks(nn.Sequential(*(Block(16) for _ in range(4))))
    assert [(s.name, s.length) for s in stacks] == [("", 4)]
    assert stacks[0].index("2.mlp.up_proj") == 2
    assert str(stacks[0]) == "the model (4 x Block)"


def test_named_children_of_a_sequential():
    blocks = OrderedDict((name, Block(16)) for name in ("first", "middle", "last"))
    model = nn.Module()
    model.net = nn.Sequential(blocks)
    (stack,) = find_block_stacks(model)
    assert [stack.index(f"net.{name}.mlp.up_proj") for name in blocks] == [0, 1, 2]
    assert stack.index("net.head") is None
    assert stack.index("network.first.mlp") is None


def test_index_does_not_confuse_one_with_ten():
    (stack,) = find_block_stacks(TinyModel(blocks=12))
    assert stack.index("layers.1.mlp.up_proj") == 1
    assert stack.index("layers.10.mlp.up_proj") == 10
    assert stack.index("lm_head") is None
    assert stack.index("other.layers.1.mlp") is None


def test_two_stacks_as_in_encoder_and_decoder():
    model = nn.Module()
    model.encoder, model.decoder = nn.Module(), nn.Module()
    model.encoder.block = nn.ModuleList(Block(16) for _ in range(2))
    model.decoder.block = nn.ModuleList(Block(16) for _ in range(3))
    assert _found(model) == [("encoder.block", 2, "Block"), ("decoder.block", 3, "Block")]


def test_only_the_outermost_of_nested_lists():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(MLP(16) for _ in range(4))

    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(2))
    assert _found(model) == [("layers", 2, "Experts")]


def test_mixed_blocks_of_hybrid_models():
    model = nn.Module()
    model.layers = nn.ModuleList([Attention(16), MLP(16), Attention(16), MLP(16)])
    assert _found(model) == [("layers", 4, "Attention/MLP")]


def test_what_is_no_stack():
    linears = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    single = nn.ModuleList([Block(16)])
    norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
    mixed = nn.Sequential(MLP(8), nn.ReLU(), MLP(8))
    assert not any(_found(model) for model in (linears, single, norms, mixed, nn.Module(), nn.Linear(8, 8)))


@pytest.mark.parametrize("wrap", ["model", "blocks", "checkpoint"])
def test_compiled_and_checkpointed_names(wrap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = TinyModel(blocks=2)
    if wrap == "model":
        model = torch.compile(model)
    else:
        wrapper = torch.compile if wrap == "blocks" else checkpoint_wrapper
        model.layers = nn.ModuleList(wrapper(block) for block in model.layers)
    assert _found(model) == [("layers", 2, "Block")]


@pytest.mark.parametrize(
    ("blocks", "length", "expected"),
    [
        (0, 12, 0),
        (2, 12, 2),
        (0.15, 12, 2),
        (0.15, 30, 5),
        (0.15, 2, 0),
        (0.15, 4, 1),
        (0.5, 3, 2),
        (99, 4, 4),
        (1, 4, 1),
    ],
)
def test_block_count(blocks, length, expected):
    """0.15 of 30 is 4.5, which rounds up."""
    assert block_count(blocks, length) == expected
