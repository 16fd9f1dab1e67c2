"""A real vLLM in a process of its own, told what to generate line by line; for the engine tests.

Reads JSON commands from stdin and answers each with one line `RESULT {json}` on stdout, among
whatever else the engine prints. Commands: `{"seeds": [0, 5], "pause_after": 3}` generates greedily
for one prompt a seed, from an empty prefix cache of its own; with `pause_after` it prints `RESULT
{"paused": true}` after so many steps and goes on at the next line.

Example: `echo '{"seeds": [0]}' | .venv-vllm/bin/python tests/engines/vllm_generate.py MODEL '{}'`
"""

import argparse
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT_TOKENS = 100
OUTPUT_TOKENS = 12
BLOCK_TOKENS = 32


def prompt_of(seed: int) -> list[int]:
    """Tokens of one prompt; prompts of different seeds differ from their first token on."""
    return [2 + (7 * at + seed) % 300 for at in range(PROMPT_TOKENS)]


def open_engine(model: str, kv_transfer: dict[str, Any]) -> Any:
    """A small engine; without a connector when `kv_transfer` is empty."""
    from vllm import LLM

    options: dict[str, Any] = {"kv_transfer_config": kv_transfer} if kv_transfer else {}
    return LLM(
        model=model,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def generate(engine: Any, seeds: list[int], *, pause_after: int | None) -> dict[str, Any]:
    """Run all prompts to their end; tokens and hits in the order of `seeds`."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for seed in seeds:
        engine.add_request(f"seed-{seed}", {"prompt_token_ids": prompt_of(seed)}, sampling)
    finished: dict[str, Any] = {}
    step_count = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        step_count += 1
        if step_count == pause_after:
            answer({"paused": True})
            sys.stdin.readline()
    ordered = [finished[f"seed-{seed}"] for seed in seeds]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in ordered],
        "cached": [output.num_cached_tokens for output in ordered],
    }


def connector_stats(engine: Any) -> dict[str, Any]:
    """Both halves' own counters; empty without a connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return {}
    scheduler = engine.engine_core.engine_core.scheduler
    return {**scheduler.connector.stats(), **get_kv_transfer_group().stats()}


def answer(result: dict[str, Any]) -> None:
    """One line for whoever asked."""
    print("\nRESULT " + json.dumps(result), flush=True)


def main() -> None:
    """Serve commands until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("kv_transfer", help="kv_transfer_config as JSON; {} for none")
    args = parser.parse_args()
    llm = open_engine(args.model, json.loads(args.kv_transfer))
    for line in sys.stdin:
        command = json.loads(line)
        llm.reset_prefix_cache()
        result = generate(llm.llm_engine, command["seeds"], pause_after=command.get("pause_after"))
        answer({**result, "stats": connector_stats(llm.llm_engine)})


if __name__ == "__main__":
    main()
