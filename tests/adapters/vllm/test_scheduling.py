"""The connector under a real vLLM scheduler and a real daemon; see conftest for the checks."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nexuskv.tools.daemon_process import DaemonProcess
    from tests.adapters.vllm.conftest import Harness, StartEngine

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 16
PROMPT = list(range(2, 152))  # 9 blocks and 6 tokens; a step computes 64


def computed(steps: list[Any]) -> list[int]:
    """Tokens computed in each step, decoding steps (one token) left out."""
    return [count for step in steps for count in step.scheduled.values() if count > 1]


def test_cold_prompt_is_computed_in_chunks(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    engine = start_engine(store_daemon.url)
    engine.add("r", PROMPT)
    assert computed(engine.run()) == [64, 64, 22]


def test_warm_prompt_computes_only_its_open_block(
    start_engine: "StartEngine", store_daemon: "DaemonProcess"
) -> None:
    warm_up(start_engine(store_daemon.url))
    engine = start_engine(store_daemon.url)
    engine.add("r", PROMPT)
    assert computed(engine.run()) == [6]


def warm_up(engine: "Harness", tokens: list[int] = PROMPT) -> None:
    engine.add("warm-up", tokens)
    engine.run()
