# What the vLLM adapter uses, for type checkers only: the engine has an environment of its own.
from typing import Any

__version__: str
__version_tuple__: tuple[int | str, ...]

def __getattr__(name: str) -> Any: ...
