"""Quantisers in Triton's interpreter; other kernels are another file, so that two processes share them."""

import pytest

from tests.kernels.interpreter import QUANTISERS, run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(900)  # it computes element by element
def test_quantisers_in_the_interpreter():
    run_interpreted(QUANTISERS)
