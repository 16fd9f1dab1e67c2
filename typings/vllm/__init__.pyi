# What the vLLM adapter uses, for type checkers only: the engine has an environment of its own.
__version__: str
__version_tuple__: tuple[int | str, ...]
