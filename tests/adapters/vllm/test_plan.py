"""What ranks report is joined to what all of them have."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nexuskv.adapters.vllm.plan import StepReport

pytestmark = pytest.mark.engine


def reports() -> "tuple[StepReport, StepReport]":
    from nexuskv.adapters.vllm.plan import StepReport

    return (
        StepReport(step=3, planned_blocks=9, loaded={"a": 9, "b": 0}, unsaved={"a": 4}),
        StepReport(step=3, planned_blocks=9, loaded={"a": 2, "b": 0}, unsaved={"b": 1}, off=True),
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_joined_report_has_what_all_ranks_have(vllm_loaded: None, *, swapped: bool) -> None:
    from nexuskv.adapters.vllm.plan import StepReport

    one, two = reversed(reports()) if swapped else reports()
    assert one.aggregate(two) == StepReport(
        step=3, planned_blocks=9, loaded={"a": 2, "b": 0}, unsaved={"a": 4, "b": 1}, off=True
    )


def test_blocks_after_a_failed_one_count_as_failed(vllm_loaded: None) -> None:
    assert reports()[1].failed_blocks == 7
