"""One frozen configuration: a TOML file, then `NEXUSKV_*` variables, then flags; later wins.

Every bound, wait, queue and size of the system has its name here. Unknown keys and bad values are
one clear error before anything opens. Built once in `main` or `connect`, then passed along; nothing
else reads the environment.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from nexuskv.errors import ConfigError

ENV_PREFIX: Final = "NEXUSKV_"
KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

SSD_POLICIES: Final = ("write_through", "on_second_use", "on_evict")
"""What the setting `ssd_policy` may be."""

_SIZE: Final = re.compile(
    r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(B|[KMGT]iB|[KMGT]B|[KMGT])?", re.ASCII | re.IGNORECASE
)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Bytes from `4096`, `64KiB`, `16GiB` (also `KB`, `K` …, all powers of 1024).

    Raises:
        ConfigError: the text is not a size, or not a whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ConfigError(f"{text!r} is not a size such as 64MiB or 16GiB")
    unit = (found[2] or "B").upper()
    size = Fraction(found[1]) * 1024 ** _POWERS[unit.rstrip("B").rstrip("I")]
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_size(size_bytes: float) -> str:
    """A size for people: `16GiB`, `1.5MiB`, `0B`."""
    for unit, scale in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g}{unit}"
    return f"{size_bytes:.0f}B"


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of `Config` is read and shown. `unit` is `size`, `s`, `count` or `` (text)."""

    help: str
    unit: str = ""
    least: float = 0
    most: float = 0


# What a setting is at most unless it says less: counts and sizes that a C library or a u64 of
# milliseconds can still hold.
_MOST: Final[Mapping[str, float]] = {"": 0, "count": 2**31 - 1, "size": 2**62, "s": 1e9}


def _set(  # typed Any because a dataclass field stands for its value
    default: object, help_text: str, unit: str = "", least: float = 0, most: float | None = None
) -> Any:
    most = _MOST[unit] if most is None else most
    return field(default=default, metadata={"setting": Setting(help_text, unit, least, most)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of daemon and client. Sizes in bytes, durations in seconds.

    Raises:
        ConfigError: a value has the wrong type or is outside its bounds.
    """

    # --- where things are
    url: str = _set("", "daemon address for clients: unix:///path or tcp://host:port")
    listen: str = _set("", "addresses the daemon listens on, separated by commas")
    name: str = _set("default", "instance name: part of the default socket and segment paths")
    segment_dir: str = _set("", "folder for segments; default /dev/shm/nexuskv-UID/NAME")
    events: str = _set("", "zmq PUB address for events, e.g. tcp://127.0.0.1:0; empty: none")
    http: str = _set("", "host:port for /metrics and /healthz; empty: none")
    tenant: str = _set("default", "tenant this client acts for")
    # --- host tier
    host_memory: int = _set(GIB, "memory for pages, rounded down to whole chunks", "size", MIB)
    chunk_bytes: int = _set(64 * MIB, "unit of memory given to one slot size", "size", MIB)
    huge_pages: bool = _set(False, "ask for transparent huge pages in segments")
    namespace_bytes_max: int = _set(
        0, "cap on one namespace's bytes in host memory; 0: none", "size"
    )
    quarantine_bytes: int = _set(
        256 * MIB, "slots whose writer may still write; reserve is refused above", "size"
    )
    keep_pages: bool = _set(
        True, "leave pages in memory for the next start; off: start empty, and leave nothing"
    )
    recover_slice_s: float = _set(
        0.005, "how long recovery after a start works between requests", "s", 0.0001
    )
    # --- ssd tier
    ssd_dir: str = _set("", "folder of the ssd tier; empty: none")
    ssd_capacity: int = _set(0, "bytes of the ssd tier, rounded down to whole files", "size")
    ssd_file_bytes: int = _set(GIB, "size of one slab file", "size", MIB)
    ssd_slot_bytes_min: int = _set(
        16 * KIB, "smaller pages take a slot of this size on the ssd", "size", 4 * KIB
    )
    ssd_threads: int = _set(8, "reads and writes of the ssd at a time", "count", 1, 256)
    ssd_open_files: int = _set(256, "slab files kept open", "count", 1, 65536)
    ssd_errors_max: int = _set(
        16, "errors in a row after which the ssd tier leaves service", "count", 1
    )
    ssd_retry_s: float = _set(
        1.0, "pause before rows of the ssd that could not be deleted are tried again", "s", 0.001
    )
    ssd_namespaces_max: int = _set(
        65536, "namespaces on record on the ssd; pages of more are not copied", "count", 1
    )
    copy_queue_bytes: int = _set(
        256 * MIB, "pages waiting for or in a copy to the ssd; more are not copied", "size", 1
    )
    copy_group_bytes: int = _set(8 * MIB, "pages of one copy command", "size", 1)
    load_inflight_bytes: int = _set(64 * MIB, "pages being loaded from the ssd", "size", 1)
    load_retry_s: float = _set(
        0.02, "pause before host memory for a load is looked for again", "s", 0.001
    )
    ssd_policy: str = _set("write_through", "pages copied to the ssd: " + ", ".join(SSD_POLICIES))
    ssd_second_use_pages_max: int = _set(
        2**20, "published pages remembered, to know those used twice; 8 bytes each", "count", 1
    )
    ssd_ahead_pages_max: int = _set(
        1024,
        "cold pages that on_evict copies at a time; it begins at so few free slots",
        "count",
        1,
    )
    # --- worker
    worker_queue_max: int = _set(1024, "commands waiting for the data plane", "count", 1)
    worker_socket_bytes_max: int = _set(
        64 * MIB, "unsent commands to the worker, and one message of it", "size", MIB, GIB
    )
    worker_timeout_s: float = _set(
        30.0, "a command unanswered for so long has the worker killed and replaced", "s", 0.01
    )
    worker_reap_s: float = _set(
        5.0, "how long a killed worker may take to be gone before that is an error", "s", 0.01
    )
    worker_backoff_min_s: float = _set(0.1, "first pause before a lost worker's successor", "s")
    worker_backoff_max_s: float = _set(5.0, "longest pause before a worker is started", "s")
    worker_nice: int = _set(19, "how far the worker steps back for others", "count", 0, 19)
    # --- bounds of the control plane
    sessions_max: int = _set(1024, "open sessions", "count", 1)
    namespaces_max: int = _set(1024, "namespaces known to the daemon", "count", 1)
    session_namespaces_max: int = _set(1024, "namespaces opened by one session", "count", 1)
    leases_max: int = _set(65536, "leases held at a time", "count", 1)
    acquires_waiting_max: int = _set(1024, "acquires that wait for pages", "count", 1)
    pins_max: int = _set(65536, "pinned pages", "count")
    fragments_max: int = _set(65536, "fragment heads kept; the coldest goes first", "count", 1)
    session_reserved_bytes: int = _set(
        GIB, "bytes one session may hold reserved and uncommitted", "size", MIB
    )
    batch_pages_max: int = _set(65536, "pages one message may name", "count", 1)
    message_bytes_max: int = _set(16 * MIB, "one control message", "size", 64 * KIB, GIB)
    send_backlog_bytes: int = _set(
        64 * MIB, "unsent replies to one session before it is closed", "size", 64 * KIB
    )
    lease_ttl_max_s: float = _set(600.0, "longest lease granted", "s", 0.001)
    lease_margin_s: float = _set(0.5, "how much longer the daemon keeps a lease", "s")
    pin_ttl_max_s: float = _set(86400.0, "longest pin granted", "s")
    acquire_wait_max_s: float = _set(300.0, "longest wait of an acquire", "s")
    acquire_group_bytes: int = _set(8 * MIB, "least bytes of a streamed group", "size", 1)
    acquire_window_bytes: int = _set(
        256 * MIB, "unreleased bytes streamed to one waiting acquire", "size", 1
    )
    session_idle_s: float = _set(60.0, "silence after which a remote session is dropped", "s", 0.1)
    verify_pages_max: int = _set(1024, "pages one verify may name", "count", 1)
    verifies_max: int = _set(64, "verifies under way", "count", 1)
    deferred_max: int = _set(1024, "clears and removes that wait for the data plane", "count", 1)
    events_backlog_max: int = _set(65536, "events kept for slow followers", "count", 1)
    inspect_rows_max: int = _set(4096, "rows of one inspect page", "count", 1)
    stop_timeout_s: float = _set(10.0, "how long a clean stop may take", "s", 0.1)
    # --- client
    connect_timeout_s: float = _set(2.0, "connecting and the first exchange", "s", 0.001)
    request_timeout_s: float = _set(5.0, "one exchange with the daemon", "s", 0.001)
    transfer_timeout_s: float = _set(30.0, "one get or put, all its batches", "s", 0.001)
    exchange_spin_s: float = _set(
        0.0002, "how long an exchange polls for its reply before it sleeps", "s", most=0.01
    )
    backoff_min_s: float = _set(0.05, "first pause between reconnects", "s", 0.001)
    backoff_max_s: float = _set(1.0, "longest pause between reconnects", "s", 0.001)
    lease_ttl_s: float = _set(30.0, "lease of a get; renewed while it runs", "s", 0.001)
    client_connections: int = _set(8, "sockets one client opens", "count", 1, 64)
    client_batch_pages: int = _set(4096, "pages per message; longer calls are split", "count", 1)
    copy_threads: int = _set(1, "threads of one native copy", "count", 1, 64)
    releases_pending_max: int = _set(4096, "releases that wait for the next exchange", "count", 1)
    release_delay_s: float = _set(
        0.1, "longest a release waits for an exchange to ride on", "s", 0.001
    )
    views_max: int = _set(1024, "views open at a time", "count", 1)
    # --- engine adapters
    adapter_miss_s: float = _set(
        0.5, "how long a scheduler trusts a miss of a waiting request", "s"
    )
    adapter_load_ssd: bool = _set(
        True, "whether engines load pages that are not in host memory; else those are misses"
    )
    adapter_loras_max: int = _set(64, "LoRA adapters an engine adapter remembers", "count", 1)

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec.name, getattr(self, spec.name))
        _check_name(self.name)
        if self.ssd_policy not in SSD_POLICIES:
            raise ConfigError(
                f"setting ssd_policy cannot be {self.ssd_policy!r}: there are "
                f"{', '.join(SSD_POLICIES)}"
            )
        if self.chunk_bytes % 4096:
            raise ConfigError(f"chunk_bytes {self.chunk_bytes} is not a multiple of 4096")
        if self.host_memory < self.chunk_bytes:
            raise ConfigError(
                f"host_memory {format_size(self.host_memory)} is less than one chunk of "
                f"{format_size(self.chunk_bytes)} (chunk_bytes)"
            )
        if self.worker_backoff_min_s > self.worker_backoff_max_s:
            raise ConfigError(
                f"worker_backoff_min_s {self.worker_backoff_min_s} exceeds worker_backoff_max_s "
                f"{self.worker_backoff_max_s}"
            )
        if self.backoff_min_s > self.backoff_max_s:
            raise ConfigError(
                f"backoff_min_s {self.backoff_min_s} exceeds backoff_max_s {self.backoff_max_s}"
            )


def default_url(config: Config) -> str:
    """The local address of the instance `config.name` where none is configured."""
    return f"unix:///dev/shm/nexuskv-{os.getuid()}/{config.name}/daemon.sock"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and where each value came from: `default`, `file PATH`, `env VAR` or `flag`."""

    config: Config
    sources: Mapping[str, str]


def setting_of(name: str) -> Setting:
    """The `Setting` of a config field."""
    setting = Config.__dataclass_fields__[name].metadata["setting"]
    assert isinstance(setting, Setting)
    return setting


def load_config(
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Build the one `Config`.

    Args:
        file: a TOML file of `key = value` lines; None reads `NEXUSKV_CONFIG` from `env`, if set.
        env: the environment; None means this process's.
        flags: values given on the command line or in code, text or typed; None values are skipped.

    Raises:
        ConfigError: an unreadable file, an unknown key, or a bad value; names the place.
    """
    env = os.environ if env is None else env
    if file is None and env.get(ENV_PREFIX + "CONFIG"):
        file = Path(env[ENV_PREFIX + "CONFIG"])
    values: dict[str, object] = {}
    sources = {spec.name: "default" for spec in fields(Config)}
    for source, found in _layers(file, env, flags or {}):
        for name, value in found.items():
            place = f"env {ENV_PREFIX}{name.upper()}" if source == "env" else source
            if name not in sources:
                raise ConfigError(f"unknown setting {name!r} from {place}")
            values[name] = _read(name, value, place)
            _check(name, values[name], f" from {place}")
            sources[name] = place
    return LoadedConfig(Config(**values), sources)  # type: ignore[arg-type]  # _read typed each


def _layers(
    file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
) -> list[tuple[str, Mapping[str, object]]]:
    named = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in env.items()
        if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS
    }
    layers: list[tuple[str, Mapping[str, object]]] = []
    if file is not None:
        layers.append((f"file {file}", _read_file(file)))
    layers.append(("env", named))
    layers.append(("flag", {name: value for name, value in flags.items() if value is not None}))
    return layers


# Variables that steer the build and the command line; they are no settings.
_NOT_SETTINGS: Final = frozenset({ENV_PREFIX + "CONFIG", ENV_PREFIX + "NATIVE"})


def _read_file(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read configuration {file}: {exc}") from exc


def _read(name: str, value: object, source: str) -> object:
    """One raw value as its field's type."""
    wanted = Config.__dataclass_fields__[name].type
    if not isinstance(value, str):
        if wanted is float and type(value) is int and abs(value) < 2**63:
            return float(value)
        return value
    try:
        if wanted is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.strip().lower()]
        if wanted is int and setting_of(name).unit == "size":
            return parse_size(value)
        if wanted is int or wanted is float:
            return wanted(value)
    except (KeyError, ValueError) as exc:
        raise ConfigError(f"setting {name} from {source} cannot be {value!r}") from exc
    return value


_KINDS: Final = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _check(name: str, value: object, source: str = "") -> None:
    wanted, setting = Config.__dataclass_fields__[name].type, setting_of(name)
    assert isinstance(wanted, type)
    if type(value) is not wanted:
        raise ConfigError(f"setting {name}{source} cannot be {value!r}: it is {_KINDS[wanted]}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not setting.least <= value <= setting.most:
        show = format_size if setting.unit == "size" else "{:.10g}".format
        raise ConfigError(
            f"setting {name}{source} is {show(value)}, must be at least {show(setting.least)} and "
            f"at most {show(setting.most)}"
        )


def _check_name(name: str) -> None:
    """The instance name becomes a part of paths, so it must be one plain part."""
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise ConfigError(f"setting name cannot be {name!r}: it is part of a path")
