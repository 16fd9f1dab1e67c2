"""`kv_connector_extra_config`: the connector's own settings, and NexusKV's, in one flat table."""

from collections.abc import Mapping
from dataclasses import dataclass

from nexuskv.config import Config, load_config
from nexuskv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What the operator asked for. `config` has file and environment in it, as everywhere."""

    config: Config
    weights_revision: str = ""
    save_decoded: bool = True


def read_settings(extra: Mapping[str, object]) -> ConnectorSettings:
    """Split the table.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    flags = dict(extra)
    revision = flags.pop("weights_revision", "")
    save_decoded = flags.pop("save_decoded", True)
    if not isinstance(revision, str):
        raise ConfigError(f"weights_revision cannot be {revision!r}: it is a text")
    if not isinstance(save_decoded, bool):
        raise ConfigError(f"save_decoded cannot be {save_decoded!r}: it is true or false")
    return ConnectorSettings(
        config=load_config(flags=flags).config,
        weights_revision=revision,
        save_decoded=save_decoded,
    )
