"""While a verifier runs that evaluates what a model wrote: no programs, no files written, no network, no names of Python's insides.

This stops `__import__("os").system(...)`, not somebody who knows CPython well (docs/rewards.md). Besides, the verifier runs in a process
that is killed at its deadline, and has neither the run's secrets nor a network.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

_REFUSED = (
    "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pty.", "urllib.", "ftplib.", "http.", "smtplib.", "signal.", "fcntl.", "mmap.",
    "resource.", "webbrowser.", "tempfile.", "sys.addaudithook", "sys.setprofile", "sys.settrace", "sqlite3.", "winreg.", "gc.", "_thread.",
)  # fmt: skip
_HARMLESS = ("os.listdir", "os.scandir", "os.fspath", "os.walk")  # imports use them
# Names by which a formula could reach the verifier itself, and change it for the responses that come after.
_INSIDES = {
    "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "help", "init_session", "input", "lambdify", "locals",
    "open", "quit", "setattr", "vars",
}  # fmt: skip
# sympy's own ways to make code of a text. No name ("") has the space in which a formula is evaluated: a formula that evaluates another.
_MAKERS = ("sympy.utilities.lambdify", "sympy.plotting")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_active = 0
_installed = False


@contextmanager
def guarded() -> Iterator[None]:
    """Inside the block, whatever Python announces to its audit hooks and is dangerous raises PermissionError.

    Raises:
        RuntimeError: in place of SystemExit, as of `exit()` in a response, and of whatever else is no Exception but KeyboardInterrupt.
    """
    global _active, _installed
    if not _installed:
        sys.addaudithook(_look)  # for good: hooks cannot be removed
        _installed = True
    _active += 1
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the verifier called exit({error.code!r})") from None
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (GeneratorExit, or a class of somebody's own)
        raise RuntimeError(f"the verifier raised {type(error).__name__}") from None
    finally:
        _active -= 1


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event == "open":
        _, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITES):
            raise PermissionError("a verifier must not write files")
    elif event == "exec":
        _look_at_code(arguments[0], sys._getframe(1).f_globals.get("__name__", ""))
    elif event.startswith(_REFUSED) and event not in _HARMLESS:
        raise PermissionError(f"a verifier must not use {event}")


def _look_at_code(code: CodeType, evaluated_by: str) -> None:
    # reasoning_gym's own verifiers evaluate lists of literals, among their local names: the right answer is one of them. sympy evaluates
    # formulas, which name its functions, but no attributes: a generator's lead to every frame. Who else executes code here is importing
    # something.
    if evaluated_by.startswith("reasoning_gym.") and code.co_filename == "<string>":
        refused = _names(code)
    elif evaluated_by == "sympy.parsing.sympy_parser":
        refused = _attributes(code) | {name for name in _names(code) if name.startswith("_") or name in _INSIDES}
    elif not evaluated_by or evaluated_by.startswith(_MAKERS):
        raise PermissionError("a response must not have code made of a text")
    else:
        return
    if refused:
        raise PermissionError(f"a response must not name {min(refused)}")


def _names(code: CodeType) -> set[str]:
    return {name for part in _parts(code) for name in part.co_names}


def _attributes(code: CodeType) -> set[str]:
    return {str(step.argval) for part in _parts(code) for step in dis.get_instructions(part) if step.opname.endswith("_ATTR")}


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
