from enum import Enum

class KVCacheLayout(Enum):
    LBHNC = (0, 1, 2, 3, 4)
    @property
    def layer_view_order(self) -> tuple[int, ...]: ...
    @property
    def is_layer_compact(self) -> bool: ...
