"""A launcher's plan as data: a dry run prints it, a launch executes it."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from qarl_nemo.cluster.config import EXIT_NODE_LOST, EXIT_UNHEALTHY, ClusterConfig
from qarl_nemo.cluster.secrets import caller_values, not_set
from qarl_nemo.config import ConfigError

CLI = ("-m", "qarl_nemo.cluster")
# How long the head of a running job may take to notice a lost node and to collect logs.
HEAD_ENDS_WITHIN_S = 300.0
WORKER_ENDS_WITHIN_S = 30.0
# What the job's watch says, and how the launcher, who sees nothing but its lines, tells a job's end from a head's.
JOB_STARTS = "run folder: "
JOB_ENDED = "the job ended with exit code "
_TIME = r"\[\d\d:\d\d:\d\d\] "
_HIGHEST_SIGNAL = 64


@dataclass(frozen=True)
class Step:
    """One command, its input and its purpose.

    Attributes:
        title: what the command is for.
        command: its words.
        stdin: what it reads.
        sent: variables of this shell whose values it reads as well, on a line of their own.
        inherited: variables of this shell that the command passes on.
    """

    title: str
    command: tuple[str, ...]
    stdin: str = ""
    sent: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Steps that run one after the other, or the nodes of a cluster all at once, the head first."""

    steps: tuple[Step, ...]
    together: bool = False

    def show(self) -> str:
        """Render the plan as a shell script: every command with what it reads, word for word."""
        order = "at the same time; each ends when its standard input closes" if self.together else "one after the other"
        lines = [f"# {len(self.steps)} command(s), {order}"]
        for step in self.steps:
            lines += ["", f"# {step.title}", shlex.join(step.command) + (" <<'STDIN'" if step.stdin else "")]
            if step.stdin:
                lines += [step.stdin.rstrip("\n"), "STDIN"]
            if names := step.sent or step.inherited:
                lines.append(f"# ... with values of this shell: {', '.join(names)}")
                if missing := not_set(names):
                    lines.append(f"# ... not set in this shell, so that a launch is refused: {', '.join(missing)}")
        return "\n".join(lines) + "\n"

    def execute(self) -> int:
        """Run the plan.

        Returns:
            0, or the exit code of the step that failed. Of nodes run together the job's, or if it has none, 128 + n
            for a head that signal n stopped, `EXIT_UNHEALTHY` before the job was started and `EXIT_NODE_LOST` after.

        Raises:
            ConfigError: programs that the plan runs are not installed here, or variables it needs are not set; all are
                named.
        """
        missing = sorted({step.command[0] for step in self.steps if shutil.which(step.command[0]) is None})
        if missing:
            raise ConfigError(f"not found on this machine: {', '.join(missing)}; --dry-run shows what they are for")
        caller_values(dict.fromkeys(name for step in self.steps for name in (*step.sent, *step.inherited)))
        return _run_together(self.steps) if self.together else _run_in_order(self.steps)


def node_line(config: ClusterConfig, arguments: Sequence[str]) -> str:
    """Compose the shell line a node runs in the working directory: setup, up to its first failure, our command line.

    Args:
        config: the cluster run.
        arguments: our command line's words; they may be `"$1"` and the like, so they are not quoted here.
    """
    enter = f"cd {shlex.quote(config.workdir)}"
    program = f"exec {shlex.join([*shlex.split(config.python), *CLI])} {' '.join(arguments)}"
    if not config.setup.strip():
        return f"{enter} && {program}"
    # In braces, and with a line's end: setup may have several lines or commands, and end in a comment. What is on
    # standard input is the node's. In no list of && or ||, where `set -e` has no effect.
    return f"{enter} || exit; set -e; {{ {config.setup.strip()}\n}} </dev/null; set +e; {program}"


def shell_code(code: int) -> int:
    """Return a process's exit code as a shell gives it: 128 + n for signal n, where Python says -n."""
    return code if code >= 0 else 128 - code


def _run_in_order(steps: Sequence[Step]) -> int:
    for step in steps:
        print(f"{step.title}: {shlex.join(step.command)}", flush=True)
        done = subprocess.run(step.command, input=step.stdin, text=True, check=False)
        if done.returncode:
            code = shell_code(done.returncode)
            print(f"ERROR: {step.title} failed with exit code {code}", file=sys.stderr)
            return code
    return 0


def _run_together(steps: Sequence[Step]) -> int:
    nodes = [_RunningNode(step) for step in steps]
    head, workers = nodes[0], nodes[1:]
    try:
        ended = _follow(head, workers)
    finally:
        # The head ends first: it stops the job and collects logs from workers, which must still run.
        head.close(HEAD_ENDS_WITHIN_S)
        for worker in workers:
            worker.release()
        for worker in workers:
            worker.close(WORKER_ENDS_WITHIN_S)
    if ended:
        return head.outcome()
    return EXIT_NODE_LOST if head.started else EXIT_UNHEALTHY


def _follow(head: "_RunningNode", workers: Sequence["_RunningNode"]) -> bool:
    """Wait for the head, and report workers that end before it.

    Returns:
        Whether the head ended by itself; otherwise it waits in vain for workers that are gone.
    """
    deadline = math.inf
    while head.process.poll() is None:
        for worker in workers:
            if worker.process.poll() is not None and not worker.reported:
                worker.report()
                # Before the job starts the head waits for every node, so one that failed decides. A worker ends with 0
                # because its head has ended, whose own connection may close a little later.
                patience = WORKER_ENDS_WITHIN_S if worker.process.returncode == 0 else 0.0
                deadline = min(deadline, time.monotonic() + (HEAD_ENDS_WITHIN_S if head.started else patience))
        if time.monotonic() >= deadline:
            gone = ", ".join(worker.step.title for worker in workers if worker.reported)
            why = f"the head did not end by itself in {HEAD_ENDS_WITHIN_S:g} s after it lost {gone}; closing it"
            if not head.started:
                why = f"{gone} ended before the job, which needs all {len(workers) + 1} nodes, was started; closing all"
            print(f"ERROR: {why}", file=sys.stderr)
            return False
        time.sleep(0.5)
    return True


class _RunningNode:
    """A node's connection, its output shown with its name in front."""

    def __init__(self, step: Step) -> None:
        self.step, self.reported, self.started = step, False, False
        self._job_code: int | None = None
        self.process = subprocess.Popen(
            step.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C reaches the launcher, which closes nodes in order.
            start_new_session=True,
        )
        self._last: deque[str] = deque(maxlen=10)
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError):  # the process ended at once; the loop reports that
            self.process.stdin.write(step.stdin.rstrip("\n") + "\n")
            if step.sent:
                self.process.stdin.write(json.dumps(caller_values(step.sent)) + "\n")
            self.process.stdin.flush()

    def report(self) -> None:
        """Say that this node ended before the head, with the last lines it printed."""
        self.reported = True
        self._reader.join(timeout=5)
        words = "".join(f"\n    {line}" for line in self._last)
        print(
            f"ERROR: {self.step.title} ended with exit code {shell_code(self.process.returncode)}:{words}",
            file=sys.stderr,
        )

    def outcome(self) -> int:
        """Return what a launch ends with when its head has ended, and report an end that nothing explains."""
        code = self.process.returncode
        told = (EXIT_UNHEALTHY, EXIT_NODE_LOST)
        if self._job_code is not None:
            # Another code is that of a connection which broke after the job had ended.
            return code if code in told else self._job_code
        stopped = 128 < code <= 128 + _HIGHEST_SIGNAL
        if not self.started and (code in told or stopped):
            return code
        if code not in told:
            self.report()
        return EXIT_NODE_LOST if self.started else EXIT_UNHEALTHY

    def release(self) -> None:
        """Close the node's standard input, which tells it to end."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, within_s: float) -> None:
        """End the node, by force if it does not end by itself."""
        self.release()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=5)

    def _show(self) -> None:
        name = self.step.title.split()[-1]
        for line in self.process.stdout:
            self._last.append(line.rstrip())
            self.started = self.started or re.match(_TIME + JOB_STARTS, line) is not None
            if ended := re.match(_TIME + JOB_ENDED + r"(\d+)", line):
                self._job_code = int(ended[1])
            print(f"[{name}] {line}", end="", flush=True)
