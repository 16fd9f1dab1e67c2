"""RocksDB as the catalogue wants it: tiny rows, synced batches, and bounds on all it keeps.

rocksdict raises bare `Exception` for whatever RocksDB reports; here it becomes `TransferFailed`.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nexuskv.config import KIB, MIB
from nexuskv.errors import TransferFailed, translating

if TYPE_CHECKING:
    from rocksdict import Options, Rdict, WriteBatch

BAD_SUFFIX: Final = ".bad"

_MEMTABLE_BYTES: Final = 8 * MIB
_LOG_BYTES_MAX: Final = 32 * MIB  # of writes not yet in a table, read again at the next start
_TABLE_BYTES: Final = 32 * MIB
_LEVEL_BYTES: Final = 128 * MIB
_MANIFEST_BYTES_MAX: Final = 4 * MIB
_INFO_LOG_BYTES_MAX: Final = MIB
_INFO_LOGS_MAX: Final = 2
_OPEN_FILES_MAX: Final = 128
_CACHE_BYTES: Final = 4 * MIB
_BLOCK_BYTES: Final = 16 * KIB
_BACKGROUND_JOBS: Final = 2
# What RocksDB passes on when the machine is the trouble and not what lies in the files.
_NO_DAMAGE: Final = (
    *map(
        os.strerror,
        (
            errno.EAGAIN, errno.ENOLCK, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS,
            errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        ),
    ),
    "is closed",
)  # fmt: skip


class Rocks:
    """One open database. Not for several threads at a time; `close` is idempotent."""

    def __init__(self, folder: Path) -> None:
        """Open the database in `folder`, made when missing.

        Raises:
            TransferFailed: it is damaged, in use, or the disk fails.
        """
        from rocksdict import Rdict, WriteOptions

        self._folder = folder
        self._synced: WriteOptions = WriteOptions()
        self._synced.sync = True
        with self._translating():
            self._db: Rdict | None = Rdict(str(folder), _options())

    @contextmanager
    def batch(self) -> "Generator[WriteBatch]":
        """Collect writes; they become durable together when the block ends without an error.

        Raises:
            TransferFailed: the database fails; whether the writes are there is unknown.
        """
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        yield batch
        with self._translating():
            self._opened.write(batch, self._synced)

    def scan(self, start: bytes, end: bytes, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Keys and values from `start` up to and without `end`, at most `limit`.

        Raises:
            TransferFailed: the database fails or is damaged.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        with self._translating():
            # Not `items()`: that ends at a damaged block as if it were the end of the rows.
            rows = self._opened.iter()
            valid, key, value, step = rows.valid, rows.key, rows.value, rows.next
            try:
                rows.seek(start)
                while len(keys) < limit and valid():
                    found: bytes = key()
                    if found >= end:
                        break
                    keys.append(found)
                    values.append(value())
                    step()
                rows.status()
            finally:
                # An iterator keeps the database open, and a traceback would keep the iterator.
                del rows, valid, key, value, step
        return keys, values

    def flush(self) -> None:
        """Write the memtable to a table.

        Raises:
            TransferFailed: the database fails.
        """
        with self._translating():
            self._opened.flush()

    def close(self) -> None:
        """Close the database. What was answered is durable, so a failure loses nothing."""
        if self._db is not None:
            with contextlib.suppress(TransferFailed), self._translating():
                self._db.close()
            self._db = None

    @property
    def _opened(self) -> "Rdict":
        if self._db is None:
            raise TransferFailed(f"catalogue {self._folder} is closed")
        return self._db

    @contextmanager
    def _translating(self) -> Generator[None]:
        try:
            with translating({Exception: TransferFailed}):
                yield
        except TransferFailed as exc:
            raise TransferFailed(f"catalogue {self._folder}: {exc}") from exc.__cause__


def is_damage(exc: TransferFailed) -> bool:
    """Whether an error says that the database is damaged, rather than busy or on a bad disk."""
    return not any(words in str(exc) for words in _NO_DAMAGE)


def move_aside(folder: Path) -> Path:
    """Rename a damaged database, in place of an earlier one; returns where it lies now.

    Raises:
        TransferFailed: the disk fails.
    """
    aside = folder.with_name(folder.name + BAD_SUFFIX)
    with translating({OSError: TransferFailed}):
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    return aside


def _options() -> "Options":
    from rocksdict import BlockBasedOptions, Cache, DBCompressionType, DBRecoveryMode, Options

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # A write cut off at the log's end was never answered; damage before it is damage. The default
    # would drop what follows it, deletes too, and so bring rows back.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(_LOG_BYTES_MAX)
    options.set_target_file_size_base(_TABLE_BYTES)
    options.set_max_bytes_for_level_base(_LEVEL_BYTES)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_manifest_file_size(_MANIFEST_BYTES_MAX)
    options.set_max_log_file_size(_INFO_LOG_BYTES_MAX)
    options.set_keep_log_file_num(_INFO_LOGS_MAX)
    options.set_stats_dump_period_sec(0)
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_max_background_jobs(_BACKGROUND_JOBS)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(_CACHE_BYTES))
    table.set_block_size(_BLOCK_BYTES)
    options.set_block_based_table_factory(table)
    return options
