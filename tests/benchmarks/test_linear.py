"""benchmarks/linear.py: what it reports."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _harness as harness
import linear


def test_the_readme_holds_the_table_of_the_committed_results():
    results = json.loads((harness.RESULTS / "linear.json").read_text())
    assert linear.table(results).strip() in (harness.RESULTS.parents[1] / "README.md").read_text()
