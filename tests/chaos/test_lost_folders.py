"""The loss of a node's disk removes the files of a run, and no files of other programs."""

from __future__ import annotations

from pathlib import Path

from outlast.chaos.copies import lose_folder


def _lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_a_lost_folder_keeps_files_of_other_programs(tmp_path: Path) -> None:
    """All files of a run are removed; a folder without its records, a link, and files of other programs stay."""
    own = ("run.json", "latest", "owner/1.json", "step-1/manifest.json", "step-2.tmp-job-0-ab.1/x", "suspect/step-3/x")
    _lay(tmp_path / "whole", *own)
    lose_folder(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    others = ("data/set.bin", "step-5/model.bin", "notes.txt")
    _lay(tmp_path / "shared", *own, *others)
    (tmp_path / "shared" / "step-6").symlink_to(tmp_path / "other")
    _lay(tmp_path / "other", "manifest.json")
    lose_folder(tmp_path / "shared")
    left = {path.relative_to(tmp_path / "shared").as_posix() for path in (tmp_path / "shared").rglob("*")}
    assert left == {*others, "data", "step-5", "step-6"}
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for name in ("other", "link", "none"):
        lose_folder(tmp_path / name)
    assert (tmp_path / "other" / "manifest.json").exists()
