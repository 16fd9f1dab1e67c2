"""The instance folder: one owner, safe modes, leftovers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nexuskv.errors import ConfigError
from nexuskv.tiers.folder import check_space, find_leftovers, lock_folder, segment_files
from nexuskv.tiers.owner import Process
from tests.tiers.conftest import CHUNK_BYTES, OpenTier

HOLD = """
import sys
from pathlib import Path
from nexuskv.tiers.folder import lock_folder
lock = lock_folder(Path(sys.argv[1]))
for name in ("data-00000000", "table-00000000"):
    (lock.folder / name).write_bytes(bytes(1 << 20))
print("open", flush=True)
sys.stdin.read()
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder until it is killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    return holder


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=10)


def test_files_are_private(open_tier: OpenTier, folder: Path) -> None:
    open_tier()
    modes = {path.name[:5]: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"one": 0o700, "lock": 0o600, "data-": 0o600, "table": 0o600}


def test_files_are_named_after_the_incarnation(open_tier: OpenTier, folder: Path) -> None:
    open_tier()
    assert sorted(path.name for path in segment_files(folder)) == [
        "data-a1b2c3d4",
        "table-a1b2c3d4",
    ]


def test_a_second_owner_is_refused_with_the_holders_pid(open_tier: OpenTier, folder: Path) -> None:
    holder = start_holder(folder)
    try:
        with pytest.raises(ConfigError, match=f"{folder} is in use by process {holder.pid}"):
            open_tier()
    finally:
        kill(holder)
    open_tier()


def test_a_refused_owner_leaves_the_holders_files(open_tier: OpenTier, folder: Path) -> None:
    tier = open_tier()
    with pytest.raises(ConfigError, match=str(os.getpid())):
        open_tier()
    assert Path(tier.segments()[0].data_path).exists()


def test_what_a_killed_daemon_left_is_discarded(open_tier: OpenTier, folder: Path) -> None:
    kill(start_holder(folder))
    left = segment_files(folder)
    assert len(left) == 2
    open_tier()
    assert not any(path.exists() for path in left)


def test_a_discarded_file_keeps_its_bytes_for_those_who_map_it(
    open_tier: OpenTier, folder: Path
) -> None:
    kill(start_holder(folder))
    with segment_files(folder)[0].open("rb") as mapped:
        open_tier()
        assert os.fstat(mapped.fileno()).st_size == 1 << 20


def test_abandoned_instances_beside_this_one_are_reported(
    open_tier: OpenTier, folder: Path
) -> None:
    beside = folder.with_name("two")
    kill(start_holder(beside))
    assert open_tier().leftovers == [beside]


def test_running_instances_beside_this_one_are_not_reported(
    open_tier: OpenTier, folder: Path
) -> None:
    holder = start_holder(folder.with_name("two"))
    try:
        assert open_tier().leftovers == []
    finally:
        kill(holder)


def test_a_folder_whose_recorded_owner_lives_is_not_reported(folder: Path) -> None:
    beside = folder.with_name("two")
    kill(start_holder(beside))
    (beside / "lock").write_text("control {} {}\n".format(*Process.of(os.getpid()) or ()))
    assert find_leftovers(folder) == []


def test_folders_without_segments_are_not_reported(folder: Path) -> None:
    (folder.with_name("two")).mkdir(parents=True)
    (folder.with_name("two") / "lock").touch()
    assert find_leftovers(folder) == []


def test_looking_for_leftovers_never_holds_their_lock(folder: Path) -> None:
    beside = folder.with_name("two")
    kill(start_holder(beside))
    assert find_leftovers(folder) == [beside]
    lock_folder(beside).close(remove=False)


def test_a_folder_open_to_others_is_refused(open_tier: OpenTier, folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        open_tier()
    folder.rmdir()


def test_a_link_in_place_of_the_folder_is_refused(
    open_tier: OpenTier, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(target)
    with pytest.raises(ConfigError, match="must be a directory"):
        open_tier()
    assert list(target.iterdir()) == []
    folder.unlink()


def test_a_link_in_place_of_the_lock_is_refused(
    open_tier: OpenTier, folder: Path, tmp_path: Path
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="cannot open"):
        open_tier()
    assert not (tmp_path / "precious").exists()
    (folder / "lock").unlink()
    folder.rmdir()


def test_a_file_in_place_of_the_folder_is_refused(open_tier: OpenTier, folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch()
    with pytest.raises(ConfigError, match="must be a directory"):
        open_tier()
    folder.unlink()


def test_more_memory_than_the_filesystem_has_is_refused_before_anything_is_made(
    open_tier: OpenTier, folder: Path
) -> None:
    room = os.statvfs(folder.parent.parent)
    capacity = (room.f_blocks * room.f_frsize // CHUNK_BYTES + 2) * CHUNK_BYTES
    with pytest.raises(ConfigError, match=rf"{folder} cannot hold {capacity} bytes.*has \d+ bytes"):
        open_tier(capacity_bytes=capacity)
    assert not folder.parent.exists()


def test_memory_that_earlier_runs_left_counts_as_free(folder: Path) -> None:
    folder.mkdir(parents=True)
    left = folder / "data-00000000"
    left.write_bytes(bytes(1 << 20))
    room = os.statvfs(folder)
    with pytest.raises(ConfigError) as refused:
        check_space(folder, room.f_blocks * room.f_frsize * 2)
    free_bytes = int(str(refused.value).split("filesystem has ")[1].split()[0])
    assert free_bytes >= left.stat().st_blocks * 512
    left.unlink()


def test_a_folder_with_other_files_is_left_standing(open_tier: OpenTier, folder: Path) -> None:
    tier = open_tier()
    (folder / "note").touch()
    tier.close(unlink=True)
    assert [path.name for path in folder.iterdir()] == ["note"]
    (folder / "note").unlink()
    folder.rmdir()


def test_close_without_unlink_leaves_the_files_and_frees_the_lock(
    open_tier: OpenTier, folder: Path
) -> None:
    open_tier().close(unlink=False)
    assert len(segment_files(folder)) == 2
    open_tier(incarnation=bytes(range(8)))
    assert [path.name for path in segment_files(folder)] == ["data-a1b2c3d4", "table-a1b2c3d4"]


def test_close_is_idempotent(open_tier: OpenTier) -> None:
    tier = open_tier(populated=1)
    tier.close(unlink=True)
    tier.close(unlink=True)
