"""AdaptiveGradientClipping: its two algorithms by hand, and inside fits."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp4.callbacks import AdaptiveGradientClipping, adaptive_gradient_clipping
from lightning_fp4.callbacks.adaptive_gradient_clipping import ClippingState, clip_unitwise, next_state
from lightning_fp4.callbacks.gradients import scale, total_norm
from tests.callbacks.models import GPT, TinyModule, ddp, loader, run_ranks, trainer


class Gradients(Callback):
    """Copies the gradients before and after the callbacks between the two places where it stands."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])


# ----------------------------------------------------------------------------------------------------------------------
# The algorithms
# ----------------------------------------------------------------------------------------------------------------------


def test_the_threshold_grows_after_a_hundred_clipped_steps_in_a_row():
    state = ClippingState(threshold=0.65)
    for step in range(1, 251):
        state = next_state(state, 2.0, adjust=False)
        assert state.threshold == pytest.approx(0.65 * 1.05 ** (step // 100))
    assert (state.steps, state.clipped, state.in_a_row) == (250, 250, 50)
    state = next_state(state, 0.1, adjust=False)
    assert state.in_a_row == 0
    assert state.clipped == 250


@pytest.mark.parametrize("norm", [0.05, 0.4, 3.0])
def test_steering_brings_the_average_to_eighty_percent_of_the_threshold(norm):
    rng = np.random.default_rng(0)
    state = ClippingState(threshold=0.65)
    for _ in range(3000):
        state = next_state(state, norm * float(rng.uniform(0.8, 1.2)))
    assert state.average / state.threshold == pytest.approx(0.8, rel=0.05)
    assert state.average == pytest.approx(norm, rel=0.1)
    assert state.clipped / state.steps < 0.5


def test_one_step_of_the_threshold_by_hand():
    state = ClippingState(threshold=1.0, average=0.5, steps=3)
    after = next_state(state, 100.0)  # enters the average as 4 thresholds
    assert after.average == pytest.approx(0.98 * 0.5 + 0.02 * 4)
    assert after.threshold == pytest.approx(1.0 + 0.01 * (after.average / 0.8 - 1.0))
    assert (after.steps, after.clipped, after.in_a_row) == (4, 1, 1)
    assert next_state(state, 0.0, bounds=(1.0, 2.0)).threshold == 1.0


def clipped_by_numpy(weight, gradient, clip_factor=0.01, eps=1e-3):
    """Gradient and number of clipped units of one parameter, in float64."""
    w, g = weight.double().numpy(), gradient.double().numpy()
    axes = tuple(range(1, w.ndim)) if w.ndim > 1 else None
    norm_w = np.sqrt(np.square(w).sum(axis=axes, keepdims=True))
    norm_g = np.sqrt(np.square(g).sum(axis=axes, keepdims=True))
    largest = np.maximum(norm_w, eps) * clip_factor
    return np.where(norm_g > largest, g * largest / np.maximum(norm_g, 1e-6), g), int((norm_g > largest).sum())


@pytest.mark.parametrize("shape", [(6, 5), (7,), (), (4, 3, 2)])
def test_unitwise_clipping_equals_numpy(shape):
    torch.manual_seed(0)
    weight, gradient = torch.randn(shape), torch.randn(shape) * torch.rand(shape) * 0.05
    if len(shape) > 1:
        weight[0], gradient[1], gradient[2] = 0, 0, gradient[2] * 1e-6
    expected, count = clipped_by_numpy(weight, gradient)
    clipped = clip_unitwise([weight], [gradient], 0.01, 1e-3)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-12)
    assert clipped == count


@pytest.mark.parametrize("stacked", [2**22, 100, 1])
def test_unitwise_clipping_of_many_parameters_equals_numpy_for_each(stacked, monkeypatch):
    """Shapes and dtypes mixed, so that stacks of equal ones must not mix up; in whole stacks, in pieces, and alone."""
    monkeypatch.setattr(adaptive_gradient_clipping, "STACKED", stacked)
    bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    kinds = [(bf16, bf16), (f32, f32), (f32, bf16), (bf16, f32), (f64, f64)]
    shapes = [(6, 5), (5, 6), (7,), (), (4, 3, 2), (1,), (30,), (3, 0), (0, 3)]
    pairs = [
        (torch.randn(shape).to(dtype), (torch.randn(shape) * 0.02).to(gradient_dtype))
        for _ in range(4)
        for dtype, gradient_dtype in kinds
        for shape in shapes
    ]
    pairs += [(torch.randn(5, 6).T, torch.randn(5, 6).T * scale) for scale in (0.001, 0.1)]  # not contiguous
    pairs += [(torch.randn(12)[::2], torch.randn(12)[::2] * scale) for scale in (0.001, 0.1)]
    weights, gradients = (list(tensors) for tensors in zip(*pairs, strict=True))
    expected = [clipped_by_numpy(weight, gradient) for weight, gradient in pairs]
    before = [weight.clone() for weight in weights]
    count = clip_unitwise(weights, gradients, 0.01, 1e-3)
    assert count == sum(clipped for _, clipped in expected)
    assert 0 < count < sum(len(g) if g.dim() > 1 else 1 for g in gradients)
    for gradient, (values, _) in zip(gradients, expected, strict=True):
        rounding = 2 * torch.finfo(gradient.dtype).eps  # of the factor and of the product
        np.testing.assert_allclose(gradient.double().numpy(), values, rtol=max(rounding, 1e-5), atol=1e-12)
    assert all(map(torch.equal, weights, before))
    assert clip_unitwise([], [], 0.01, 1e-3) == 0


class Operators(TorchDispatchMode):
    """Counts the operators that do more than view."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_deeper_models_clip_with_as_many_operators():
    counts = []
    for depth in (2, 8):
        weights = [p.detach() for p in GPT(depth=depth).parameters()]
        with Operators() as operators:
            clip_unitwise(weights, [torch.randn_like(w) for w in weights], 0.01, 1e-3)
        counts.append(operators.count - len(weights))  # without those that drew the gradients
    assert counts[0] == counts[1] < 70


def test_clipping_copies_no_more_than_a_few_gradients_at_once(monkeypatch):
    monkeypatch.setattr(adaptive_gradient_clipping, "STACKED", 300)

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not function.is_view and "mul_" not in function.name():
                self.elements = max(self.elements, out.numel())
            return out

    weights, gradients = ([torch.randn(shape) for shape in [(10, 10)] * 8 + [(50, 50)] * 2] for _ in range(2))
    with Largest() as largest:
        clip_unitwise(weights, gradients, 0.01, 1e-3)
    assert largest.elements == 300


def test_total_norm_equals_numpy_for_mixed_dtypes():
    tensors = [torch.randn(3, 4), torch.randn(5).double(), torch.randn(2, 2)]
    flat = np.concatenate([t.double().numpy().ravel() for t in tensors])
    assert total_norm(tensors).item() == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    assert total_norm([]).item() == 0


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 1000.0), (torch.bfloat16, 0.01), (torch.float32, 1.0), (torch.complex64, 3 + 4j)],
)
def test_total_norm_is_summed_in_float32_at_least(dtype, value):
    """A float16 norm would be infinite here, and a bfloat16 one 0.2 % off."""
    x = torch.full((101, 103), value, dtype=dtype)
    norm = total_norm([x])
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(np.linalg.norm(x.to(torch.complex128).numpy()), rel=1e-4)  # float32 sums


def test_total_norm_of_sparse_gradients():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], torch.randn(3, 4), (5, 4))  # two parts of one row
    torch.testing.assert_close(total_norm([sparse, torch.ones(2)]), total_norm([sparse.to_dense(), torch.ones(2)]))


# ----------------------------------------------------------------------------------------------------------------------
# In a Trainer
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "manual"), [(1, False), (3, False), (1, True)])
def test_norm_mode_scales_the_accumulated_gradient(tmp_path, accumulate, manual):
    before, clip, after = Gradients(), AdaptiveGradientClipping(threshold=1e-2), Gradients()
    fit = trainer(tmp_path, callbacks=[before, clip, after], accumulate_grad_batches=accumulate)
    fit.fit(TinyModule(manual=manual), loader(6))
    assert len(before.seen) == 6 // accumulate
    state = ClippingState(threshold=0.65e-2)
    for raw, clipped in zip(before.seen, after.seen, strict=True):
        norm = float(np.linalg.norm(np.concatenate([g.double().numpy().ravel() for g in raw])))
        factor = min(1.0, state.threshold / norm)
        for a, b in zip(raw, clipped, strict=True):
            torch.testing.assert_close(b, a * factor, rtol=1e-3, atol=1e-9)
        state = next_state(state, norm, bounds=(1e-3, 1e-1))
    assert clip.states[0].threshold == pytest.approx(state.threshold, rel=1e-4)
    assert clip.states[0].clipped == state.clipped > 0
    assert fit.callback_metrics["AdaptiveGradientClipping/clipped_fraction"] == 1.0


def test_unitwise_mode_leaves_ignored_modules_alone(tmp_path):
    before, after = Gradients(), Gradients()
    clip = AdaptiveGradientClipping("unitwise", clip_factor=1e-4, ignore_modules=["lm_head"])
    module = TinyModule()
    fit = trainer(tmp_path, callbacks=[before, clip, after])
    fit.fit(module, loader(1))
    for (name, _), a, b in zip(module.named_parameters(), before.seen[0], after.seen[0], strict=True):
        assert torch.equal(a, b) == (name == "model.lm_head.weight"), name
    assert 0.9 < fit.callback_metrics["AdaptiveGradientClipping/clipped_fraction"] <= 1


class SparseEmbedding(TinyModule):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.model.embed.sparse = sparse

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_sparse_gradients_are_clipped_by_norm(tmp_path):
    modules = [SparseEmbedding(sparse) for sparse in (False, True)]
    for module in modules:
        clip = AdaptiveGradientClipping(threshold=0.01)
        trainer(tmp_path, callbacks=[clip]).fit(module, loader(3))
        assert clip.states[0].clipped == 3
    for dense, sparse in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(sparse, dense)
    with pytest.raises(ValueError, match=r"sparse gradient, here of shape \(60, 32\). Leave .* `ignore_modules`"):
        trainer(tmp_path, callbacks=[AdaptiveGradientClipping("unitwise")]).fit(SparseEmbedding(), loader(1))
    clip = AdaptiveGradientClipping("unitwise", ignore_modules=["embed"])
    trainer(tmp_path, callbacks=[clip]).fit(SparseEmbedding(), loader(1))
    assert clip.states[0].clipped == 1


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path):
    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            weights = [p.detach().clone() for p in pl_module.parameters()]
            step = next(iter(trainer.optimizers[0].state.values()))["step"].item()
            self.seen = [*getattr(self, "seen", []), (weights, step)]

    watch, clip = Watch(), AdaptiveGradientClipping()
    fit = trainer(tmp_path, callbacks=[clip, watch])
    fit.fit(TinyModule(), loader(4, poisoned=(9,)))  # batch 2
    same = [
        all(map(torch.equal, watch.seen[i][0], watch.seen[i + 1][0])) and watch.seen[i][1] == watch.seen[i + 1][1]
        for i in range(3)
    ]
    assert same == [False, True, False]
    assert clip.states[0].skipped == 1
    assert fit.callback_metrics["AdaptiveGradientClipping/skipped_steps"] == 1
    assert clip.states[0].steps == 3


def test_state_goes_through_a_checkpoint_and_resumes(tmp_path):
    first = AdaptiveGradientClipping()
    fit = trainer(tmp_path, callbacks=[first], max_steps=3, max_epochs=9)
    fit.fit(TinyModule(), loader(8))
    path = tmp_path / "a.ckpt"
    fit.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["callbacks"]["AdaptiveGradientClipping"]
    assert saved["0"] == dataclasses.asdict(first.states[0])
    resumed = AdaptiveGradientClipping()
    trainer(tmp_path, callbacks=[resumed], max_steps=8, max_epochs=9).fit(TinyModule(), loader(8), ckpt_path=path)
    straight = AdaptiveGradientClipping()
    trainer(tmp_path, callbacks=[straight], max_steps=8, max_epochs=9).fit(TinyModule(), loader(8))
    assert resumed.states[0].steps == straight.states[0].steps == 8
    assert resumed.states[0].threshold == pytest.approx(straight.states[0].threshold, rel=0.02)


class TwoOptimizers(TinyModule):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        halves = [[], []]
        for i, p in enumerate(self.parameters()):
            halves[i % 2].append(p)
        return [torch.optim.SGD(half, lr=1e-3) for half in halves]


def test_each_optimizer_has_its_own_threshold(tmp_path):
    clip = AdaptiveGradientClipping()
    fit = trainer(tmp_path, callbacks=[clip])
    fit.fit(TwoOptimizers(manual=True), loader(2))
    assert {i: s.steps for i, s in clip.states.items()} == {0: 2, 1: 2}
    assert clip.states[0].average != clip.states[1].average
    assert "AdaptiveGradientClipping/threshold/optimizer1" in fit.callback_metrics


def test_loggers_get_the_steps_that_the_trainer_logs(tmp_path):
    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            norm = float(trainer.callback_metrics["AdaptiveGradientClipping/grad_norm"])
            self.seen = [*getattr(self, "seen", []), norm]

    watch, logger = Watch(), CSVLogger(tmp_path)
    trainer(
        tmp_path, callbacks=[AdaptiveGradientClipping(), watch], logger=logger, log_every_n_steps=2, max_steps=5
    ).fit(TinyModule(), loader(5))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["AdaptiveGradientClipping/grad_norm"]]
    assert len(set(watch.seen)) == 5
    assert {int(row["step"]): float(row["AdaptiveGradientClipping/grad_norm"]) for row in rows} == pytest.approx(
        {1: watch.seen[1], 3: watch.seen[3]}
    )
    assert all(float(row["AdaptiveGradientClipping/threshold"]) > 0 for row in rows)


def test_a_batch_of_several_steps_is_one_row(tmp_path):
    class FourSteps(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    fit = trainer(tmp_path, callbacks=[AdaptiveGradientClipping()], logger=logger, log_every_n_steps=1)
    fit.fit(FourSteps(manual=True), loader(2))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1"]
    assert all(rows[1][name] for name in rows[1])
    for index in range(2):
        name = f"AdaptiveGradientClipping/grad_norm/optimizer{index}"
        assert float(rows[1][name]) == pytest.approx(float(fit.callback_metrics[name]))


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}])
@pytest.mark.parametrize("mode", ["norm", "unitwise"])
def test_special_runs(tmp_path, options, mode):
    clip = AdaptiveGradientClipping(mode)
    fit = trainer(tmp_path, callbacks=[clip], **options)
    fit.fit(TinyModule(), loader(2), loader(1))
    assert clip.states[0].steps > 0
    if not options.get("barebones"):
        fit.validate(TinyModule(), loader(1), verbose=False)


def test_an_interrupted_batch_is_not_logged_by_the_next_fit(tmp_path):
    class Interrupted(TinyModule):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("on purpose")

    clip, logger = AdaptiveGradientClipping(), CSVLogger(tmp_path)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, callbacks=[clip]).fit(Interrupted(manual=True), loader(1))
    options = {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "max_steps": 1}
    trainer(tmp_path, callbacks=[clip], logger=logger, **options).fit(TinyModule(), loader(2))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        assert len(list(csv.DictReader(file))) == 1


def test_clipping_twice_warns(tmp_path):
    with pytest.warns(UserWarning, match="clips what `AdaptiveGradientClipping` leaves"):
        trainer(tmp_path, callbacks=[AdaptiveGradientClipping()], gradient_clip_val=1.0).fit(TinyModule(), loader(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "row"}, "'norm' or 'unitwise'"),
        ({"threshold": 0}, r"threshold=0\)` must be above 0"),
        ({"raise_by": -0.05}, r"raise_by=-0.05\)` must be 0 or more"),
        ({"target": -1.0}, "target=-1.0"),
        ({"bounds": (10.0, 0.1)}, r"bounds=\(10.0, 0.1\)\)` must be the smallest and the largest"),
        ({"bounds": (0.1,)}, "for example"),
        ({"bounds": 5.0}, "for example"),
        ({"bounds": (0.0, 0.0)}, "for example"),
        ({"ignore_modules": "lm_head"}, r"for example \['lm_head'\]"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveGradientClipping(**options)


# ----------------------------------------------------------------------------------------------------------------------
# Over ranks
# ----------------------------------------------------------------------------------------------------------------------


def _ddp_rank(rank, directory):
    clip, after = AdaptiveGradientClipping(threshold=1e-2), Gradients()
    fit = trainer(directory, callbacks=[clip, after], **ddp(use_distributed_sampler=True))
    fit.fit(TinyModule(), loader(8, batch_size=1, poisoned=(4,)))
    weights = [p.detach() for p in fit.lightning_module.parameters()]
    torch.save((dataclasses.asdict(clip.states[0]), weights, [len(g) for g in after.seen]), directory / f"{rank}.pt")


def test_ddp_ranks_agree_when_one_has_a_bad_batch(tmp_path):
    run_ranks(_ddp_rank, tmp_path)
    (state0, weights0, left0), (state1, weights1, left1) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert state0 == state1
    assert (state0["steps"], state0["skipped"]) == (3, 1)
    assert left0 == left1
    assert left0.count(0) == 1  # the step that had no gradients left, on both ranks
    for a, b in zip(weights0, weights1, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def _shard_rank(rank, directory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    result = {}
    for shape in [(6, 5), (5, 3), (7,)]:
        for dim in range(len(shape)):
            weight, gradient = torch.randn(shape), torch.randn(shape)
            sharded = [distribute_tensor(t, mesh, [Shard(dim)]) for t in (weight, gradient)]
            norm = total_norm([sharded[1], gradient])
            count = clip_unitwise([nn.Parameter(sharded[0])], [sharded[1]], 0.5, 1e-3)
            whole = gradient.clone()
            expected_count = clip_unitwise([weight], [whole], 0.5, 1e-3)
            result[shape, dim] = (
                norm.item() / (2**0.5 * gradient.norm().item()),
                int(count) == int(expected_count),
                (sharded[1].full_tensor() - whole).abs().max().item(),
            )
    grid = init_device_mesh("cpu", (1, 2))
    weights, gradients, whole_weights, whole_gradients = [], [], [], []
    for shape in [(6, 5), (5, 6), (7,), (1, 9), (6, 5), (7,), ()]:  # all at once, in every way of sharding
        ways = [(mesh, [Shard(dim)]) for dim in range(len(shape))] + [(mesh, [Replicate()]), (None, None)]
        if len(shape) > 1:
            ways += [(grid, [Shard(0), Shard(1)]), (grid, [Replicate(), Shard(0)])]
        for placed_on, placements in ways:
            weight, gradient = torch.randn(shape), torch.randn(shape)
            whole_weights.append(weight)
            whole_gradients.append(gradient.clone())
            if placements:
                weight, gradient = (distribute_tensor(t, placed_on, placements) for t in (weight, gradient))
            weights.append(weight)
            gradients.append(gradient)
        weight, gradient = torch.randn(shape), torch.randn(shape)  # a gradient that is not summed yet
        whole_weights.append(weight)
        whole_gradients.append(gradient.clone())
        weights.append(distribute_tensor(weight, mesh, [Replicate()]))
        share = gradient * 3 if rank else gradient * -2
        gradients.append(DTensor.from_local(share, mesh, [Partial()]))
    count = clip_unitwise(weights, gradients, 0.5, 1e-3)
    expected_count = clip_unitwise(whole_weights, whole_gradients, 0.5, 1e-3)
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    differences = [(a - b).abs().max().item() for a, b in zip(found, whole_gradients, strict=True)]
    result["all"] = (1.0, int(count) == int(expected_count), max(differences))
    scale(gradients, 0.5)
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    differences = [(a - b / 2).abs().max().item() for a, b in zip(found, whole_gradients, strict=True)]
    half = torch.full((100, 100), 1000.0, dtype=torch.float16)
    norm = total_norm([distribute_tensor(half, mesh, [Shard(0)])]) / 1e5
    result["scaled"] = (norm.item(), True, max(differences))
    torch.save(result, directory / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_sharded_gradients_clip_exactly(tmp_path):
    run_ranks(_shard_rank, tmp_path)
    for rank in range(2):
        for ratio, same_count, difference in torch.load(tmp_path / f"{rank}.pt", weights_only=False).values():
            assert ratio == pytest.approx(1, rel=1e-5)
            assert same_count
            assert difference < 1e-6
