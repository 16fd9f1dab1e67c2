"""Arrays as large as the tier's virtual size that cost memory only where they are touched."""

import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module names it only from Python 3.13 on


def lazy_zeros(count: int, dtype: str) -> npt.NDArray[Any]:
    """Zeros backed by an anonymous mapping without a reservation of swap.

    `np.zeros` asks for huge pages, which would turn one touched slot of a chunk into 2 MiB.
    """
    itemsize = np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, max(count * itemsize, 1), flags=flags), dtype=dtype)[:count]
