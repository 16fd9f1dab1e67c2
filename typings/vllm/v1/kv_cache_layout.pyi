from enum import Enum

class KVCacheLayout(Enum):
    @property
    def layer_view_order(self) -> tuple[int, ...]: ...
    @property
    def is_layer_compact(self) -> bool: ...
