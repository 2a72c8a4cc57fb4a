"""Names without wrappers, matching at dot boundaries, and roles by the names of model families."""

import pytest

from lightning_fp4.naming import Role, clean_name, matches, role_of


def test_clean_name():
    assert clean_name("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert clean_name("_fsdp_wrapped_module.net") == "net"
    assert clean_name("") == ""


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.lm_head", "lm_head", True),
        ("model.lm_head.base_layer", "lm_head", True),
        ("model.lm_head2", "lm_head", False),
        ("model.my_lm_head", "lm_head", False),
        ("model.layers.1.mlp.up_proj", "layers.1", True),
        ("model.layers.10.mlp.up_proj", "layers.1", False),
        ("model.layers.1.mlp.up_proj", "layers.1.mlp", True),
        ("model.layers.1.mlp.up_proj", "mlp.up_proj", True),
        ("model.layers.1.mlp.up_proj", "_orig_mod.model.layers", True),
        ("model.layersX1", "layers.1", False),
    ],
)
def test_matches(name, prefix, expected):
    assert matches(name, [prefix]) is expected
    assert matches(name, ["nothing", prefix]) is expected
    assert not matches(name, [])


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.self_attn.q_proj", Role.QUERY),
        ("model.layers.3.self_attn.k_proj.base_layer", Role.KEY),
        ("base_model.model.model.layers.3.self_attn.v_proj", Role.VALUE),
        ("model.layers.3.self_attn.o_proj", Role.ATTENTION_OUTPUT),
        ("model.layers.3.mlp.gate_proj", Role.GATE),
        ("model.layers.3.mlp.up_proj", Role.UP),
        ("model.layers.3.mlp.down_proj", Role.DOWN),
        ("model.layers.3.mlp.gate_up_proj", Role.GATE_UP),
        ("model.layers.3.block_sparse_moe.experts.7.w2", Role.DOWN),
        ("model.layers.3.mlp.experts.7.down_proj", Role.DOWN),
        ("transformer.h.0.attn.c_attn", Role.QKV),
        ("transformer.h.0.attn.c_proj", Role.ATTENTION_OUTPUT),
        ("transformer.h.0.mlp.c_fc", Role.UP),
        ("transformer.h.0.mlp.c_proj", Role.DOWN),
        ("gpt_neox.layers.0.attention.query_key_value", Role.QKV),
        ("model.layers.3.self_attn.kv_b_proj", Role.QKV),  # DeepSeek: keys and values from the latent
        ("model.layers.3.self_attn.W_pack", Role.QKV),
        ("block1.0.attn.kv", Role.QKV),
        ("distilbert.transformer.layer.0.attention.v_lin", Role.VALUE),
        ("distilbert.transformer.layer.0.attention.out_lin", Role.ATTENTION_OUTPUT),
        ("gpt_neox.layers.0.attention.dense", Role.ATTENTION_OUTPUT),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h", Role.UP),
        ("gpt_neox.layers.0.mlp.dense_4h_to_h", Role.DOWN),
        ("encoder.block.0.layer.0.SelfAttention.q", Role.QUERY),
        ("encoder.block.0.layer.0.SelfAttention.o", Role.ATTENTION_OUTPUT),
        ("encoder.block.0.layer.1.DenseReluDense.wi_1", Role.UP),
        ("encoder.block.0.layer.1.DenseReluDense.wo", Role.DOWN),
        ("layers.0.attention.wq", Role.QUERY),
        ("layers.0.attention.wo", Role.ATTENTION_OUTPUT),
        ("layers.0.feed_forward.w1", Role.GATE),
        ("layers.0.self_attn.out_proj", Role.ATTENTION_OUTPUT),
        ("layers.0.linear1", Role.UP),
        ("layers.0.attn.gate", Role.ATTENTION_OTHER),
        ("layers.0.mlp.router", Role.MLP_OTHER),
        ("layers.0.attention_mlp.attn.q_proj", Role.QUERY),
        ("lm_head", Role.OTHER),
        ("", Role.OTHER),
        ("3", Role.OTHER),
    ],
)
def test_role(name, role):
    assert role_of(name) is role
    assert role.is_attention is role.value.startswith("attention")
    assert role.is_mlp is role.value.startswith("mlp")
