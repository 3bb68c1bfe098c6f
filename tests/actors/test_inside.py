"""Names from outside: whatever is accepted stays below its folder, on any system."""

from __future__ import annotations

import ntpath
import posixpath

from hypothesis import given
from hypothesis import strategies as st

from actors.inside import inside

# Made of what leads somewhere, more often than any text would be.
NAMES = st.lists(st.sampled_from(["..", ".", "/", "\\", "C:", "a", "b.json", "\0", "\n", ""]), max_size=6).map("".join) | st.text()


@given(NAMES)
def test_an_accepted_name_stays_below(name: str) -> None:
    try:
        inside(name)
    except ValueError:
        return
    for system, root in ((posixpath, "/folder/of"), (ntpath, "D:\\root\\of")):
        joined = system.normpath(system.join(root, name))
        assert joined.startswith(root + system.sep)
        assert joined != root


def test_plain_names_pass() -> None:
    for name in ("model.safetensors", "policy/__0_0.distcp", "a/b/c", ".metadata", "..a", "näme with space"):
        assert inside(name) == name
