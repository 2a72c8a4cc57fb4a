"""Names of modules: without wrappers' prefixes, and the role that a linear layer plays according to its name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from enum import Enum

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@functools.cache
def clean_name(name: str) -> str:
    """A module's qualified name without what ``torch.compile``, FSDP and activation checkpointing put in between."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def matches(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a clean name is, or lies below, one of ``prefixes``; each may start at any dot (``"lm_head"`` matches
    ``"model.lm_head"``, ``"layers.1"`` does not match ``"layers.10"``).
    """
    return any(f".{prefix}." in f".{name}." for prefix in map(clean_name, prefixes))


class Role(str, Enum):
    """What a linear layer does in a transformer block."""

    QUERY = "attention.query"
    KEY = "attention.key"
    VALUE = "attention.value"
    QKV = "attention.qkv"
    ATTENTION_OUTPUT = "attention.output"
    GATE_KEY = "attention.gate_key"
    GATE = "mlp.gate"
    UP = "mlp.up"
    GATE_UP = "mlp.gate_up"
    DOWN = "mlp.down"
    ATTENTION_OTHER = "attention.other"
    MLP_OTHER = "mlp.other"
    OTHER = "other"

    @property
    def is_attention(self) -> bool:
        """Whether it belongs to attention."""
        return self.value.startswith("attention.")

    @property
    def is_mlp(self) -> bool:
        """Whether it belongs to the feed-forward part."""
        return self.value.startswith("mlp.")


_LEAVES = {
    Role.QUERY: {"q_proj", "query", "q", "wq", "to_q", "q_a_proj", "q_b_proj", "query_proj", "q_lin"},
    Role.KEY: {"k_proj", "key", "k", "wk", "to_k", "key_proj", "k_lin"},
    Role.VALUE: {"v_proj", "value", "v", "wv", "to_v", "value_proj", "v_lin"},
    Role.QKV: {
        *("qkv_proj", "qkv", "wqkv", "c_attn", "query_key_value", "in_proj_qkv", "to_qkv", "w_pack"),
        *("kv_proj", "kv", "to_kv", "wkv", "kv_b_proj"),
    },
    Role.GATE: {"gate_proj", "w1"},
    Role.UP: {"up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "wi", "wi_1", "linear1", "fc_in"},
    Role.GATE_UP: {"gate_up_proj"},
    Role.DOWN: {"down_proj", "w2", "fc2", "dense_4h_to_h", "linear2", "fc_out"},
    Role.ATTENTION_OUTPUT: {"o_proj", "to_out", "out_lin"},
    Role.GATE_KEY: {"gk_proj"},
}
_ROLE_OF_LEAF = {leaf: role for role, leaves in _LEAVES.items() for leaf in leaves}
# Leaves that mean one thing below attention and another below the feed-forward part.
_ATTENTION_OUTPUT_LEAVES = {"c_proj", "out_proj", "dense", "wo", "o", "proj", "output"}
_DOWN_LEAVES = {"c_proj", "wo", "out_proj", "proj", "output"}
_ATTENTION_PARENT = re.compile(r"attn|attention", re.IGNORECASE)
_LINEAR_ATTENTION = re.compile(
    r"linear_?att|gated_?linear|^gla|(?<![a-z])gla(?![a-z])|delta_?(net|rule)|retention|retnet|rwkv|lightning_?att|based_?att|"
    r"rebased|hgrn|gsa(?![a-z])",
    re.IGNORECASE,
)
_MLP_PARENT = re.compile(r"mlp|ffn|feed_?forward|expert|moe|densereludense", re.IGNORECASE)


@functools.cache
def role_of(name: str) -> Role:
    """The role of the linear layer called ``name``, by the names that common model families use."""
    parts = [
        part for part in clean_name(name).split(".") if part not in ("base_layer", "default") and not part.isdigit()
    ]
    if not parts:
        return Role.OTHER
    *parents, leaf = parts
    leaf = leaf.lower()
    # The nearest parent that tells decides: a block called "attention_mlp" holds both.
    for parent in reversed(parents):
        if _MLP_PARENT.search(parent):
            return Role.DOWN if leaf in _DOWN_LEAVES else _mlp_role(leaf)
        if _ATTENTION_PARENT.search(parent):
            return Role.ATTENTION_OUTPUT if leaf in _ATTENTION_OUTPUT_LEAVES else _attention_role(leaf)
    return _ROLE_OF_LEAF.get(leaf, Role.OTHER)


def is_linear_attention(name: str) -> bool:
    """Whether a class or module of this name is a form of linear attention, as far as names tell."""
    return _LINEAR_ATTENTION.search(name) is not None


def _mlp_role(leaf: str) -> Role:
    role = _ROLE_OF_LEAF.get(leaf, Role.MLP_OTHER)
    return role if role.is_mlp else Role.MLP_OTHER


def _attention_role(leaf: str) -> Role:
    role = _ROLE_OF_LEAF.get(leaf, Role.ATTENTION_OTHER)
    return role if role.is_attention else Role.ATTENTION_OTHER
