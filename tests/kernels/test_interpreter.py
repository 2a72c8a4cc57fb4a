"""Quantisers and patches in Triton's interpreter; other kernels are another file, so that two processes share them."""

import pytest

from tests.kernels.interpreter import QUANTISERS, run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(900)  # it computes element by element
def test_quantisers_and_patches_in_the_interpreter():
    run_interpreted(f"{QUANTISERS} or patched")
