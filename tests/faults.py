"""Kill a build at each place where it changes the file system, or at any instant."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_CHANGES = frozenset(
    {"os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.chmod", "subprocess.Popen"}
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _is_change(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        return isinstance(args[2], int) and bool(args[2] & _WRITING) and args[0] != os.devnull
    return event in _CHANGES


def _child(work: Callable[[], object], hook: Callable[[str, tuple[Any, ...]], None] | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if hook:
            sys.addaudithook(hook)
        work()
        status = 0
    finally:
        os._exit(status)


def _was_killed(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise AssertionError("the work itself failed")
    return False


def killed_at(work: Callable[[], object], change: int) -> bool:
    """Do `work` in a child that dies just before its change number `change` (from 0); false when it made fewer."""
    seen = -1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if _is_change(event, args):
            seen += 1
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)

    return _was_killed(_child(work, hook))


def killed_after(work: Callable[[], object], seconds: float) -> bool:
    """Do `work` in a child that is killed after this time; false when it was done before."""
    pid = _child(work, None)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            break
        time.sleep(0.0005)
    else:
        os.kill(pid, signal.SIGKILL)
    return _was_killed(pid)
