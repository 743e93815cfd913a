"""`kill -9` of `qarl quantize` and `qarl convert`: at every file-system call of one conversion, and at random moments.

After each kill the same command runs again; the result counts as identical when every file is that of a conversion that
was not killed. A kill after the destination was complete leaves it refused, and identical as it is.
"""

import random
import shutil
import tempfile
from pathlib import Path

from checkpoint_commands import Convert, Quantize, digests
from commands import Command
from kill_points import KILLED, QarlServer


def run(num_kills: int, seed: int, *, every_call: bool) -> tuple[int, list[str]]:
    """Kill conversions and let them go on.

    Args:
        num_kills: random moments, for each of the two commands.
        seed: seeds the moments.
        every_call: kill each command at every one of its file-system calls, too.

    Returns:
        How many were killed, and a line for each that did not end as one that was not.
    """
    kills, different = 0, []
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="qarl-kills-") as scratch, QarlServer() as qarl:
        for kind in (Quantize, Convert):
            command = kind(Path(scratch) / kind.name)
            command.base.mkdir()
            command.prepare()
            whole = qarl.run(command.arguments(command.base), watch=command.base)
            if whole.code != 0:
                raise RuntimeError(f"{kind.name} of undamaged inputs fails: {whole.output}")
            expected = digests(command.base / "out")
            ends = [("moment", moments.randrange(max(1, int(1000 * whole.seconds)))) for _ in range(num_kills)]
            ends += [("kill", number + 1) for number in range(len(whole.calls) if every_call else 0)]
            for fault, at in ends:
                if not _kill(qarl, command, fault, at):
                    continue
                kills += 1
                if _go_on(qarl, command) != expected:
                    different.append(f"{kind.name}, {fault} {at}")
    return kills, different


def _kill(qarl: QarlServer, command: Command, fault: str, at: int) -> bool:
    for path in command.base.glob("out*"):
        shutil.rmtree(path)
    ended = qarl.run(command.arguments(command.base), watch=command.base, fault=fault, at=at)
    return ended.code in (KILLED, -9)


def _go_on(qarl: QarlServer, command: Command) -> dict[str, str]:
    qarl.run(command.arguments(command.base), watch=command.base)
    left = [path.name for path in command.base.glob("out?*")]
    return digests(command.base / "out") if not left and (command.base / "out").is_dir() else {}
