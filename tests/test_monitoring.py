"""Reports: outside a Trainer, the measured sensitivity, and what is named worth keeping."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_fp4 import FP4Precision, convert_to_fp4, fp4_layers, get_recipe, use_recipe
from lightning_fp4.convert import plan_conversion
from lightning_fp4.monitoring import PrecisionReport, draw_heat_map, layer_sensitivity, monitor_precision
from lightning_fp4.operands import OperandStatistics


def model_with_outliers(depth: int = 8) -> nn.Module:
    """Linear blocks of which one has an input that four bits destroy: outlier channels beside what matters."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(32, 32)}) for _ in range(depth))
    model = nn.ModuleDict({"layers": blocks})
    with torch.no_grad():
        weight = blocks[3]["up_proj"].weight
        weight[::16] *= 1e-4  # the outlier channels do not matter for the result
        weight[:, ::16] *= 1e-4
    return convert_to_fp4(model, "nvfp4", filter_fn=lambda module, name: True)


def loss_of(model: nn.Module):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    outliers = x.clone()
    outliers[:, ::16] *= 1e3

    def loss() -> torch.Tensor:
        total = torch.zeros(())
        for i, block in enumerate(model["layers"]):
            layer = block["up_proj"]
            given = outliers if i == 3 else x
            wanted = given @ layer.weight.T + layer.bias
            total = total + (layer(given) - wanted).square().mean()
        return total

    return loss


def test_sensitivity_is_the_loss_with_one_layer_quantised():
    model = model_with_outliers()
    loss = loss_of(model)
    increases = layer_sensitivity(model, loss)
    assert list(increases) == list(fp4_layers(model))
    with use_recipe(model, "high_precision"):
        base = loss().item()
    assert base == pytest.approx(0, abs=1e-10)
    assert max(increases, key=increases.get) == "layers.3.up_proj"
    assert all(layer.fp4_recipe.name == "nvfp4" for layer in fp4_layers(model).values())
    # By hand for one layer.
    with use_recipe(model, "high_precision"):
        fp4_layers(model)["layers.3.up_proj"].fp4_recipe = get_recipe("nvfp4")
        assert loss().item() - base == pytest.approx(increases["layers.3.up_proj"])


def test_report_outside_a_trainer_names_the_sensitive_layer():
    model = model_with_outliers()
    loss = loss_of(model)
    with monitor_precision(model) as report:
        loss().backward()
    assert {s.operand for s in report.statistics} == {"input", "weight", "grad_output"}
    report.loss_increases = layer_sensitivity(model, loss)
    keep = report.keep_in_high_precision()
    assert keep == ["layers.3.up_proj"]
    ranks = report.ranking()
    assert ranks[0].name == "layers.3.up_proj"
    assert ranks[0].component == "mlp.up"
    # The value is one that FP4Precision takes.
    FP4Precision("nvfp4", ignore_modules=keep)
    fresh = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(32, 32)}) for _ in range(8))})
    plan = plan_conversion(fresh, last_blocks=0, ignore_modules=keep)
    assert [c.name for c in plan.kept] == keep
    text = str(report)
    assert "mlp.up" in text
    assert "worth keeping in BF16: layers.3.up_proj" in text
    console = Console(file=io.StringIO(), width=160)
    console.print(report.table())
    assert "layers.3.up_proj" in console.file.getvalue()


def one(layer: str, sqnr: float) -> list[OperandStatistics]:
    return [
        OperandStatistics(layer=layer, operand=operand, values={"sqnr": sqnr}, top_channels=())
        for operand in ("input", "weight")
    ]


def test_proxies_rank_without_a_measurement():
    statistics = [s for i in range(20) for s in one(f"layers.{i}.q_proj", 20.0 if i != 7 else 8.0)]
    report = PrecisionReport(statistics=statistics)
    assert report.ranking()[0].name == "layers.7.q_proj"
    assert report.ranking()[0].error == pytest.approx(math.sqrt(2 * 10**-0.8))
    assert report.keep_in_high_precision() == ["layers.7.q_proj"]
    assert report.value("layers.7.q_proj", "weight", "sqnr") == 8.0
    assert math.isnan(report.value("layers.7.q_proj", "grad_output", "sqnr"))


def test_a_single_name_is_refused():
    """Else every layer whose name is part of it would be measured."""
    with pytest.raises(ValueError, match=r"`monitor_precision\(layers='mlp'\)` must be a collection of names, .*'mlp'"):
        monitor_precision(torch.nn.Linear(2, 2), layers="mlp").__enter__()
    with pytest.raises(ValueError, match=r"`layer_sensitivity\(layers='mlp'\)` must be a collection of names"):
        layer_sensitivity(torch.nn.Linear(2, 2), lambda: torch.zeros(()), layers="mlp")


def test_equal_layers_and_empty_reports_name_nothing():
    report = PrecisionReport(statistics=[s for i in range(9) for s in one(f"layers.{i}.q_proj", 20.0)])
    assert report.keep_in_high_precision() == []
    assert PrecisionReport().keep_in_high_precision() == []
    assert "none" in str(PrecisionReport())


def test_infinities_of_both_signs_are_reported():
    """Of what four bits hold exactly, and of what was infinite itself."""
    report = PrecisionReport(statistics=[*one("layers.0.q_proj", math.inf), *one("layers.1.q_proj", -math.inf)])
    assert "nan nan -" in str(report)
    assert "nan nan -" in [cell for column in report.table().columns for cell in column.cells]


def test_heat_map_shows_every_layer_and_step():
    series = [{"a": 1.0, "b": float(step)} for step in range(3)]
    figure = draw_heat_map("sqnr", [10, 20, 30], {"input": series, "weight": [{"a": 0.0}] * 3})
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["input", "weight"]
    assert panels[0].images[0].get_array().tolist() == [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["a", "b"]
