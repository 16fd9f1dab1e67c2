from enum import Enum
from typing import Any

class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1

class KVConnectorMetadata: ...
class KVConnectorWorkerMetadata: ...

class KVConnectorBase_V1:
    _vllm_config: Any
    _kv_transfer_config: Any
    _kv_cache_config: Any
    @property
    def role(self) -> KVConnectorRole: ...
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None: ...
    def _get_connector_metadata(self) -> KVConnectorMetadata: ...
