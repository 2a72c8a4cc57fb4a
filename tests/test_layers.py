"""Which module may import which: the order of design, read from the source."""

import ast
from pathlib import Path

import lightning_fp4

PACKAGE = Path(lightning_fp4.__file__).parent

#: From bottom to top. A module imports from lower levels only, its own folder apart.
LEVELS = [
    {"formats", "naming"},
    {"quantizer"},
    {"recipes", "tensor"},
    {"reference", "kernels"},
    {"blackwell"},
    {"backends", "dispatch"},
    {"_operators"},
    {"ops"},
    {"matmul", "sharing"},
    {"linear"},
    {"blocks"},
    {"convert"},
    {"operands"},
    {"monitoring"},
    {"_lightning_compat"},
    {"plugin", "_plugin"},
    {"precision", "fabric", "callbacks", "export"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
#: They import nothing above `reference`.
ASIDE = {name: LEVEL["reference"] for name in ("schedules", "metrics", "diagnostics")}


def _imports(path: Path):
    """First-level names of the package that a file imports at any depth, type-checking imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            parts = (node.module or "").split(".")
            if parts[0] == "lightning_fp4":
                yield from parts[1:2] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "lightning_fp4" and len(parts) > 1:
                    yield parts[1]


def test_every_module_has_a_place():
    unplaced = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.name != "__init__.py"
    } - {*LEVEL, *ASIDE}
    assert not unplaced


def test_imports_point_down():
    seen = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for imported in _imports(path):
            seen += 1
            if imported == own:
                continue
            if own in ASIDE:
                assert LEVEL.get(imported, 0) <= ASIDE[own], f"{path.name} imports {imported}"
            elif imported not in ASIDE:
                assert LEVEL[imported] < LEVEL[own], f"{path.relative_to(PACKAGE)} imports {imported}"
    assert seen > 20


def test_the_core_imports_no_lightning():
    """``convert_to_fp4`` works without Lightning: nothing up to ``convert`` needs it."""
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if LEVEL.get(own, len(LEVELS)) > LEVEL["convert"]:
            continue
        tree = ast.parse(path.read_text())
        roots = {
            name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert not roots & {"lightning", "pytorch_lightning", "transformers"}, path
