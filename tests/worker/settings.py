"""Settings of a worker for the tiers of a test."""

from nexuskv.config import load_config
from nexuskv.serve import worker_settings
from nexuskv.tiers.host import HostTier
from nexuskv.worker.codec import WorkerSettings


def settings_of(tier: HostTier, **flags: object) -> WorkerSettings:
    """What a worker on this tier is told; `flags` are config fields."""
    return worker_settings(load_config(env={}, flags=flags).config, tier)
