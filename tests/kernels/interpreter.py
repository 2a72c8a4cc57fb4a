"""Runs ``interpreted.py`` with ``TRITON_INTERPRET=1``, which Triton reads when imported: hence another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUANTISERS = "test_quantize or decoded or sizes or non_finite or ranges or centred"


def run_interpreted(tests: str) -> None:
    """Run the tests that this expression names (pytest's ``-k``)."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", tests]
    command += ["tests/kernels/interpreted.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
