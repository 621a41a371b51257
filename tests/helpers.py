"""Tiny random targets with a byte tokenizer and a chat template, made in memory or in a folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash2_lab.target import Target, wrap_target

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if shout is defined and shout %}LOUD\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
PAD_ID, START_ID, END_ID, MASK_ID = range(4)
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte after four special ones: 260 tokens."""
    names = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: index for index, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(family: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model of 4 layers, 4 query and 2 key-value heads, float32, with lively logits."""
    config_class, model_class = FAMILIES[family]
    settings = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    config = config_class(**(settings | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.eval().requires_grad_(False)


def tiny_target(family: str = "qwen3", seed: int = 0, **overrides: object) -> Target:
    """`tiny_model` with `tiny_tokenizer` as a target; `overrides` go to the config."""
    return wrap_target(tiny_model(family, seed, **overrides), tiny_tokenizer(), f"tiny-{family}")


def save_tiny(folder: Path, family: str = "qwen3", seed: int = 0, **overrides: object) -> Path:
    """The same as a checkpoint folder, for `load_target`."""
    tiny_model(family, seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
