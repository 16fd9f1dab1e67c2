"""The error tree, and translating others' errors into it."""

import pytest

from nexuskv import errors
from nexuskv.errors import (
    ConfigError,
    NexusError,
    OutOfSpace,
    TransferFailed,
    TransferTimeout,
    translating,
)

PARENTS = {
    "ConfigError": "NexusError",
    "Unavailable": "NexusError",
    "DaemonUnreachable": "Unavailable",
    "TransferTimeout": "Unavailable",
    "TransferFailed": "Unavailable",
    "Refused": "NexusError",
    "OutOfSpace": "Refused",
    "LeaseExpired": "Refused",
    "EpochChanged": "Refused",
    "CorruptPage": "NexusError",
    "ProtocolError": "NexusError",
}


def test_the_tree_is_the_one_the_guide_draws() -> None:
    found = {
        name: value.__mro__[1].__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, NexusError) and value is not NexusError
    }
    assert found == {**PARENTS, "ConfigError": "NexusError"}


def test_a_configuration_error_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)


def test_the_first_entry_that_matches_translates_and_keeps_the_cause() -> None:
    cause = FileNotFoundError("gone")
    with (
        pytest.raises(OutOfSpace, match="gone") as caught,
        translating({FileNotFoundError: OutOfSpace, OSError: TransferFailed}),
    ):
        raise cause
    assert caught.value.__cause__ is cause


def test_a_subclass_is_translated_by_its_bases_entry() -> None:
    with pytest.raises(TransferFailed), translating({OSError: TransferFailed}):
        raise ConnectionResetError("reset")


def test_an_error_without_words_is_named() -> None:
    with (
        pytest.raises(TransferTimeout, match="TimeoutError"),
        translating({TimeoutError: TransferTimeout}),
    ):
        raise TimeoutError


@pytest.mark.parametrize("other", [KeyError("x"), ConfigError("mine"), KeyboardInterrupt()])
def test_other_errors_pass(other: BaseException) -> None:
    with pytest.raises(type(other)) as caught, translating({OSError: TransferFailed}):
        raise other
    assert caught.value is other


def test_nothing_raised_is_nothing_translated() -> None:
    with translating({OSError: TransferFailed}):
        reached = True
    assert reached
