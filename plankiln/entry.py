"""Around every command: signals, closed or full streams, and an exit code and a line for every way to fail."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper

import click

from plankiln.console import say, show_error, show_problem
from plankiln.errors import PlankilnError

# What stdout answers where it takes nothing; the errors of files have a name, or are explained where they come up.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


class _Stopped(BaseException):
    """SIGTERM or SIGHUP has come: all that is under way is undone, as for Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def _stoppable() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise _Stopped(number)

    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None) -> int:
    """Run a command, tell on stderr how it failed, and return its exit code: see `plankiln.cli.main`."""
    if sys.stdout is None:
        show_problem("cannot write to stdout (it is closed)", "to drop the output, redirect it to /dev/null")
        return 1
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a text may hold what the terminal's encoding does not
    try:
        with _stoppable():
            command.main(arguments, prog_name=name, standalone_mode=False)
            sys.stdout.flush()
    except click.UsageError as e:
        text = re.sub(r"'([^']*)'", r"`\1`", e.format_message()).rstrip(".")
        show_problem(text, f"see `{e.ctx.command_path if e.ctx else name} --help`")
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        return 130
    except _Stopped as e:
        say(f"stopped by {e.signal.name}")
        return 128 + e.signal
    except PlankilnError as e:
        show_error(e)
        return e.exit_code
    except Exception as e:
        if isinstance(e, OSError) and e.filename is None and e.errno in _UNWRITABLE:
            _drop_output()
            if not isinstance(e, BrokenPipeError):
                show_problem(f"cannot write to stdout ({e.strerror})")
            return 1
        if os.environ.get("PLANKILN_DEBUG"):
            traceback.print_exc()
        show_problem(
            f"internal error: {type(e).__name__}: {e}",
            "this is a bug in plankiln: please report it with what PLANKILN_DEBUG=1 prints",
        )
        return 70
    return 0


def _drop_output() -> None:
    """Let nothing remain that Python would try to write again at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
