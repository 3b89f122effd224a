"""Which files are copies of other nodes' ranks, and what damaging one does."""

from __future__ import annotations

from pathlib import Path

from outlast.demo.stage import Spoiler, find_copies


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"0123456789")


def test_copies_are_other_ranks_shards_of_all_generations(tmp_path: Path) -> None:
    """The node's own shards, manifests and parts that are still coming in are none; a missing folder has none."""
    write(tmp_path, "step-5/rank-00000.safetensors", "step-5/rank-00002.safetensors", "step-5/manifest.json")
    write(tmp_path, "step-10.tmp-ab/rank-00003.safetensors", "step-10.tmp-ab/.rank-00002.safetensors.partial", "latest")
    found = [str(path.relative_to(tmp_path)) for path in find_copies(tmp_path, own=(0, 1))]
    assert found == ["step-10.tmp-ab/rank-00003.safetensors", "step-5/rank-00002.safetensors"]
    assert find_copies(tmp_path / "missing", own=()) == []


def test_a_byte_is_flipped_once(tmp_path: Path) -> None:
    """Shown again, under whichever name, a file stays damaged; length and all other bytes stay as they are."""
    write(tmp_path, "a/rank-00000.safetensors")
    path, spoiler = tmp_path / "a" / "rank-00000.safetensors", Spoiler()
    assert spoiler.spoil(path)
    moved = path.rename(tmp_path / "rank-00000.safetensors")
    assert not spoiler.spoil(moved)
    damaged = moved.read_bytes()
    assert [index for index, pair in enumerate(zip(damaged, b"0123456789", strict=True)) if len(set(pair)) > 1] == [5]


def test_files_that_are_gone_or_empty_are_passed_over(tmp_path: Path) -> None:
    """Nothing was damaged, and that is said."""
    (tmp_path / "empty").write_bytes(b"")
    assert not Spoiler().spoil(tmp_path / "empty")
    assert not Spoiler().spoil(tmp_path / "gone")
