from pathlib import Path

import pytest

from tasks.reporting.run_dir import RunDirectory, point_latest


def test_a_second_run_gets_a_number_and_latest_follows(tmp_path: Path) -> None:
    roots = []
    for _ in range(3):
        directory = RunDirectory.create(tmp_path / "runs", "tiny")
        before = (tmp_path / "runs" / "latest").readlink() if roots else None
        assert before == (Path(roots[-1].name) if roots else None), "it moved before there was anything in the new directory"
        point_latest(directory)
        roots.append(directory.root)
        assert (tmp_path / "runs" / "latest").resolve() == directory.root
    assert [root.name for root in roots] == ["tiny", "tiny-2", "tiny-3"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["latest", "tiny", "tiny-2", "tiny-3"]
    assert (tmp_path / "runs" / "latest").readlink() == Path("tiny-3")  # relative: the tree may be moved


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path, "tiny")
    first.config.write_text("kept")
    RunDirectory.create(tmp_path, "tiny").config.write_text("new")
    assert first.config.read_text() == "kept"


def test_latest_that_points_nowhere_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    point_latest(RunDirectory.create(tmp_path, "tiny"))
    assert (tmp_path / "latest").readlink() == Path("tiny")


def test_a_real_directory_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(FileExistsError, match="latest is not a symbolic link"):
        RunDirectory.create(tmp_path, "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@pytest.mark.parametrize("name", ["", ".", "..", "latest", "a/b", "../up"])
def test_names_that_are_no_directory_of_their_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a run directory"):
        RunDirectory.create(tmp_path, name)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.create("runs", "tiny")
    root = tmp_path / "runs" / "tiny"
    assert directory.root == root  # absolute, though the output directory was not
    names = {
        "config": "config.yaml",
        "metrics": "metrics.jsonl",
        "tensorboard": "tensorboard",
        "samples": "samples.jsonl",
        "slowest": "slowest.jsonl",
        "report": "report.html",
        "summary": "summary.json",
        "hf": "hf",
    }
    assert {name: getattr(directory, name) for name in names} == {name: root / file for name, file in names.items()}
