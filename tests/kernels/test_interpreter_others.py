"""Patches and the kernels around the quantisers in Triton's interpreter."""

import pytest

from tests.kernels.interpreter import QUANTISERS, run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(900)  # it computes element by element
def test_others_in_the_interpreter():
    run_interpreted(f"not ({QUANTISERS})")
