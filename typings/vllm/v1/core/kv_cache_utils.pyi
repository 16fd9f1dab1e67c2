from collections.abc import Callable
from typing import Any

def resolve_none_hash_seed(hash_fn: Callable[[Any], bytes]) -> str: ...
