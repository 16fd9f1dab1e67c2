"""SlabFolder: making files, reading and writing their slots, on the real disk."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nexuskv.errors import ConfigError, OutOfSpace, TransferFailed
from nexuskv.tiers.fake_disk import Fault, FaultyDisk
from nexuskv.tiers.geometry import SlabGeometry
from nexuskv.tiers.slab_folder import path_of
from nexuskv.tiers.slabs import SlabFolder
from tests.tiers.slab_parts import (
    FILE_BYTES,
    KIB,
    SLOT_BYTES,
    load,
    open_folder,
    page_memory,
    store,
)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def slabs(tmp_path: Path, disk: FaultyDisk) -> Iterator[SlabFolder]:
    """Four files of 256 KiB at most, of which file 0 is made: fifteen slots of 16 KiB."""
    with open_folder(tmp_path / "ssd", disk=disk) as slabs:
        slabs.make(0, SLOT_BYTES)
        yield slabs


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 12 * KIB, SLOT_BYTES])
def test_page_comes_back_as_it_was_written(slabs: SlabFolder, size_bytes: int) -> None:
    content = os.urandom(size_bytes)
    store(slabs, 0, 3, content)
    slabs.sync({0})
    assert load(slabs, 0, 3, size_bytes) == content


def test_neighbours_are_not_touched(slabs: SlabFolder) -> None:
    pages = [os.urandom(SLOT_BYTES) for _ in range(15)]
    for at, page in enumerate(pages):
        store(slabs, 0, at, page)
    pages[7] = os.urandom(SLOT_BYTES)
    store(slabs, 0, 7, pages[7])
    assert [load(slabs, 0, at, SLOT_BYTES) for at in range(15)] == pages


def test_pages_survive_closing(tmp_path: Path) -> None:
    with open_folder(tmp_path / "ssd") as slabs:
        slabs.make(0, SLOT_BYTES)
        slabs.make(3, 20 * KIB)
        store(slabs, 0, 14, b"first" * 100)
        store(slabs, 3, 11, b"last" * 100)
        slabs.sync({0, 3})
    with open_folder(tmp_path / "ssd") as slabs:
        assert slabs.files == {0: SLOT_BYTES, 3: 20 * KIB}
        assert slabs.removed == []
        assert load(slabs, 0, 14, 500) == b"first" * 100
        assert load(slabs, 3, 11, 400) == b"last" * 100


def test_file_has_its_blocks_before_it_is_used(slabs: SlabFolder) -> None:
    found = path_of(slabs.folder, 0).stat()
    assert found.st_size == FILE_BYTES
    assert found.st_blocks * 512 >= FILE_BYTES


def test_files_are_spread_over_folders_by_their_low_byte(tmp_path: Path) -> None:
    assert path_of(tmp_path, 0x1234) == tmp_path / "slabs/34/slab-004660"


def test_file_is_cut_anew_for_another_size(slabs: SlabFolder) -> None:
    store(slabs, 0, 0, b"old")
    slabs.make(0, 64 * KIB)
    assert slabs.files == {0: 64 * KIB}
    with page_memory(b"new", 64 * KIB) as view:
        slabs.write_from(view, file_index=0, slot_index=2, size_bytes=64 * KIB)
        view[:3] = b"???"
        slabs.read_into(view, file_index=0, slot_index=2, size_bytes=64 * KIB)
        assert bytes(view[:3]) == b"new"


@pytest.mark.parametrize(
    ("file_index", "slot_index", "size_bytes", "said"),
    [
        (1, 0, 4096, "no ssd file 1"),
        (0, 15, 4096, "no slot 15"),
        (0, -1, 4096, "no slot -1"),
        (0, 0, SLOT_BYTES + 1, "does not fit"),
        (0, 0, 0, "does not fit"),
    ],
)
def test_place_that_is_not_there_is_refused(
    slabs: SlabFolder, file_index: int, slot_index: int, size_bytes: int, said: str
) -> None:
    with page_memory(length=64 * KIB) as view, pytest.raises(ConfigError, match=said):
        slabs.read_into(view, file_index=file_index, slot_index=slot_index, size_bytes=size_bytes)


def test_memory_shorter_than_whole_blocks_is_refused(slabs: SlabFolder) -> None:
    with (
        page_memory(length=8 * KIB) as view,
        view[:5000] as short,
        pytest.raises(ConfigError, match="does not fit"),
    ):
        slabs.read_into(short, file_index=0, slot_index=0, size_bytes=5000)


@pytest.mark.parametrize(("file_index", "slot_bytes"), [(4, SLOT_BYTES), (1, 4096), (1, 20000)])
def test_wrong_file_is_not_made(slabs: SlabFolder, file_index: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match="cannot make"):
        slabs.make(file_index, slot_bytes)


# --- a disk that fails


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
def test_read_error_is_a_failed_transfer_that_names_the_file(
    slabs: SlabFolder, disk: FaultyDisk, error: int
) -> None:
    disk.plan("read", Fault(error))
    with pytest.raises(TransferFailed, match=f"slab-000000: {os.strerror(error)}"):
        load(slabs, 0, 0, 4096)


@pytest.mark.parametrize("call", ["write", "sync"])
def test_write_or_sync_error_is_a_failed_transfer(
    slabs: SlabFolder, disk: FaultyDisk, call: str
) -> None:
    disk.plan("write" if call == "write" else "sync", Fault(errno.EIO))
    with pytest.raises(TransferFailed, match="slab-000000: Input/output error"):  # noqa: PT012
        store(slabs, 0, 0, b"page")
        slabs.sync({0})


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_out_of_space(slabs: SlabFolder, disk: FaultyDisk, error: int) -> None:
    disk.plan("write", Fault(error))
    with pytest.raises(OutOfSpace, match="slab-000000"):
        store(slabs, 0, 0, b"page")


@pytest.mark.parametrize("parts", [(4096,), (4096, 4096), (1,), (4096, 100, 4096)], ids=str)
def test_short_reads_and_writes_are_completed(
    slabs: SlabFolder, disk: FaultyDisk, parts: tuple[int, ...]
) -> None:
    content = os.urandom(SLOT_BYTES)
    disk.plan("write", *(Fault(most_bytes=part) for part in parts))
    store(slabs, 0, 1, content)
    disk.plan("read", *(Fault(most_bytes=part) for part in parts))
    assert load(slabs, 0, 1, SLOT_BYTES) == content


@pytest.mark.parametrize("left_bytes", [0, 4096, 4096 + 3 * SLOT_BYTES + 5000])
def test_file_truncated_behind_our_back_is_a_failed_transfer(
    slabs: SlabFolder, left_bytes: int
) -> None:
    store(slabs, 0, 3, b"x" * SLOT_BYTES)
    os.truncate(path_of(slabs.folder, 0), left_bytes)
    with pytest.raises(TransferFailed, match="file 0 ended"):
        load(slabs, 0, 3, SLOT_BYTES)


def test_memory_that_is_not_page_aligned_goes_through_the_page_cache(slabs: SlabFolder) -> None:
    with page_memory(b"", 3 * 4096) as view:
        view[512 + 100 : 512 + 103] = b"odd"
        with view[100:8292] as odd:
            slabs.write_from(odd, file_index=0, slot_index=0, size_bytes=8192)
        assert slabs.buffered_count == (1 if slabs.direct else 0)
    assert load(slabs, 0, 0, 8192)[512:515] == b"odd"


def test_call_that_o_direct_refuses_goes_through_the_page_cache(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    with open_folder(tmp_path / "ssd", disk=disk) as slabs:
        slabs.make(0, SLOT_BYTES)
        disk.plan("write", Fault(errno.EINVAL))
        store(slabs, 0, 0, b"cached")
        disk.plan("read", Fault(errno.EINVAL))
        assert load(slabs, 0, 0, 6) == b"cached"


def test_file_removed_behind_our_back_is_a_failed_transfer(tmp_path: Path) -> None:
    with open_folder(tmp_path / "ssd") as slabs:
        slabs.make(0, SLOT_BYTES)
        subprocess.run(["rm", "-r", slabs.folder], check=True)
        with pytest.raises(TransferFailed, match="No such file"):
            load(slabs, 0, 0, 4096)
        with pytest.raises(TransferFailed, match="No such file"):
            slabs.make(1, SLOT_BYTES)


def test_failed_making_leaves_no_file_listed(slabs: SlabFolder, disk: FaultyDisk) -> None:
    disk.plan("sync", Fault(errno.EIO))
    with pytest.raises(TransferFailed):
        slabs.make(1, SLOT_BYTES)
    assert not path_of(slabs.folder, 1).exists()
    disk.plan("write", Fault(errno.EIO))
    with pytest.raises(TransferFailed):
        slabs.make(0, 32 * KIB)
    assert slabs.files == {}


def test_closed_folder_transfers_nothing(tmp_path: Path) -> None:
    slabs = open_folder(tmp_path / "ssd")
    slabs.make(0, SLOT_BYTES)
    slabs.close()
    slabs.close()
    with pytest.raises(TransferFailed, match="is closed"):
        load(slabs, 0, 0, 4096)


# --- many threads


def test_threads_share_few_descriptors(tmp_path: Path) -> None:
    with open_folder(tmp_path / "ssd", files=12, open_files_max=3) as slabs:
        for index in range(12):
            slabs.make(index, SLOT_BYTES)
        before = len(os.listdir("/proc/self/fd"))

        def work(number: int) -> bool:
            place = (number % 12, number // 12 % 15)
            content = number.to_bytes(4, "big") * 1024
            store(slabs, *place, content)
            slabs.sync({place[0]})
            return load(slabs, *place, 4096) == content

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(180)))
        assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_closing_waits_for_no_thread_and_leaves_no_descriptor(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class SlowDisk(FaultyDisk):
        def read(self, fd: int, into: memoryview, offset_bytes: int) -> int:
            reached.set()
            assert go_on.wait(30)
            return super().read(fd, into, offset_bytes)

    slabs = open_folder(tmp_path / "ssd", disk=SlowDisk())
    slabs.make(0, SLOT_BYTES)
    store(slabs, 0, 0, b"still read")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(load, slabs, 0, 0, 10)
        assert reached.wait(30)
        slabs.close()
        go_on.set()
        assert read.result(30) == b"still read"


# --- filesystems of their own


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a filesystem of its own; skips the test where that is not allowed."""
    target = tmp_path / "mounted"
    target.mkdir()
    done: list[Path] = []

    def mount(*arguments: str) -> Path:
        command = ["mount", *arguments, str(target)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"not allowed here: {' '.join(command)}")
        done.append(target)
        target.chmod(0o700)
        return target

    yield mount
    for path in done:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(params=["tmpfs", "ext4"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path, mount: Callable[..., Path]) -> Path:
    """A filesystem with room for a few files of 256 KiB."""
    if request.param == "tmpfs":
        return mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    image = tmp_path / "image"
    image.write_bytes(bytes(3 << 20))
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
    return mount("-o", "loop", str(image))


def test_filesystem_without_o_direct_is_served_through_the_page_cache(
    mount: Callable[..., Path],
) -> None:
    with open_folder(mount("-t", "ramfs", "ramfs")) as slabs:
        slabs.make(0, SLOT_BYTES)
        store(slabs, 0, 0, b"cached")
        assert not slabs.direct
        assert load(slabs, 0, 0, 6) == b"cached"
        slabs.sync({0})


def test_file_that_does_not_fit_the_disk_leaves_nothing_behind(mounted: Path) -> None:
    with open_folder(mounted, files=16) as slabs:
        made = 0
        with pytest.raises(OutOfSpace, match="slab-"):  # noqa: PT012
            for made in range(16):
                slabs.make(made, SLOT_BYTES)
        assert sorted(slabs.files) == list(range(made))
        assert not path_of(mounted, made).exists()
        store(slabs, made - 1, 14, b"the last slot of the last file")
        slabs.sync({made - 1})
    with open_folder(mounted, files=16) as slabs:
        assert sorted(slabs.files) == list(range(made))
        assert slabs.removed == []


def test_read_only_folder_is_refused(mounted: Path) -> None:
    open_folder(mounted, files=3).close()
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(ConfigError, match="Read-only file system"):
        open_folder(mounted, files=3)


def test_file_that_becomes_immutable_takes_no_new_size(slabs: SlabFolder) -> None:
    path = path_of(slabs.folder, 0)
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("this filesystem knows no immutable files")
    try:
        with pytest.raises(TransferFailed, match="Operation not permitted"):
            slabs.make(0, 32 * KIB)
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def test_geometry_has_a_slot_for_every_slot_id() -> None:
    geometry = SlabGeometry(FILE_BYTES, SLOT_BYTES)
    assert geometry.slot_count(SLOT_BYTES) == 15 < geometry.stride == 16
    assert geometry.offset_bytes(SLOT_BYTES, 14) + SLOT_BYTES <= FILE_BYTES
