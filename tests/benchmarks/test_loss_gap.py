"""benchmarks/loss_gap.py at toy size: it runs, resumes, stops in time, and its table says what it measured."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lightning_fp4 import NVFP4, NVFP4_2D, get_recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _harness as harness
import loss_gap

TEXT = "".join(f"{i} is followed by {i + 1}; twice {i} is {2 * i}.\n" for i in range(2000))
TOY = (
    "--steps 4 --warmup 2 --width 32 --blocks 2 --heads 2 --batch 2 --context 32 --held-out 4 --log-every 2 "
    "--device cpu --no-compile --hot-interval 2"
)


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "numbers.txt").write_text(TEXT)
    results = tmp_path / "results" / "loss_gap.json"

    def run(*arguments):
        loss_gap.main([*TOY.split(), "--text", str(tmp_path / "text"), "--results", str(results), *arguments])
        return harness.load_results(results)

    return run


def test_variants_seeds_layers_and_resume(command, tmp_path, capsys):
    arguments = ("--variants", "bf16", "nvfp4-rne-2d", "chon-averis-4o6-1d", "--layers", "all", "protected")
    records = command(*arguments)
    assert [(r["variant"], r["layers"]) for r in records] == [
        ("bf16", "all"),
        ("nvfp4-rne-2d", "all"),
        ("chon-averis-4o6-1d", "all"),
        ("nvfp4-rne-2d", "protected"),
        ("chon-averis-4o6-1d", "protected"),
    ]
    shares = {(r["variant"], r["layers"]): r["fp4_share"] for r in records}
    assert shares["bf16", "all"] == 0
    # Rows that are compared keep the same layers: 2 blocks of 4 x 32 x 32 + 3 x 32 x 96, and a head of 256 x 32.
    for layers, size in (("all", 2 * 13312), ("protected", 13312 - 1024)):
        for variant in ("nvfp4-rne-2d", "chon-averis-4o6-1d"):
            assert shares[variant, layers] == pytest.approx(size / (2 * 13312 + 8192), abs=1e-4)
    assert len({r["loss"] for r in records}) == 5
    assert all(abs(r["loss"] - records[0]["loss"]) < 0.2 for r in records)
    assert all(len(r["curve"]) == 2 and r["tokens_per_second"] > 0 for r in records)
    assert command(*arguments) == records  # nothing is repeated
    again = command(*arguments, "--seeds", "0", "1")
    assert len(again) == 10
    table = (tmp_path / "results" / "loss_gap.md").read_text()
    assert "| bf16 |" in table
    assert table.count("| nvfp4-rne-2d |") == 2
    assert (tmp_path / "results" / "loss_gap.png").exists() == ("matplotlib" in sys.modules)
    assert table.strip() in capsys.readouterr().out


def test_the_same_seed_gives_the_same_run_and_the_real_path_is_close(command):
    recipe = json.dumps({"name": "nvfp4", "stochastic_rounding": False})
    (first,) = command("--variants", "--recipe", f"a={recipe}")
    second = command("--variants", "--recipe", f"b={recipe}")[-1]
    real = command("--variants", "--recipe", f"a={recipe}", "--path", "real")[-1]
    assert first["loss"] == second["loss"]
    assert real["path"] == "real"
    # Rounding to nearest on both paths: what is left is the order of float32 sums, and codes that it tips over.
    assert real["loss"] == pytest.approx(first["loss"], abs=2e-3)


def test_operands_rounded_for_fp8_units(command):
    plain, rounded = command("--variants", "nvfp4-2d", f"nvfp4-2d{loss_gap.FP8}")
    assert plain["loss"] != rounded["loss"]
    assert abs(plain["loss"] - rounded["loss"]) < 0.05


@pytest.mark.parametrize("path", ["fake", "real"])
def test_hot_channels_and_a_late_finish(command, path):
    (record,) = command("--variants", f"chon-1d{loss_gap.FINISH}", "--path", path)
    assert record["variant"] == "chon-1d+finish"
    assert torch.isfinite(torch.tensor(record["loss"]))


def test_budget_stops_before_a_run_that_would_not_end(command, capsys):
    records = command("--variants", "bf16", "nvfp4-2d", "nvfp4-1d", "--budget-seconds", "0.01")
    assert len(records) <= 1
    assert "stopping before" in capsys.readouterr().out


def test_results_of_several_gpus_become_one(command, tmp_path):
    command("--variants", "bf16")
    other = tmp_path / "other.json"
    records = command("--variants", "bf16", "nvfp4-1d", "--results", str(other))
    assert len(records) == 1
    merged = command("--merge", str(other), "--report")
    assert [r["variant"] for r in merged] == ["bf16", "nvfp4-1d"]
    assert merged[0] == harness.load_results(other)[0]
    assert command("--merge", str(other)) == merged
    assert "| nvfp4-1d |" in (tmp_path / "results" / "loss_gap.md").read_text()
    with pytest.raises(FileNotFoundError, match="no such file"):
        command("--merge", str(tmp_path / "missing.json"))


@pytest.mark.parametrize("variant", ["nvfp4-2d", "chon-averis-4o6-1d", "averis-fp4mean-1d", "chon-high_precision-1d"])
def test_a_block_compiles_to_one_graph(variant):
    """Else backward runs uncompiled, seven times slower: torch 2.11 cannot trace making a quantiser, for instance."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = loss_gap.ByteGPT(1, 32, 2)
    recipe = loss_gap.layer_choice(get_recipe(loss_gap.VARIANTS[variant]), "all")
    layers = loss_gap.Converted(model, recipe, real=False, seed=0, device=torch.device("cpu"))
    tokens = torch.randint(0, 256, (2, 33))
    gradients = []
    with torch.autocast("cpu", torch.bfloat16):
        layers.refresh(lambda: model(tokens))
    if recipe.fprop.hot_channels is not None:
        assert all(len(layer.channels) > 0 for layer in layers.layers.values())
    for is_compiled in (False, True):
        if is_compiled:
            model.blocks[0].compile(backend="aot_eager", fullgraph=True, dynamic=False)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for (name, _), a, b in zip(model.named_parameters(), *gradients, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("variant", loss_gap.VARIANTS)
def test_labels_name_the_weight_blocks(variant):
    recipe = get_recipe(loss_gap.VARIANTS[variant])
    if variant == "bf16":
        assert not recipe.quantizes
    else:
        assert recipe.fprop.rhs.format is (NVFP4_2D if variant.endswith("-2d") else NVFP4)


def test_increase_and_spread():
    def record(variant, seed, loss):
        common = {"layers": "all", "path": "fake", "settings": "s", "fp4_share": 0.5, "tokens_per_second": 2e6}
        return {"variant": variant, "seed": seed, "loss": loss, "peak_memory_gib": 1.0, **common}

    rows = loss_gap.summarize(
        [record("bf16", 0, 1.0), record("bf16", 1, 2.0), record("nvfp4", 0, 1.02), record("nvfp4", 1, 2.02)]
    )
    assert [row["variant"] for row in rows] == ["bf16", "nvfp4"]
    assert rows[1]["increase %"] == "+1.50"  # 2 % and 1 %
    assert rows[1]["spread ±%"] == "0.50"
    assert rows[0]["increase %"] is None


def test_text(tmp_path):
    import gzip

    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "c.bin").write_bytes(b"\0binary")
    assert loss_gap.read_text([tmp_path], 1000) == b"first\nsecond"
    assert loss_gap.read_text([tmp_path], 8) == b"first\nse"
    text = loss_gap.Text(data=torch.arange(100, dtype=torch.uint8), window=11, held_out=3)
    training, held_out = text.windows()
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(0, 90, 10))
    assert text.batch(torch.tensor([10]))[0].tolist() == list(range(10, 21))
    with pytest.raises(ValueError, match="smaller --held-out"):
        loss_gap.Text(data=torch.zeros(30, dtype=torch.uint8), window=11, held_out=3).windows()


def test_order_depends_on_the_seed_and_visits_all_before_any_again():
    starts = torch.arange(10)
    order = loss_gap.training_order(starts, 25, seed=1)
    assert torch.equal(order, loss_gap.training_order(starts, 25, seed=1))
    assert not torch.equal(order, loss_gap.training_order(starts, 25, seed=2))
    assert order[:10].sort().values.tolist() == list(range(10))


def test_every_variant_is_a_recipe():
    for options in loss_gap.VARIANTS.values():
        for layers in ("all", "protected", "recipe"):
            loss_gap.layer_choice(get_recipe(options), layers)
    with pytest.raises(SystemExit, match="no known variant"):
        list(loss_gap.runs_of(loss_gap.parse(["--variants", "nvfp5"])))


def test_the_readme_holds_the_table_of_the_committed_results(tmp_path):
    shutil.copy(harness.RESULTS / "loss_gap.json", tmp_path)
    table = loss_gap.write_report(tmp_path / "loss_gap.json").strip()
    assert table in (harness.RESULTS.parents[1] / "README.md").read_text()
    assert table == (harness.RESULTS / "loss_gap.md").read_text().strip()


def test_the_table_goes_between_the_marks(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- loss_gap: how -->\nold\n<!-- /loss_gap -->\nafter\n")
    for table in ("| new |\n", "| newer \\1 |\n"):
        harness.insert_between_marks(file, "loss_gap", table)
        assert file.read_text() == f"before\n<!-- loss_gap: how -->\n{table}<!-- /loss_gap -->\nafter\n"
    with pytest.raises(ValueError, match="no marks"):
        harness.insert_between_marks(file, "other", "")
