"""HotChannelRefresh: when it acts, what it chooses, and that a resumed run goes on exactly."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fp4 import FP4Precision, HotChannelRefresh, HotChannelUpdates, RecipeSchedule, fabric, get_recipe, matmul
from lightning_fp4.callbacks.hot_channel_refresh import choose_channels, overlap
from lightning_fp4.reference import select_channels
from tests.helpers import fp4_linear_layer, needs_two_gpus, run_processes
from tests.trainer_models import Regressor, assert_same_weights, layers_of, messages, plugin, trainer

CHON = get_recipe(
    "chon", stochastic_rounding=False, last_blocks=0, channels_ratio=0.5, update_interval=2, post_qk_protection=False
)


class Watch(Callback):
    """After each batch: the channels, and whether layers are scoring."""

    def __init__(self):
        self.channels, self.scoring = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        layers = layers_of(pl_module).values()
        self.channels.append([layer.fp4_hot_channels for layer in layers])
        self.scoring.append(any(layer.fp4_channel_scores is not None for layer in layers))

    def changes(self):
        """Batches after which the first layer has another tensor of channels than after the one before."""
        first = [channels[0] for channels in self.channels]
        return [i for i in range(1, len(first)) if first[i] is not first[i - 1]]


def fit(callback=None, *, recipe=CHON, model=None, callbacks=(), ckpt_path=None, **options):
    watch = Watch()
    model = model or Regressor(samples=64)  # eight batches
    t = trainer(plugin(recipe), callbacks=[*([callback] if callback else []), watch, *callbacks], **options)
    t.fit(model, ckpt_path=ckpt_path)
    return watch, model, t


def test_every_n_optimizer_steps():
    watch, _, _ = fit(HotChannelRefresh())
    assert watch.changes() == [2, 4, 6]  # and after the first, which replaces what its forward picked
    watch, _, _ = fit(HotChannelRefresh(every_n_steps=3))
    assert watch.changes() == [3, 6]
    assert not any(watch.scoring)


def test_accumulation_scores_the_whole_window():
    watch, _, _ = fit(HotChannelRefresh(), accumulate_grad_batches=2)
    assert watch.scoring == [True, False, False, False, True, False, False, False]
    assert watch.changes() == [1, 5]


def test_it_chooses_what_the_batch_says():
    """The callback's choice after the first step is that of the first batch and the initial weights."""
    model = Regressor(samples=64)
    batch = next(iter(model.loader()))
    weight = model.net[0].weight.detach().clone()
    fit(HotChannelRefresh(every_n_steps=100), model=model)
    expected = select_channels(matmul.channel_scores(batch, weight, CHON.fprop), 16)
    assert torch.equal(layers_of(model)["net.0"].fp4_hot_channels, expected)


def test_growing_interval():
    updates = HotChannelUpdates(interval=1, growth=2.0, max_interval=3)
    watch, _, _ = fit(HotChannelRefresh(updates=updates))
    assert watch.changes() == [1, 3, 6]  # at steps 0, 1, 3, 6: intervals 1, 2, 3


def test_freeze_by_step():
    watch, _, _ = fit(HotChannelRefresh(updates=HotChannelUpdates(interval=2, freeze_step=4)))
    assert watch.changes() == [2]


def test_freeze_by_overlap():
    callback = HotChannelRefresh(updates=HotChannelUpdates(interval=1, freeze_overlap=0.0))
    watch, _, _ = fit(callback)
    assert watch.changes() == [1]  # the second choice is the first that is compared with another
    assert callback.state_dict()["frozen"] == ["net.0", "net.2"]
    callback = HotChannelRefresh(updates=HotChannelUpdates(interval=1, freeze_overlap=1.0))
    watch, _, _ = fit(callback, model=Regressor(samples=8), max_epochs=6)
    assert callback.state_dict()["frozen"]  # one batch again and again: it settles


def test_ratio_rises_while_gradients_vary():
    updates = HotChannelUpdates(interval=2, variance_threshold=0.0, ratio_growth=1.5, ratio_max=0.9)
    recipe = get_recipe("chon", last_blocks=0, channels_ratio=0.4, post_qk_protection=False)
    callback = HotChannelRefresh(updates=updates)
    watch, _, _ = fit(callback, recipe=recipe)
    assert callback.state_dict()["ratio"] == pytest.approx(0.9)
    sizes = [channels[0].numel() for channels in watch.channels]
    assert sizes[0] == 32  # 0.6 of 32 channels, in sixteens
    calm = HotChannelRefresh(updates=HotChannelUpdates(interval=2, variance_threshold=1e9))
    fit(calm, recipe=recipe)
    assert calm.state_dict()["ratio"] is None


@pytest.mark.parametrize("stochastic", [False, True])
def test_resume_is_exact(tmp_path, stochastic):
    recipe = get_recipe(
        "chon",
        stochastic_rounding=stochastic,
        last_blocks=0,
        channels_ratio=0.5,
        post_qk_protection=False,
    )

    def callback():
        return HotChannelRefresh(updates=HotChannelUpdates(interval=1, growth=2.0, freeze_overlap=0.9))

    first = callback()
    _, straight, _ = fit(first, recipe=recipe, max_epochs=2)
    save = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=8, save_top_k=-1)
    fit(callback(), recipe=recipe, callbacks=[save], enable_checkpointing=True)
    path = tmp_path / "epoch=0-step=8.ckpt"
    torch.load(path, weights_only=True)
    second = callback()
    _, resumed, _ = fit(second, recipe=recipe, max_epochs=2, ckpt_path=str(path))
    assert_same_weights(resumed, straight)
    a, b = first.state_dict(), second.state_dict()
    chosen, again = a.pop("channels"), b.pop("channels")
    assert all(torch.equal(again[name], channels) for name, channels in chosen.items())
    assert a == b


def test_resume_without_the_callback_keeps_the_channels(tmp_path):
    _, straight, _ = fit(max_epochs=2)
    _, _, t = fit()
    t.save_checkpoint(tmp_path / "one.ckpt")
    _, resumed, _ = fit(max_epochs=2, ckpt_path=str(tmp_path / "one.ckpt"))
    assert_same_weights(resumed, straight)


def test_without_the_callback_the_plugin_warns_once_and_with_it_never(recwarn):
    watch, _, _ = fit()
    assert watch.changes() == []
    assert watch.channels[0][0] is not None
    said = [w for w in recwarn if "will not follow the run" in str(w.message)]
    assert len(said) == 1
    assert str(said[0].message) == (
        "FP4Precision('chon', precision='32-true') keeps the hot channels of its first batch; they will not follow the "
        "run. To choose them anew as it goes on, write `Trainer(callbacks=[lightning_fp4.HotChannelRefresh()])`."
    )
    recwarn.clear()
    fit(HotChannelRefresh())
    assert not [w for w in recwarn if "will not follow the run" in str(w.message)]


def test_the_plugin_warns_when_a_schedule_brings_the_hot_channels():
    with pytest.warns(UserWarning, match="will not follow the run") as caught:
        watch, _, _ = fit(callbacks=[RecipeSchedule({0: "high_precision", 3: "initial"})])
    assert len([w for w in caught if "will not follow the run" in str(w.message)]) == 1
    assert [channels[0] is not None for channels in watch.channels] == [False] * 3 + [True] * 5


def test_no_hot_channels_is_a_warning_and_no_more():
    with pytest.warns(UserWarning, match="no FP4 layers whose recipe has hot channels"):
        fit(HotChannelRefresh(), recipe="nvfp4")


def test_it_begins_when_a_schedule_switches_to_hot_channels():
    schedule = RecipeSchedule({0: "high_precision", 3: "initial"})
    watch, _, _ = fit(HotChannelRefresh(every_n_steps=2), callbacks=[schedule])
    assert [channels[0] is not None for channels in watch.channels] == [False] * 3 + [True] * 5
    # The schedule comes after the callback, so the first forward picks by itself, and the next step chooses.
    assert watch.changes() == [3, 4, 6]


def test_validation_and_sanity_check_do_not_score():
    watch, model, _ = fit(HotChannelRefresh(), num_sanity_val_steps=2, val_check_interval=3)
    plain, other, _ = fit(HotChannelRefresh(), limit_val_batches=0)
    assert_same_weights(model, other)
    assert watch.changes() == plain.changes()


def test_an_exception_leaves_no_layer_scoring():
    class Fails(Regressor):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("on purpose")

    model = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(HotChannelRefresh(), model=model)
    assert all(layer.fp4_channel_scores is None for layer in layers_of(model).values())


def test_a_layer_never_called_keeps_none():
    class Skips(Regressor):
        def step(self, batch):
            return self.net[0](batch).square().mean()

    model = Skips()
    fit(HotChannelRefresh(), model=model)
    layers = layers_of(model)
    assert layers["net.0"].fp4_hot_channels is not None
    assert layers["net.2"].fp4_hot_channels is None


@pytest.mark.slow
def test_compiled_inner_module_gives_the_same_run():
    class Compiled(Regressor):
        def __init__(self):
            super().__init__(samples=64)
            self.net = torch.compile(self.net, backend="aot_eager")

    _, compiled, _ = fit(HotChannelRefresh(), model=Compiled())
    _, eager, _ = fit(HotChannelRefresh())
    assert compiled.losses == eager.losses


def test_it_says_what_it_did(caplog):
    with caplog.at_level("INFO"):
        fit(HotChannelRefresh(every_n_steps=4))
        fit(HotChannelRefresh(every_n_steps=4, verbose=False))
    said = [m for m in messages(caplog) if m.startswith("HotChannelRefresh")]
    assert len(said) == 2
    assert said[0] == ("HotChannelRefresh: optimizer step 0: 32 hot channels in 2 layers; next at step 4.")


def test_choice_for_ranks_that_saw_other_batches():
    """The reduction decides: what two ranks average leads both to one set."""
    recipe = get_recipe("chon", last_blocks=0, channels_ratio=0.25)
    layers = {"a": fp4_linear_layer(64, 16, recipe)}
    mine, theirs = torch.rand(64), torch.rand(64)
    choose_channels(layers, {"a": mine}, reduce=lambda t: (t + theirs) / 2)
    assert torch.equal(layers["a"].fp4_hot_channels, select_channels(mine + theirs, 16))
    choose_channels(layers, {"a": torch.zeros(64)}, reduce=lambda t: (t + theirs) / 2)
    assert torch.equal(layers["a"].fp4_hot_channels, select_channels(theirs, 16))
    assert choose_channels(layers, {"a": torch.zeros(64)}) == {}
    assert choose_channels({}, {}) == {}


def test_overlap():
    a = torch.tensor([1, 2, 3, 4])
    assert overlap(a, torch.tensor([3, 4, 5, 6])) == 0.5
    assert overlap(a, torch.tensor([4])) == 1
    assert overlap(a, a[:0]) == 1


def test_wrong_interval():
    with pytest.raises(ValueError, match="every_n_steps=0"):
        HotChannelRefresh(every_n_steps=0)


class Sharded(Regressor):
    """Ranks see different batches."""

    def step(self, batch):
        offset = self.global_rank * torch.arange(32, device=batch.device)
        return super().step(batch * (1 + self.global_rank) + offset)


def _two_ranks(path, accelerator, with_callback):
    model = Sharded(samples=32, batch_size=4)
    callbacks = [HotChannelRefresh(every_n_steps=2)] if with_callback else []
    t = trainer(
        FP4Precision(CHON, precision="32-true"),
        callbacks=callbacks,
        accelerator=accelerator,
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
    )
    t.fit(model)
    channels = {name: layer.fp4_hot_channels.cpu() for name, layer in layers_of(model).items()}
    kept = {name: weight.cpu() for name, weight in model.state_dict().items()}
    torch.save({"channels": channels, "weights": kept}, f"{path}/{with_callback}-{t.global_rank}.pt")
    torch.distributed.barrier()


def _two_fabric_ranks(path, accelerator):
    precision = fabric.FP4Precision(CHON, precision="32-true")
    runner = Fabric(accelerator=accelerator, strategy="ddp", devices=2, plugins=[precision])
    runner.launch()
    layer = torch.nn.Linear(64, 64)
    model, optimizer = runner.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    torch.manual_seed(runner.global_rank)
    runner.backward(model(torch.randn(8, 64).to(runner.device)).square().mean())
    mine = layer.fp4_hot_channels.cpu()
    optimizer.step()
    weights = {name: weight.cpu() for name, weight in layer.state_dict().items()}
    state = {"mine": mine, "channels": {"0": layer.fp4_hot_channels.cpu()}, "weights": weights}
    torch.save(state, f"{path}/fabric-{runner.global_rank}.pt")
    torch.distributed.barrier()


def _worker(rank, path, accelerator, port):
    import os

    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": "2",
        }
    )
    for with_callback in (True, False):
        _two_ranks(path, accelerator, with_callback)
    _two_fabric_ranks(path, accelerator)
    torch.distributed.destroy_process_group()  # at exit its threads may still run


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, needs_two_gpus])])
def test_two_processes_choose_alike(accelerator, tmp_path):
    from lightning.fabric.plugins.environments.lightning import find_free_network_port

    run_processes(_worker, str(tmp_path), accelerator, find_free_network_port())
    for run in (True, False, "fabric"):
        first, second = (torch.load(tmp_path / f"{run}-{rank}.pt") for rank in (0, 1))
        for name, channels in first["channels"].items():
            assert torch.equal(channels, second["channels"][name])
        for name, weight in first["weights"].items():
            assert torch.equal(weight, second["weights"][name])
    assert torch.equal(first["mine"], first["channels"]["0"])
    assert not torch.equal(second["mine"], first["mine"])
