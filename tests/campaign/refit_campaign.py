"""Faults on one engine, one after another: what serves afterwards, what the learner was told, and whether it heals."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refit_scripts import Script, Spoiling, save_parts, script, spoilings
from refit_targets import PATIENCE_S, TIMEOUT_S, Meddling, Target

from qarl_nemo.refit.answers import ask, require_answers
from qarl_nemo.refit.push import push

_ANSWERS_S = 60.0


@dataclass
class Counts:
    """How many faults were tried, and which were not survived.

    Attributes:
        tried: number of faults.
        failures: one sentence for each fault that was not survived.
        rounds: number of rounds A -> B -> A.
        identical: rounds whose A and B were those of before.
    """

    tried: int = 0
    failures: list[str] = field(default_factory=list)
    rounds: int = 0
    identical: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "faults": self.tried,
            "survived": self.tried - len(self.failures),
            "failures": self.failures,
            "aba_rounds": self.rounds,
            "aba_identical": self.identical,
        }


class Campaign:
    """Faults on one engine; each is a refit from the update that serves to the other one.

    Args:
        target: the engine.
        seed: seeds everything random.
        folder: for files of updates.
    """

    def __init__(self, target: Target, seed: int, folder: Path) -> None:
        self.target = target
        self.counts = Counts()
        self._chance = random.Random(seed)
        self._paths = {name: save_parts(target.next(name).layers, folder / name) for name in "AB"}
        # Their versions are older than all that will serve.
        self._stale = {(name, again): self._script(name, again) for name in "AB" for again in (False, True)}
        self._weights: dict[str, Any] = {}
        self._serving, self._version = "", 0
        for name in "BA":
            self._refit(name)
            self._weights[name] = target.weights()
        if self._weights["A"] == self._weights["B"]:
            raise ValueError("the two updates look alike: no mixture of them would show")

    def there_and_back(self, rounds: int) -> None:
        """Refit to the other update and back, so many times."""
        for _ in range(rounds):
            same = True
            for _ in range(2):
                self._refit(self._other)
                same &= self.target.weights() == self._weights[self._serving]
            self.counts.rounds += 1
            self.counts.identical += same

    def scripts(self, *, rehearsed: bool = False, every: int = 1) -> None:
        """Play spoiled scripts to the ranks.

        Args:
            rehearsed: play scripts of updates that come twice.
            every: play one of so many.
        """
        for fault, spoiling in list(spoilings(self._stale["A", rehearsed]))[::every]:
            self._play(f"rehearsed, {fault}" if rehearsed else fault, spoiling, rehearsed)

    def pushes(self, *, kills: bool = True, every: int = 1) -> None:
        """Break off, repeat, stop and kill at each message of a learner's own refit.

        Args:
            kills: ranks, too, after each of which the engine is started anew.
            every: at one of so many messages, the last among them.
        """
        self.target.engine.arm(0)
        self._refit(self._other)
        messages = list(enumerate(self.target.engine.calls, 1))
        for number, method in messages[::-every]:
            at = f"at message {number} ({method})"
            self._push(f"link gone {at}", number, _gone, lasting=True)
            self._push(f"rank stopped {at}", number, self._stopped)
            if method in self.target.repeatable:
                self._push(f"repeated {at}", number, self._repeated)
            if kills:
                self.kill(number, method)

    def kill(self, number: int, method: str) -> None:
        """Kill a rank at a message of a refit, and start the engine anew."""

        def killed(method: str, args: tuple[Any, ...]) -> list[Any]:
            self.target.kill()
            return self.target.engine.engine.collective_rpc(method, args=args)

        version, told, problem = self._attempt(number, killed)
        self.target.forget_dead()
        problem = problem or self._state_problem(version, told=told)
        self.target.restart()
        self._finish(f"rank killed at message {number} ({method})", problem)

    def last_words(self, kill: Callable[[], None]) -> str:
        """Return what the learner is told when the engine is killed within a refit; nothing starts it anew.

        Args:
            kill: ends it.
        """

        def killed(method: str, args: tuple[Any, ...]) -> list[Any]:
            kill()
            return self.target.engine.engine.collective_rpc(method, args=args)

        started = time.monotonic()
        self.target.engine.arm(3, killed)
        try:
            push(self.target.next(self._other), self.target.engine, self.target.sender(TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 returned
            told = f"{type(error).__name__}: {error}"
        else:
            return ""
        return told if time.monotonic() - started < PATIENCE_S else ""

    def _push(self, fault: str, number: int, meddling: Meddling, *, lasting: bool = False) -> None:
        version, told, problem = self._attempt(number, meddling, lasting=lasting)
        self._finish(fault, problem or self._state_problem(version, told=told))

    def _attempt(self, number: int, meddling: Meddling, *, lasting: bool = False) -> tuple[int, bool, str]:
        update, error, started = self.target.next(self._other), "", time.monotonic()
        self.target.engine.arm(number, meddling, lasting=lasting)
        with ExitStack() as self._stops:
            try:
                push(update, self.target.engine, self.target.sender(TIMEOUT_S))
            except Exception as failure:  # noqa: BLE001 which one is looked at
                error = str(failure) or f"an empty {type(failure).__name__}"
            elapsed = time.monotonic() - started
        self.target.engine.arm(0)
        late = f"the learner was told after {elapsed:.0f} s" if elapsed > PATIENCE_S else ""
        empty = error if error.startswith("an empty ") and "EOFError" not in error else ""
        return update.manifest.version, bool(error), late or empty

    def _stopped(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self._stops.enter_context(self.target.stopped())
        return self.target.engine.engine.collective_rpc(method, args=args)

    def _repeated(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.target.engine.engine.collective_rpc(method, args=args)
        return self.target.engine.engine.collective_rpc(method, args=args)

    def _play(self, fault: str, spoiling: Spoiling, rehearsed: bool) -> None:
        whole = self._script(self._other, rehearsed)
        # A sender whose message is lost waits for an answer in vain; `pushes` tests for how long.
        version, told = whole[-1][1][0], "cut" in fault or "lost" in fault
        for method, arguments in spoiling(whole, self._stale[self._chance.choice("AB"), rehearsed], self._chance):
            try:
                answers = require_answers(method, self.target.engine.collective_rpc(method, args=arguments))
                told |= method in ("qarl_begin", "qarl_verify") and any(answers)
            except RuntimeError:
                told = True
        self._finish(fault, self._state_problem(version, told=told, may_break=rehearsed))

    def _state_problem(self, version: int, *, told: bool, may_break: bool = False) -> str:
        states = ask(self.target.engine, "qarl_version", timeout_s=_ANSWERS_S)
        if all(state == {"version": version, "whole": True} for state in states):
            expected = self._other
        elif all(state == {"version": self._version, "whole": True} for state in states):
            expected = self._serving
            if not told:
                return "nobody was told"
        elif may_break and not any(state["whole"] for state in states):
            return ""
        else:
            return f"of versions {self._version} and {version}, ranks serve {states}"
        same = self.target.weights() == self._weights[expected]
        return "" if same else f"what serves is not {expected}, whose version it says it is"

    def _finish(self, fault: str, problem: str) -> None:
        self.counts.tried += 1
        try:
            self._refit(self._other)
            if not problem and self.target.weights() != self._weights[self._serving]:
                problem = "the next whole refit serves something else"
        except Exception as error:  # noqa: BLE001 counted
            problem = problem or f"the next whole refit failed: {type(error).__name__}: {error}"
        if problem:
            self.counts.failures.append(f"{fault}: {problem}")

    @property
    def _other(self) -> str:
        return "B" if self._serving == "A" else "A"

    def _script(self, name: str, rehearsed: bool) -> Script:
        return script(self.target.next(name).manifest, self._paths[name], rehearsed=rehearsed)

    def _refit(self, name: str) -> None:
        update = self.target.next(name)
        push(update, self.target.engine, self.target.sender(_ANSWERS_S))
        self._serving, self._version = name, update.manifest.version


def _gone(method: str, _: tuple[Any, ...]) -> list[Any]:
    raise ConnectionError(f"the link to the engine is gone, {method} does not reach it")
