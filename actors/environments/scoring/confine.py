"""What a scoring process may not do, and how everything that it started ends with it.

    keeper ── fork ──► worker            the keeper outlives the worker, and answers for what it leaves behind
      │                 └── whatever a verifier starts
      └── ends the worker when the pool closes the keeper's line: a PID namespace takes all its processes along;
          where the kernel gives none, the keeper adopts them (a subreaper) and ends them one by one

This keeps accidents in: verifiers that hang, fork, fill the memory or evaluate what a model wrote. It is no wall against an attacker: the
worker sees the file system, and a user's own rewards see the network. Code that wants to do harm wants a container.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38  # linux/prctl.h
_FILE_CAPABILITIES = 1 << 1 | 1 << 2 | 1 << 3  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: files as root sees them
_CAPABILITY_VERSION = 0x20080522
_USERS = 0x60000000  # user ids that nobody has: one for each worker, so that the kernel counts its processes apart
_LARGEST_FILE = 256 * 2**20


def adopt_orphans() -> None:
    """Processes whose parent died become children of this one, and not of the machine's init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def enter_namespaces(network: bool) -> bool:
    """Have the next child of this process be the first in a PID namespace of its own. False: the kernel does not allow it.

    Args:
        network: whether the child keeps the network of this process.
    """
    wanted = os.CLONE_NEWPID | (0 if network else os.CLONE_NEWNET)
    user, group = os.getuid(), os.getgid()
    for flags in (wanted, wanted | os.CLONE_NEWUSER, os.CLONE_NEWPID | os.CLONE_NEWUSER):
        try:
            os.unshare(flags)
        except OSError:
            continue
        if flags & os.CLONE_NEWUSER:  # without these, no file could be made
            for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
                Path(f"/proc/self/{name}").write_text(line)
        return True
    return False


def limit(memory_mib: int, processes: int, number: int) -> None:
    """Limits of this process and its children.

    Linux does not count the processes of root. As root, the process therefore becomes a user of its own that may still read and write
    all files; where the kernel does not allow that, their number has no limit.

    Args:
        number: of this worker, at most 2**16: its user is one that no other worker has.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    memory = memory_mib * 2**20
    for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, _LARGEST_FILE), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    if os.geteuid() != 0 or _become(_USERS + number):
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it


def sweep() -> None:
    """End every child of this process, and theirs, until there is none. For a process that adopts orphans."""
    while True:
        children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def has_children() -> bool:
    """Whether this process has any child that is alive; ended ones are buried."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


@cache
def kernel_allows_namespaces() -> bool:
    """Whether `enter_namespaces` works on this machine, tried in a process of its own."""
    child = os.fork()
    if child == 0:
        os._exit(0 if enter_namespaces(network=True) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _become(user: int) -> bool:
    try:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresuid(user, user, user)
    except OSError:
        return False
    capabilities = (ctypes.c_uint32 * 6)(_FILE_CAPABILITIES, _FILE_CAPABILITIES, 0, 0, 0, 0)  # effective, permitted, inheritable; twice
    _libc().capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), capabilities)
    return True


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
