"""How a command ends: one message and an exit code for whatever was raised; `QARL_DEBUG=1` shows the traceback."""

import contextlib
import dis
import os
import select
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from qarl_nemo.files import os_reason

USER_ERROR = 2
OUR_FAULT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

# Inputs, machines and installations cause these; any other type means that a check of ours is missing.
_EXPECTED = (ValueError, RuntimeError, ImportError, OSError, MemoryError)
_PACKAGES = ("qarl_nemo", "qarl_formats", "qarl_kernels")


def run_reported(call: Callable[[], int | None], program: str) -> int:
    """Run a command; an exception becomes one message on standard error.

    An exception may carry its own `exit_code`.

    Args:
        call: the command; it returns its exit code, None for 0.
        program: the message's first word.

    Returns:
        The exit code: `USER_ERROR` for what a user can mend, `OUR_FAULT` for a fault of this package, `INTERRUPTED`
        for Ctrl-C, `BROKEN_PIPE`, without a message, where standard output was closed.
    """
    try:
        code = call() or 0
        sys.stdout.flush()
        return code
    except SystemExit as end:
        # rich's console turns a reader that has left into an exit with 1.
        if isinstance(end.__context__, BrokenPipeError):
            return BROKEN_PIPE
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 this is where every one of them ends
        if os.environ.get("QARL_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return BROKEN_PIPE
        _print_message(f"{program}: {_describe(error)}")
        return _exit_code(error)


def _describe(error: BaseException) -> str:
    """Return the message of an exception that this package raised on purpose; for others add type and place."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.errno and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {os_reason(error)}"
    if isinstance(error, OSError) and error.errno:
        message = os_reason(error)
    else:
        message = str(error) or "no further words"
    if isinstance(error, _EXPECTED) and _raised_on_purpose(error):
        return message
    named = f"{type(error).__name__}{_innermost_place(error.__traceback__)}: {message}"
    if isinstance(error, _EXPECTED):
        return f"{named} (QARL_DEBUG=1 shows the traceback)"
    return f"{named}; this is a fault of qarl, please report it; QARL_DEBUG=1 shows the traceback"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return getattr(error, "exit_code", USER_ERROR if isinstance(error, _EXPECTED) else OUR_FAULT)


def _raised_on_purpose(error: BaseException) -> bool:
    """Tell whether a `raise` statement of this package raised it, and not a library or C function that it called."""
    if type(error).__module__.partition(".")[0] in _PACKAGES:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _is_ours(trace):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _innermost_place(trace: TracebackType | None) -> str:
    place = ""
    while trace is not None:
        if _is_ours(trace):
            place = f" in {trace.tb_frame.f_globals['__name__']}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _is_ours(trace: TracebackType) -> bool:
    module = trace.tb_frame.f_globals.get("__name__", "")
    # This module's frame only caught it.
    return module != __name__ and module.partition(".")[0] in _PACKAGES


def _output_is_closed() -> bool:
    """Tell whether nobody reads standard output any more; if so, silence Python's complaint about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        output = sys.stdout.fileno()
        poll = select.poll()
        poll.register(output, 0)
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            return True
    return False


def _print_message(text: str) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    with contextlib.suppress(OSError):
        print(f"{red}{text}{plain}", file=sys.stderr, flush=True)
