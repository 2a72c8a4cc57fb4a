"""What every benchmark shares: which device and versions, results as JSON that grow run by run, tables as Markdown."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def pick_device(name: str | None = None) -> torch.device:
    """The device called ``name``, or a GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def describe_device(device: torch.device) -> str:
    """The device as a table shows it, for example ``"NVIDIA H200"`` or ``"CPU (x86_64)"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "lightning", "lightning_fp4"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load_results(path: Path) -> list[dict[str, Any]]:
    """The records in a results file, none if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else []


def append_result(path: Path, record: Mapping[str, Any]) -> None:
    """Add one record to a results file, which is complete after every call."""
    write_results(path, [*load_results(path), dict(record)])


def write_results(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace a results file, at no moment leaving half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(records, indent=1) + "\n")
    partial.replace(path)


def labelled_recipe(argument: str) -> tuple[str, dict[str, Any]]:
    """``LABEL=JSON`` of ``--recipe`` in two. The label may hold ``=`` itself, as "chon units=fp8" does.

    Raises:
        ValueError: if no JSON object follows the label.
    """
    label, _, recipe = argument.partition("={")
    return label, json.loads("{" + recipe)


LABELLED_RECIPES: dict[str, Any] = {
    "action": "append",
    "type": labelled_recipe,
    "default": [],
    "metavar": "LABEL=JSON",
}
"""What ``argparse`` has to know of ``--recipe``, which may be given several times."""


def markdown_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as a Markdown table; a missing or ``None`` cell stays empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ("" if row.get(column) is None else str(row[column]) for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def insert_between_marks(file: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name: ... -->`` and ``<!-- /name -->`` in a Markdown file.

    Raises:
        ValueError: if the file has no such marks.
    """
    content = file.read_text()
    pattern = re.compile(rf"(<!-- {name}:[^>]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(content):
        raise ValueError(f"{file} has no marks `<!-- {name}: ... -->` and `<!-- /{name} -->` to put the table between.")
    file.write_text(pattern.sub(lambda found: found[1] + text.strip() + "\n" + found[2], content))
