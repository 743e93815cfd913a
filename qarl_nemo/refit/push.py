"""A refit: a running rollout engine gets the weights of the learner's last step.

The problem. After every optimizer step the engine that samples responses must serve the new policy. Starting it again
would take minutes, since models are loaded, kernels compiled and CUDA graphs captured. A refit leaves all of that as it
is and overwrites the weights where they lie, which takes a second or two for a model of 30B parameters.

Who takes part:

    learner    publishes an update: a manifest, and the packed tensors its own forward used      publish.py, manifest.py
    sender     brings the tensors to the engine: CUDA IPC, NCCL, a file, or a plain call         send.py, colocated.py
    engine     one or more ranks, each with a part of the model; a call reaches all of them      engine.py, calls.py
    session    what one rank knows about the refit that is under way                             session.py, incoming.py

What `push` does, in this order:

    announce   The ranks get the manifest: name, shape, dtype and checksum of every tensor, the format and the version.
               Each compares it with its own layers and answers with everything that speaks against it.
    transfer   The sender offers whole tensors, one decoder layer after another. A rank keeps its part: its experts, or
               its slice of them.
    verify     Each rank says which tensors are missing, came twice or do not have the announced checksum.
    replace    Each rank converts layer by layer into the layout its kernels read (rank.py, convert.py), and copies the
               result into the tensors whose addresses its CUDA graphs captured.

Verify and replace are two calls because an engine has several ranks: none may change a weight before all have agreed.
Until then nothing has happened. Whatever fails, `push` raises, the ranks forget the update, and the old version serves
on. Within `replace` there is no way back, because keeping the old weights would take the memory of a second model: a
rank that fails there refuses to answer until a whole update has reached it.

What to know before changing this file:

- A version is the number by which engines know some weights. It only grows, and every call names the one it is about,
  so a message that is late or repeated is refused instead of being mixed into the next refit.
- The ranks do not rely on the order of calls here. `session.py` checks again what it needs before it serves anything.
- A response must come from one version. An engine that is answering a request is therefore not refitted, and its prefix
  cache, which holds keys and values of the old weights, is emptied once the update is known to be good.
- Checksums find more than broken transfers. With CUDA IPC the ranks read the learner's own memory, and a learner that
  went on training meanwhile would change it under their hands.
- An update may be too large to hold beside the weights that serve. A rehearsed one is sent twice: the first time each
  layer is verified and dropped, the second time it is verified again and installed at once, so that learner and engine
  hold one layer at a time.
- Every wait has a limit, since a stopped process looks like a slow one. `within` (waiting.py) gives up on a call but
  lets no later call overtake it, so that no one takes an old answer for a new one.
- On failure the abort and the sender's `release` still run. What goes wrong in them becomes a note on the first error,
  which is the one that says why.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.engine import RolloutEngine
from qarl_nemo.refit.manifest import require_no_problems
from qarl_nemo.refit.publish import Update
from qarl_nemo.refit.send import Sender
from qarl_nemo.refit.waiting import within

# A working engine forgets an update at once; a dead one must not delay the error that says why.
_ABORT_S = 10.0


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one refit cost.

    Attributes:
        version: the weight version served now.
        num_bytes: size of the update's tensors.
        seconds: by phase: `announce`, `transfer`, `verify`, `replace`.
    """

    version: int
    num_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


def push(update: Update, engine: RolloutEngine, sender: Sender) -> RefitReport:
    """Let `engine` serve `update`: all of it, or nothing changes.

    Args:
        update: what the learner published.
        engine: `VllmEngine(llm)`, or another one.
        sender: how the tensors get there.

    Returns:
        The version served and what it cost.

    Raises:
        ValueError: a tensor is missing, unexpected, repeated, different from the manifest or from what a rank holds,
            the engine serves another format, or requests are under way; all are listed, the old version keeps serving.
        RuntimeError: a rank failed while it replaced its weights; it serves nothing until a whole refit reaches it.
        TimeoutError: a rank did not answer within the sender's `timeout_s`; the old version keeps serving.
    """
    with _released(sender):
        return _push(update, engine, sender)


def _push(update: Update, engine: RolloutEngine, sender: Sender) -> RefitReport:
    version = update.manifest.version
    report = RefitReport(version, update.num_bytes)
    asked = partial(ask, engine, timeout_s=sender.timeout_s)
    served = _describe(asked("qarl_version"))
    with _aborting(engine, version, sender.timeout_s):
        with _timed(report, "announce"):
            _require_idle(engine)
            # A collective cannot send what its manifest does not describe.
            _refuse([update.contradictions()], report, served)
            _refuse(asked("qarl_begin", update.manifest.to_message(), update.rehearsed), report, served)
        with _timed(report, "transfer"):
            sender.send(update, engine)
        with _timed(report, "verify"):
            _refuse(asked("qarl_verify", version), report, served)
            # Prefixes of the old version must not meet weights of the new one.
            if not within(sender.timeout_s, "the engine's prefix cache", engine.reset_prefix_cache, owner=engine):
                raise ValueError(_in_flight("a request holds cache blocks"))
    try:
        with _timed(report, "replace"):
            asked("qarl_replace", version)
            if update.rehearsed:
                sender.send(update, engine)
                asked("qarl_replaced", version)
    except Exception as error:
        raise RuntimeError(
            f"the engine broke off while version {version} replaced {served}: it serves nothing until a whole "
            "refit reaches it"
        ) from error
    return report


@contextmanager
def _released(sender: Sender) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _noting(error, "giving back what was sent", sender.release)
        raise
    sender.release()


@contextmanager
def _aborting(engine: RolloutEngine, version: int, timeout_s: float | None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        patience = None if timeout_s is None else min(timeout_s, _ABORT_S)
        _noting(error, "aborting", partial(ask, engine, "qarl_abort", version, timeout_s=patience))
        raise


def _noting(cause: BaseException, what: str, call: Callable[[], Any]) -> None:
    # A rank that is gone fails here, too; what it failed at first is the reason.
    try:
        call()
    except Exception as error:  # noqa: BLE001 whatever it is, it is a consequence
        cause.add_note(f"{what} failed, too: {type(error).__name__}: {error}")


def serving_version(engine: RolloutEngine, *, timeout_s: float | None = None) -> int | None:
    """Return the version that every rank serves; None before the first refit.

    Args:
        engine: as for `push`.
        timeout_s: how long to wait for its ranks' answers; None waits on this thread.

    Raises:
        RuntimeError: ranks serve different versions, or one broke off a refit.
        TimeoutError: a rank did not answer in time.
    """
    states = ask(engine, "qarl_version", timeout_s=timeout_s)
    if not all(state == states[0] and state["whole"] for state in states):
        raise RuntimeError(f"no single weight version to serve ({_describe(states)}); push a whole update")
    return states[0]["version"]


def _require_idle(engine: RolloutEngine) -> None:
    if engine.is_busy():
        raise ValueError(_in_flight("requests are unfinished"))


def _in_flight(why: str) -> str:
    return f"refit refused, {why}: a response is of one weight version only. Finish or abort requests first"


def _describe(states: list[dict[str, Any]]) -> str:
    texts = [
        "nothing (an earlier refit broke off)"
        if not state["whole"]
        else "the weights it started with"
        if state["version"] is None
        else f"version {state['version']}"
        for state in states
    ]
    return texts[0] if len(set(texts)) == 1 else ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _refuse(problems_by_rank: list[list[str]], report: RefitReport, served: str) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, problems in enumerate(problems_by_rank):
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    lines = [text if len(who) == len(problems_by_rank) else f"{text} (ranks {who})" for text, who in ranks.items()]
    require_no_problems(lines, f"refit to version {report.version} refused, the engine keeps serving {served}")


@contextmanager
def _timed(report: RefitReport, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[phase] = time.perf_counter() - start
