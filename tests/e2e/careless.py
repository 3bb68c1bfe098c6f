"""A reward that some responses hang, crash or confuse: which ones depends on the prompt alone, so two runs meet the same."""

import os
import time
import zlib


def reward(completions: list[str], prompts: list[str]) -> list[float | None]:
    """One value; or, for some prompts, none ever."""
    what = zlib.crc32(prompts[0].encode()) % 5
    if what == 0:
        time.sleep(600)
    if what == 1:
        os._exit(1)
    if what == 2:
        raise ValueError("<b>no</b>")
    return [None if what == 3 else float(len(completions[0]))]
