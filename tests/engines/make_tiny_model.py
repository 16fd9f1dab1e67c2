"""Write a tiny Qwen3 model with random weights and its own tokenizer into a folder; no download.

Runs in an engine's environment (torch, transformers, tokenizers). The weights are a function of the
seed alone, so two folders made with one seed hold the same model. Their spread is wide on purpose:
greedy output then depends on the whole prompt, which is what shows that loaded KV was used.

Example: `.venv-vllm/bin/python tests/engines/make_tiny_model.py /tmp/tiny`
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
CORPUS = ["a page holds the keys and values of some tokens, and a prefix is made of pages"]


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on one sentence and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def write_model(folder: Path, *, seed: int, layers: int) -> None:
    """Save a model of `layers` layers, 4 heads over 2 KV heads of 64, in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def main() -> None:
    """Write tokenizer and model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="made when missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.folder)
    write_model(args.folder, seed=args.seed, layers=args.layers)


if __name__ == "__main__":
    main()
