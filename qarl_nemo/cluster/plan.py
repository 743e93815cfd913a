"""A launcher's plan as data: a dry run prints it, a launch executes it."""

import json
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

from qarl_nemo.cluster.config import ClusterConfig
from qarl_nemo.cluster.secrets import caller_values
from qarl_nemo.config import ConfigError

CLI = ("-m", "qarl_nemo.cluster")
# How long the head may take to notice a lost node and to collect logs.
HEAD_ENDS_WITHIN_S = 300.0
WORKER_ENDS_WITHIN_S = 30.0


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
            if step.sent or step.inherited:
                lines.append(f"# ... with values of this shell: {', '.join(step.sent or step.inherited)}")
        return "\n".join(lines) + "\n"

    def execute(self) -> int:
        """Run the plan.

        Returns:
            0, or the exit code of the step that failed; of nodes run together, the head's.

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
    """Compose the shell line a node runs: setup, then our command line in the working directory.

    Args:
        config: the cluster run.
        arguments: our command line's words; they may be `"$1"` and the like, so they are not quoted here.
    """
    # In braces, and with a line's end: setup may have several lines or commands, and end in a comment. What is on
    # standard input is the node's.
    setup = [f"{{ {config.setup.strip()}\n}} </dev/null"] if config.setup.strip() else []
    program = shlex.join([*shlex.split(config.python), *CLI])
    return " && ".join([f"cd {shlex.quote(config.workdir)}", *setup, f"exec {program} {' '.join(arguments)}"])


def _run_in_order(steps: Sequence[Step]) -> int:
    for step in steps:
        print(f"{step.title}: {shlex.join(step.command)}", flush=True)
        done = subprocess.run(step.command, input=step.stdin, text=True, check=False)
        if done.returncode:
            print(f"ERROR: {step.title} failed with exit code {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


def _run_together(steps: Sequence[Step]) -> int:
    nodes = [_RunningNode(step) for step in steps]
    head, workers = nodes[0], nodes[1:]
    try:
        deadline = None
        while head.process.poll() is None:
            for worker in workers:
                if worker.process.poll() is not None and not worker.reported:
                    worker.report()
                    deadline = deadline or time.monotonic() + HEAD_ENDS_WITHIN_S
            if deadline and time.monotonic() > deadline:
                print("ERROR: the head did not end by itself after it lost a node; closing it", file=sys.stderr)
                break
            time.sleep(0.5)
    finally:
        # The head ends first: it stops the job and collects logs from workers, which must still run.
        head.close(HEAD_ENDS_WITHIN_S)
        for worker in workers:
            worker.release()
        for worker in workers:
            worker.close(WORKER_ENDS_WITHIN_S)
    return head.process.returncode


class _RunningNode:
    """A node's connection, its output shown with its name in front."""

    def __init__(self, step: Step) -> None:
        self.step, self.reported = step, False
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
        print(f"ERROR: {self.step.title} ended with exit code {self.process.returncode}:{words}", file=sys.stderr)

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
            print(f"[{name}] {line}", end="", flush=True)
