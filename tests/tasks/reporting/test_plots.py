import io
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tasks.reporting.metrics import read
from tasks.reporting.plots import metrics_table_markdown, picture_png
from tasks.reporting.views import VIEWS, View
from tests.tasks.reporting.runs import write_run, write_sft_run

GRPO, SFT = VIEWS["grpo"], VIEWS["sft"]


@pytest.mark.parametrize("view", [GRPO, SFT], ids=["grpo", "sft"])
def test_the_plot_is_a_picture_with_both_curves(tmp_path: Path, view: View) -> None:
    directory = write_run(tmp_path) if view is GRPO else write_sft_run(tmp_path)
    image = matplotlib.image.imread(io.BytesIO(picture_png(read(directory.metrics), view)), format="png")
    assert image.shape == (480, 1200, 4)
    blue = np.array([0x2A, 0x78, 0xD6]) / 255
    is_blue = (np.abs(image[..., :3] - blue) < 0.02).all(axis=-1)
    assert is_blue[:, :600].sum() > 100
    assert is_blue[:, 600:].sum() > 100


@pytest.mark.parametrize("rows", [[], [{"step": 0, "accuracy/validation": 0.5}], [{"step": 1, "reward/mean": None}]])
def test_a_plot_of_little(rows: list[dict[str, float]]) -> None:
    assert picture_png(rows, GRPO).startswith(b"\x89PNG")
    assert picture_png(rows, SFT).startswith(b"\x89PNG")


def test_the_table_joins_lines_and_shows_the_last_steps(tmp_path: Path) -> None:
    lines = metrics_table_markdown(read(write_run(tmp_path).metrics), GRPO, last=3).splitlines()
    assert lines[0] == "| step | reward | accuracy | KL | loss | tokens/s | s/step |"
    assert lines[1].count("---:") == 7
    assert lines[2:] == [
        "| 2 | 0.200 | – | 0.0010 | -0.0020 | 800 | 2.500 |",
        "| 3 | 0.300 | – | 0.0015 | -0.0030 | 800 | 2.500 |",
        "| 4 | 0.400 | 0.875 | 0.0020 | -0.0040 | 800 | 2.500 |",
    ]
    assert metrics_table_markdown([], GRPO).count("\n") == 2


def test_the_table_of_an_sft_run_has_its_own_columns(tmp_path: Path) -> None:
    lines = metrics_table_markdown(read(write_sft_run(tmp_path).metrics), SFT, last=3).splitlines()
    assert lines[0] == "| step | loss | validation loss | gradient norm | tokens/s | TFLOP | TFLOP/s per worker | s/step |"
    assert lines[2:] == [
        "| 2 | 2.500 | 1.250 | 1 | 800 | 0.0200 | 0.0125 | 2.500 |",
        "| 3 | 1.667 | – | 1 | 800 | 0.0200 | 0.0125 | 2.500 |",
        "| 4 | 1.250 | 1.500 | 1 | 800 | 0.0200 | 0.0125 | 2.500 |",
    ]
