"""benchmarks/training.py at toy size: rows in processes of their own, modes, failures, and what the table says."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_fp4 import backends

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _harness as harness
import _models as models
import _timing as timing
import training


@pytest.fixture
def row(monkeypatch):
    """A row to measure in this process, whose choice of kernels stays what it is."""
    monkeypatch.setattr(timing, "quantiser_backend", lambda: backends.backend(harness.pick_device()))
    torch._dynamo.reset()
    yield training.Row(
        variant="nvfp4",
        recipe={"name": "nvfp4"},
        mode="eager",
        size=training.TINY,
        batch=2,
        length=32,
        warmup=2,
        steps=3,
        backend="aot_eager",
        profile=False,
    )
    torch._dynamo.reset()


@pytest.mark.slow
def test_rows_are_measured_in_processes_of_their_own_and_reported(tmp_path, capsys):
    results = tmp_path / "training.json"
    command = ["--tiny", "--warmup", "2", "--steps", "2", "--modes", "eager", "--no-peer", "--results", str(results)]
    wrong = '--recipe=wrong={"name": "nvfp5"}'
    training.main([*command, "--recipes", "nvfp4 units=fp8", wrong])
    bf16, fp4, failed = harness.load_results(results)
    assert [r["variant"] for r in (bf16, fp4, failed)] == ["bf16", "nvfp4 units=fp8", "wrong"]
    assert bf16["run"] == fp4["run"]
    for record in (bf16, fp4):
        assert len(record["step_ms"]) == 2
        assert len(record["losses"]) == 4
        assert record["loss_is_sane"]
        assert record["tokens_per_second"] == pytest.approx(64 / record["ms"] * 1e3, rel=1e-2)
        assert record["environment"]["torch"] == torch.__version__
    assert bf16["quantised_share"] == 0
    assert bf16["gemm_paths"] == {}
    assert fp4["quantised_share"] > 0.5
    assert {path.partition(":")[0] for path in fp4["gemm_paths"]} == {"fprop", "dgrad", "wgrad"}
    assert all("fp8" in path for path in fp4["gemm_paths"])
    assert "nvfp5" in failed["error"]
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert training.write_report(results) in printed


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compile", "compile-blocks"])
def test_compiled_rows_train_to_the_same_losses(row, mode):
    recipe = {"name": "nvfp4", "stochastic_rounding": False} if mode == "compile-blocks" else None
    row = dataclasses.replace(row, recipe=recipe, steps=1)
    eager = training.measure(row)
    compiled = training.measure(dataclasses.replace(row, mode=mode))
    assert eager["loss_is_sane"]
    # The compiler orders sums of the model's other operations as it likes; bfloat16 rounds them to 2**-9.
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=5e-3)
    assert compiled["gemm_paths"] == eager["gemm_paths"]
    assert compiled["quantiser"] == (backends.backend(harness.pick_device()) if recipe else None)


def test_profile_of_extra_steps(row):
    result = training.measure(dataclasses.replace(row, recipe=None, variant="bf16", profile=True))
    assert len(result["losses"]) == 2 + 3 + training.KernelProfile.STEPS
    assert len(result["step_ms"]) == 3
    assert (result["profile"]["busy_ms"] > 0) == torch.cuda.is_available()


def test_peer_row(row):
    pytest.importorskip("torchao.float8")
    peer = training.measure(dataclasses.replace(row, recipe=None, variant=training.PEER))
    fp4 = training.measure(row)
    assert peer["loss_is_sane"]
    assert peer["environment"]["torchao"]
    assert peer["quantised_share"] == fp4["quantised_share"]  # the same layers


def test_a_row_that_does_not_end_is_stopped(row):
    assert training.run(row, timeout=0.2) == {"error": "stopped after 0 s"}


def test_rows_begin_with_bf16_and_survive_json():
    options = training.parse(["--recipes", "chon", '--recipe=mine={"name": "mxfp4"}', "--no-peer"])
    rows = list(training.rows_of(options))
    assert [(size, r.mode) for size, r in rows[::3]] == [
        (size, mode) for size in ("1.3B", "4096x8") for mode in ("eager", "compile")
    ]
    assert [r.variant for _, r in rows[:3]] == ["bf16", "chon", "mine"]
    for _, each in rows:
        assert training.Row.from_json(json.dumps(dataclasses.asdict(each))) == each
    with pytest.raises(SystemExit, match="no known recipe"):
        list(training.rows_of(training.parse(["--recipes", "nvfp5"])))


def test_labels_may_hold_an_equals_sign(capsys):
    options = training.parse(['--recipe=chon units=bf16={"name": "chon", "units": "bf16"}', "--recipes", "--no-peer"])
    _, (_, row), *_ = training.rows_of(options)
    assert (row.variant, row.recipe) == ("chon units=bf16", {"name": "chon", "units": "bf16"})
    for wrong in ("chon", "a=chon", 'a={"name"'):
        with pytest.raises(SystemExit):
            training.parse([f"--recipe={wrong}"])
        assert f"{wrong!r}" in capsys.readouterr().err


def test_the_sizes_are_what_they_are_called():
    assert training.SIZES["1.3B"].parameters == pytest.approx(1.345e9, rel=0.01)
    size = training.TINY
    model = models.Llama(size)
    assert size.parameters == sum(p.numel() for p in model.parameters() if p.dim() == 2)


def _record(run, variant, ms, **more):
    return {
        "run": run,
        "size": "1.3B",
        "shape": {"width": 2048},
        "mode": "eager",
        "variant": variant,
        "batch": 4,
        "length": 4096,
        "warmup": 8,
        "steps": 10,
        "ms": ms,
        "tokens_per_second": 1e5,
        "peak_memory_gib": 50.0 if variant == "bf16" else 40.0,
        "quantised_share": 0.0 if variant == "bf16" else 0.8,
        "quantiser": None if variant == "bf16" else "triton",
        "gemm_paths": {} if variant == "bf16" else {"fprop:fp8": 3, "wgrad:fp8": 3},
        "losses": [10.0, 9.0],
        "loss_is_sane": True,
        "environment": {"device": "NVIDIA H200", "torch": "2.11.0"},
        **more,
    }


def test_ratios_are_within_one_run(tmp_path):
    records = [_record("a", "bf16", 100.0), _record("a", "nvfp4", 80.0), _record("b", "bf16", 300.0)]
    bf16, nvfp4 = training.summarize(records)
    assert (bf16["ms a step"], bf16["over BF16"]) == ("300.0", None)
    assert (nvfp4["BF16's in that run"], nvfp4["over BF16"], nvfp4["of BF16's"]) == ("100.0", "1.25", "0.80")
    assert nvfp4["GEMMs"] == "fp8"
    records += [{**_record("b", "chon", 1.0), "error": "CUDA out of memory"}]
    file = tmp_path / "training.json"
    assert training.write_report(file) == "Not measured yet.\n"
    for record in records:
        harness.append_result(file, record)
    table = training.write_report(file)
    assert "NVIDIA H200" in table
    assert "No result yet: 1.3B, eager, chon." in table
    readme = tmp_path / "README.md"
    readme.write_text("<!-- training: how -->\nold\n<!-- /training -->\n")
    training.main(["--report", "--results", str(file), "--insert", str(readme)])
    assert table.strip() in readme.read_text()


def test_the_table_holds_what_the_line_above_it_says(tmp_path):
    """Results of other devices and of other steps and batches are in the file, but not under that line."""
    others = [{"environment": {"device": "another GPU", "torch": "2.11.0"}}, {"steps": 2}, {"batch": 1}]
    for variant, other in zip(("mxfp4", "averis", "chon"), others, strict=True):
        harness.append_result(tmp_path / "training.json", _record("a", variant, 1.0, **other))
    harness.append_result(tmp_path / "training.json", _record("b", "nvfp4", 80.0))
    table = training.write_report(tmp_path / "training.json")
    assert "| nvfp4 | 80.0 |" in table
    assert not any(variant in table for variant in ("mxfp4", "averis", "chon"))


def test_a_loss_that_does_not_fall_is_named():
    (row,) = training.summarize([_record("a", "nvfp4", 1.0, losses=[9.0, 10.0], loss_is_sane=False)])
    assert row["loss"] == "9.00 to 10.00, not sane"


def test_the_readme_holds_the_table_of_the_committed_results():
    readme = (harness.RESULTS.parents[1] / "README.md").read_text()
    assert training.write_report(harness.RESULTS / "training.json").strip() in readme


def test_model_is_causal_and_positional():
    torch.manual_seed(0)
    model = models.Llama(training.TINY).eval()
    tokens = torch.randint(256, (1, 32))
    hidden = {}
    model.norm.register_forward_hook(lambda _m, _i, out: hidden.__setitem__("last", out))
    model(tokens)
    before = hidden["last"]
    changed = tokens.clone()
    changed[0, 20] += 1
    model(changed)
    moved = (hidden["last"] - before).abs().amax(-1)[0]
    assert (moved[:20] == 0).all()
    assert (moved[20:] > 0).all()
    repeated = torch.full((1, 32), 7)
    repeated[0, 0] = 3
    model(repeated)
    assert not torch.allclose(hidden["last"][0, 5], hidden["last"][0, 25], atol=1e-5)


def test_rotation_depends_on_the_distance_only():
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    table = models.rotary_table(40, 32, torch.device("cpu"))
    rotated_q, rotated_k = (models.rotate(x.expand(1, 1, 40, 32), table)[0, 0] for x in (q, k))
    products = rotated_q @ rotated_k.T
    assert products[3, 1] == pytest.approx(products[33, 31].item(), abs=1e-4)
    assert products[3, 1] != pytest.approx(products[3, 2].item(), abs=1e-4)
