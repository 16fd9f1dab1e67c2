"""The layer rule: who may import whom, which libraries enter where, and what no module may do.

`breaches` is the whole rule, a pure function from a module's name and source to sentences. Planted
sources below prove that it can fail.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
FOLDERS = ("adapters", "dataplane", "index", "tiers", "tools")  # nexuskv/<folder> links to each

VOCABULARY = ("key", "namespace", "types", "errors", "clock", "config")

# The longest matching prefix names a module's layer; vocabulary is listed module by module, so a
# new file beside it has no layer until it is given one here.
LAYERS = {
    "nexuskv": "package",
    "nexuskv.UNKNOWN": "vocabulary",
    "nexuskv.Unknown": "vocabulary",
    "nexuskv.__version__": "vocabulary",
    "nexuskv.connect": "client",
    **{f"nexuskv.{name}": "vocabulary" for name in VOCABULARY},
    "nexuskv.index": "index",
    "nexuskv.index.leases": "leases",
    "nexuskv.tiers": "tiers",
    "nexuskv.tiers.rocks": "rocks",
    "nexuskv.dataplane": "dataplane",
    "nexuskv.dataplane.device": "device",
    "nexuskv.dataplane.mooncake": "mooncake",
    "nexuskv.protocol": "protocol",
    "nexuskv.control": "control",
    "nexuskv.worker": "worker",
    "nexuskv.worker.commands": "commands",
    "nexuskv.worker.codec": "commands",
    "nexuskv.client": "client",
    "nexuskv.serve": "serve",
    "nexuskv.adapters": "adapters",
    "nexuskv.tools": "tools",
    "nexuskv.tools.cli": "cli",
    "nexuskv.tools.commands": "cli",
    "nexuskv.tools.__main__": "cli",
    "nexuskv.tools.bench": "bench",
}

# What a layer may import besides itself and the vocabulary.
EDGES: dict[str, set[str]] = {
    "package": {"client"},
    "vocabulary": set(),
    "index": set(),
    "leases": set(),
    "tiers": {"rocks"},
    "rocks": set(),
    "dataplane": {"device", "mooncake"},
    "device": {"dataplane"},
    "mooncake": {"dataplane"},
    "protocol": set(),
    "commands": set(),
    "control": {"protocol", "index", "leases", "tiers", "commands"},
    "worker": {"protocol", "tiers", "dataplane", "commands"},
    "client": {"protocol", "dataplane"},
    "serve": {"control", "commands", "protocol", "tiers"},  # opens the tier that both are given
    "adapters": {"client", "device"},
    "tools": {"client"},
    "cli": {"client", "tools", "bench", "serve"},
    "bench": {"client", "tools", "protocol", "index", "tiers", "dataplane", "control"},
}

# Libraries from elsewhere, by layer. What is not named here may not be imported.
LIBRARIES: dict[str, set[str]] = {
    "vocabulary": {"xxhash"},
    "leases": {"numpy"},
    "tiers": {"numpy", "xxhash"},
    "rocks": {"rocksdict"},
    "dataplane": {"xxhash"},
    "device": {"torch", "cupy"},
    "mooncake": {"mooncake"},
    "protocol": {"msgpack"},
    "commands": {"msgpack"},
    "control": {"numpy", "msgpack", "zmq"},
    "worker": {"numpy"},
    "client": {"zmq"},
    "adapters": {"huggingface_hub", "torch", "vllm", "sglang"},
    "tools": {"xxhash"},
    "bench": {"numpy", "xxhash", "msgpack", "zmq"},
}
# Optional or heavy: only inside a function, so that importing the layer never loads them.
LAZY = {
    ("client", "zmq"),
    ("rocks", "rocksdict"),
    ("mooncake", "mooncake"),
    ("device", "torch"),
    ("device", "cupy"),
}

READ_ENVIRONMENT = ("nexuskv.config", "nexuskv.tools.cli")
# The outer edges, where an unexpected error becomes a log line and a counter: the daemon's loop and
# its worker, the handler of a request, an engine's hooks, the command line.
CATCH_ALL = (
    "nexuskv.control.loop",
    "nexuskv.control.dispatch",
    "nexuskv.worker.lanes",
    "nexuskv.adapters.vllm.connector",
    "nexuskv.tools.cli",
)
DYNAMIC_IMPORTS = ("import_module", "__import__")
EVERYTHING = {"Exception", "BaseException"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


@dataclass(frozen=True)
class Import:
    """One imported name, dotted, and where."""

    name: str
    line: int
    at_top: bool  # runs when the module is imported


def layer_of(name: str) -> str | None:
    """The layer of a module or of a name in it; None when it has none."""
    parts = name.split(".")
    while len(parts) > 1 and ".".join(parts) not in LAYERS:
        parts.pop()
    layer = LAYERS.get(".".join(parts))
    return None if layer == "package" and name != "nexuskv" else layer


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every import, also those in functions, under TYPE_CHECKING and by importlib."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, at_top = pending.pop()
        for name in _names(node):
            yield Import(name, getattr(node, "lineno", 0), at_top)
        inside = at_top and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += [(child, False) for child in node.body]
            pending += [(child, inside) for child in node.orelse]
        else:
            pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "nexuskv.connect":
        return ["nexuskv.connect"]  # loads the client, though no import says so
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(DYNAMIC_IMPORTS):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def breaches(module: str, source: str) -> list[str]:
    """What a module does that it may not, one sentence each."""
    tree = ast.parse(source)
    layer = layer_of(module)
    if layer is None:
        return [f"{module}: no layer; give it one in LAYERS"]
    found = [(item.line, wrong) for item in imports(tree) for wrong in _wrong_import(layer, item)]
    found += [(line, wrong) for line, wrong in _habits(tree) if not _permitted(module, wrong)]
    return [f"{module}:{line}: {wrong}" for line, wrong in sorted(found)]


def _wrong_import(layer: str, item: Import) -> Iterator[str]:
    root = item.name.split(".")[0]
    if root in PICKLES:
        yield f"imports {root}"
    elif root == "nexuskv":
        target = layer_of(item.name)
        if target not in {layer, "package", "vocabulary", *EDGES[layer]}:
            yield f"{layer} imports {target} ({item.name})"
    elif item.name.startswith(".") or root in FOLDERS:
        yield f"imports {item.name}, which is not nexuskv.…"
    elif root == "typing_extensions":
        if item.at_top:
            yield f"{layer} imports {root} outside TYPE_CHECKING"
    elif root not in sys.stdlib_module_names:
        if root not in LIBRARIES.get(layer, set()):
            yield f"{layer} imports {root}"
        elif item.at_top and (layer, root) in LAZY:
            yield f"{layer} imports {root} at module level"


def _habits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for name in _names(node):
                yield from ((node.lineno, habit) for habit in _habit_of(name))
        elif isinstance(node, ast.Attribute):
            yield from ((node.lineno, habit) for habit in _habit_of(ast.unparse(node)))
        elif isinstance(node, ast.ExceptHandler | ast.Call) and _catches_all(node):
            yield node.lineno, "catches everything"


def _habit_of(name: str) -> Iterator[str]:
    if name in {"os.environ", "os.environb", "os.getenv", "os.putenv"}:
        yield "reads the environment"
    if name == "time.sleep":
        yield "sleeps"


def _catches_all(node: ast.ExceptHandler | ast.Call) -> bool:
    """Whether all errors end here. A handler that cleans up and re-raises lets them go on."""
    if isinstance(node, ast.ExceptHandler):
        last = node.body[-1]
        goes_on = isinstance(last, ast.Raise) and last.exc is None
        return not goes_on and (node.type is None or bool(EVERYTHING & _words([node.type])))
    return ast.unparse(node.func).endswith("suppress") and bool(EVERYTHING & _words(node.args))


def _words(nodes: Sequence[ast.expr]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _permitted(module: str, habit: str) -> bool:
    if habit == "reads the environment":
        return within(module, READ_ENVIRONMENT)
    return habit == "catches everything" and within(module, CATCH_ALL)


def sources() -> dict[str, Path]:
    """Every module of the package by its import name."""
    files = {path: Path("nexuskv") for path in (REPO / "nexuskv").glob("*.py")}
    for folder in sorted({path.parent for path in (REPO / "nexuskv").glob("*/__init__.py")}):
        for path in folder.resolve().rglob("*.py"):
            files[path] = Path("nexuskv", folder.name, path.relative_to(folder.resolve()).parent)
    named = {
        (parent / path.stem).as_posix().replace("/", "."): path for path, parent in files.items()
    }
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


MODULES = sources()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_keeps_the_rules(module: str) -> None:
    assert breaches(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted((REPO / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_tests_wait_for_things_and_not_for_time(path: Path) -> None:
    assert [habit for _, habit in _habits(ast.parse(path.read_text())) if habit == "sleeps"] == []


def test_every_layer_folder_is_looked_at() -> None:
    assert {"nexuskv", *(f"nexuskv.{name}" for name in (*VOCABULARY, *FOLDERS))} <= set(MODULES)


PLANTED = [
    ("nexuskv.index.radix", "from nexuskv.tiers.host import HostTier", "index imports tiers"),
    ("nexuskv.index.radix", "from nexuskv.dataplane import native", "index imports dataplane"),
    ("nexuskv.index.radix", "def f():\n    import numpy", "index imports numpy"),
    ("nexuskv.index.radix", "import nexuskv.control", "index imports control"),
    ("nexuskv.tiers.host", "from nexuskv import index", "tiers imports index"),
    ("nexuskv.tiers.catalogue", "def f():\n    import rocksdict", "tiers imports rocksdict"),
    ("nexuskv.tiers.rocks", "import rocksdict", "rocks imports rocksdict at module level"),
    ("nexuskv.control.x", "from nexuskv.tiers.rocks import Rocks", "control imports rocks"),
    ("nexuskv.dataplane.shm", "from nexuskv.protocol import VERSION", "dataplane imports protocol"),
    ("nexuskv.dataplane.shm", "import numpy as np", "dataplane imports numpy"),
    ("nexuskv.dataplane.shm", "def f():\n    import torch", "dataplane imports torch"),
    ("nexuskv.control.daemon", "from nexuskv.dataplane import shm", "control imports dataplane"),
    ("nexuskv.control.daemon", "from nexuskv.client.store import x", "control imports client"),
    ("nexuskv.worker.worker", "from nexuskv.index import radix", "worker imports index"),
    ("nexuskv.worker.worker", "from nexuskv.control import daemon", "worker imports control"),
    ("nexuskv.client.store", "import nexuskv.tiers", "client imports tiers"),
    ("nexuskv.client.store", "import numpy", "client imports numpy"),
    ("nexuskv.client.store", "import zmq", "client imports zmq at module level"),
    ("nexuskv.client.store", "class A:\n    import zmq", "client imports zmq at module level"),
    ("nexuskv.client.store", "if True:\n    import zmq", "client imports zmq at module level"),
    ("nexuskv.key", "from nexuskv.protocol import VERSION", "vocabulary imports protocol"),
    ("nexuskv.key", "from nexuskv import connect", "vocabulary imports client"),
    ("nexuskv.key", "import nexuskv\nnexuskv.connect()", "vocabulary imports client"),
    ("nexuskv.key", "import zmq", "vocabulary imports zmq"),
    ("nexuskv.protocol", "from nexuskv.client import store", "protocol imports client"),
    ("nexuskv.control.x", "import nexuskv.worker.engine", "control imports worker"),
    ("nexuskv.serve", "from nexuskv.index import radix", "serve imports index"),
    ("nexuskv.adapters.vllm.worker", "import nexuskv.protocol", "adapters imports protocol"),
    ("nexuskv.adapters.vllm.worker", "import nexuskv.dataplane.shm", "adapters imports dataplane"),
    ("nexuskv.tools.demo", "from nexuskv.serve import serve", "tools imports serve"),
    ("nexuskv.tools.demo", "from nexuskv.index import radix", "tools imports index"),
    ("nexuskv.tools.demo", "import vllm", "tools imports vllm"),
    ("nexuskv.index.x", "import importlib as i\ni.import_module('torch')", "index imports torch"),
    ("nexuskv.index.x", "__import__('nexuskv.tiers')", "index imports tiers"),
    ("nexuskv.index.x", "from . import radix", "not nexuskv."),
    ("nexuskv.index.x", "import tiers", "not nexuskv."),
    ("nexuskv.index.x", "import pickle", "imports pickle"),
    ("nexuskv.index.x", "from pickle import loads", "imports pickle"),
    ("nexuskv.index.x", "import os\nos.environ['A']", "reads the environment"),
    ("nexuskv.index.x", "import os\nx = os.getenv('A')", "reads the environment"),
    ("nexuskv.index.x", "from os import environ", "reads the environment"),
    ("nexuskv.index.x", "import time\ntime.sleep(1)", "sleeps"),
    ("nexuskv.tools.cli", "from time import sleep", "sleeps"),
    ("nexuskv.index.x", "try:\n    f()\nexcept Exception:\n    g()", "catches everything"),
    ("nexuskv.index.x", "try:\n    f()\nexcept:\n    g()", "catches everything"),
    (
        "nexuskv.index.x",
        "try:\n    f()\nexcept (OSError, Exception):\n    g()",
        "catches everything",
    ),
    (
        "nexuskv.index.x",
        "import contextlib\nwith contextlib.suppress(Exception):\n    f()",
        "catches",
    ),
    ("nexuskv.index.x", "import typing_extensions", "outside TYPE_CHECKING"),
    ("nexuskv.manager", "", "no layer"),
]


@pytest.mark.parametrize(("module", "source", "expected"), PLANTED)
def test_a_planted_breach_is_found(module: str, source: str, expected: str) -> None:
    found = breaches(module, source)
    assert len(found) == 1
    assert expected in found[0]


PERMITTED = [
    ("nexuskv.control.daemon", "import zmq, numpy\nfrom nexuskv.index import radix"),
    ("nexuskv.client.store", "def connect():\n    import zmq"),
    ("nexuskv.client.store", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import zmq"),
    ("nexuskv.config", "import os\nos.environ"),
    ("nexuskv.index.x", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    ("nexuskv.index.radix", "import os\nfrom nexuskv import UNKNOWN\nos.getpid()"),
    ("nexuskv.adapters.vllm.worker", "import torch, nexuskv\nimport nexuskv.dataplane.device"),
    (
        "nexuskv.tools.cli",
        "from nexuskv.serve import serve\ntry:\n    f()\nexcept Exception:\n    g()",
    ),
]


@pytest.mark.parametrize(("module", "source"), PERMITTED)
def test_what_is_allowed_is_no_breach(module: str, source: str) -> None:
    assert breaches(module, source) == []


@pytest.mark.parametrize(
    ("module", "libraries"),
    [
        *(
            (module, {"numpy", "torch", "zmq", "rocksdict"})
            for module in ("nexuskv", "nexuskv.index.radix", "nexuskv.client.store")
        ),
        ("nexuskv.control.control", {"torch", "rocksdict"}),
        ("nexuskv.tiers.catalogue", {"rocksdict"}),
    ],
)
def test_import_loads_no_heavy_library(module: str, libraries: set[str]) -> None:
    code = f"import sys, {module}\nprint({libraries!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "set()"
