"""Quantisers: combinations that mean something, and sentences for those that do not."""

import dataclasses

import pytest

from lightning_fp4 import MXFP4, NVFP4, Quantizer, Rounding, ScaleRule


def test_strings_become_enums_and_equal_ones_are_equal():
    a = Quantizer(rounding="stochastic", scale_rule="unbiased")
    b = Quantizer(format=NVFP4, rounding=Rounding.STOCHASTIC, scale_rule=ScaleRule.UNBIASED)
    assert a == b
    assert hash(a) == hash(b)
    assert isinstance(a.rounding, Rounding)
    assert str(a) == "nvfp4 SR unbiased"


@pytest.mark.parametrize("rule", ["rne", "four_over_six"])
def test_power_of_two_scales_round_up_only(rule):
    with pytest.raises(ValueError, match=r"mxfp4 are powers of two.*Use scale_rule='unbiased'"):
        Quantizer(format=MXFP4, scale_rule=rule)


def test_stochastic_rounding_refuses_a_scale_chosen_by_error():
    with pytest.raises(ValueError, match=r"biased.*Use scale_rule='unbiased'"):
        Quantizer(rounding="stochastic", scale_rule="four_over_six")


def test_unknown_names():
    with pytest.raises(ValueError, match="'up' is not a valid ScaleRule"):
        Quantizer(scale_rule="up")
    with pytest.raises(ValueError, match="'down' is not a valid Rounding"):
        Quantizer(rounding="down")


def test_unknown_format():
    custom = dataclasses.replace(NVFP4, name="mine", block=(1, 8))
    with pytest.raises(ValueError, match=r"none of the formats that the operators know \(nvfp4, .*FORMATS"):
        Quantizer(format=custom)


def test_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Quantizer().rounding = Rounding.STOCHASTIC
    with pytest.raises(TypeError):
        Quantizer(NVFP4)


def test_scale_max():
    assert [rule.scale_max for rule in ScaleRule] == [448, 448, 256, 64, 64, 64]
