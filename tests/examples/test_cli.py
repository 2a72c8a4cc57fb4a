"""examples/chon.yaml through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

pytest.importorskip("jsonargparse")

ROOT = Path(__file__).parents[2]
SMALL = (
    "--model.width 32 --model.heads 2 --data.context 32 --data.batch_size 4 --trainer.max_steps 6 "
    "--trainer.val_check_interval 3 --trainer.accelerator cpu --trainer.limit_val_batches 1 --trainer.logger false "
    "--trainer.enable_checkpointing false --trainer.enable_progress_bar false"
)


def _cli(tmp_path, *arguments):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i + 1} are neighbours.\n" for i in range(400)))
    paths = json.dumps([str(text)])
    command = ["cli.py", "fit", "--config", str(ROOT / "examples" / "chon.yaml"), *SMALL.split(), "--data.paths", paths]
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import cli
    finally:
        sys.path.pop(0)
    with mock.patch.object(sys, "argv", [*command, *arguments]), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        return cli.LightningCLI(cli.ByteGPT, cli.Text, save_config_callback=None).trainer


def test_the_file_sets_up_and_runs_what_it_says(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer = _cli(tmp_path)
    assert trainer.global_step == 6
    hot = trainer.precision_plugin.recipe.fprop.hot_channels
    assert (hot.ratio, hot.updates.interval, hot.updates.growth, hot.updates.freeze_overlap) == (0.09, 200, 1.5, 0.95)
    report = trainer.precision_plugin.report()
    kept = {layer["name"]: layer["reason"] for layer in report["kept"]}
    assert kept["blocks.0.attention.v_proj"] == "post-QK protection: value projection"
    assert kept["blocks.3.mlp.up_proj"] == "last 1 of 4 blocks"
    assert len(report["converted"]) == 3 * 6
    said = [record.getMessage() for record in caplog.records]
    assert any(m.startswith("HotChannelRefresh: optimizer step 0") for m in said)
    assert any(m.startswith("RecipeSchedule: from optimizer step 5 on") for m in said)


def test_options_on_the_command_line_win(tmp_path):
    plugins = [{"class_path": "lightning_fp4.FP4Precision", "init_args": {"recipe": {"name": "chon", "averis": True}}}]
    trainer = _cli(tmp_path, "--trainer.plugins", json.dumps(plugins), "--model.blocks", "5")
    assert trainer.precision_plugin.recipe.fprop.lhs.center is not None


def test_the_file_is_plain_yaml():
    config = yaml.safe_load((ROOT / "examples" / "chon.yaml").read_text())
    assert config["trainer"]["plugins"][0]["init_args"]["recipe"]["channels_ratio"] == 0.09


@pytest.mark.slow
def test_the_script_prints_its_configuration():
    command = [sys.executable, "examples/cli.py", "fit", "--config", "examples/chon.yaml", "--print_config"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert "update_interval: 200" in run.stdout, run.stderr
