"""`kill -9` of `qarl quantize` and `qarl convert`: at every file-system call of one conversion, and at random moments.

After each kill the same command runs again; the result counts as identical when every file is that of a conversion that
was not killed. A kill after the destination was complete leaves it refused, and identical as it is.
"""

import random
import shutil
import tempfile
from pathlib import Path

from checkpoint_commands import Convert, Quantize, digests
from kill_points import KILLED, QarlServer
from kill_pool import Case, Counts, kill_each

_KINDS = {kind.name: kind for kind in (Quantize, Convert)}


def run(num_kills: int, seed: int, jobs: int, *, every_call: bool) -> Counts:
    """Kill conversions and let them go on.

    Args:
        num_kills: random moments, for each of the two commands.
        seed: seeds the moments.
        jobs: processes.
        every_call: kill each command at every one of its file-system calls, too.

    Returns:
        The counts.
    """
    cases: list[Case] = []
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="qarl-kills-") as scratch:
        for name in _KINDS:
            whole = KilledConversion(name, Path(scratch) / name)
            cases += [(name, "moment", moments.randrange(whole.duration_ms)) for _ in range(num_kills)]
            cases += [(name, "kill", number + 1) for number in range(whole.num_calls if every_call else 0)]
            whole.close()
    return kill_each(cases, KilledConversion, jobs, "conversions")


class KilledConversion:
    """A conversion that is killed again and again, and the one that was not.

    Args:
        name: `quantize` or `convert`.
        folder: its own folder; made here.
    """

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir()
        self._qarl, self._command = QarlServer(), _KINDS[name](folder)
        self._command.prepare()
        whole = self._qarl.run(self._command.arguments(folder), watch=folder)
        if whole.code != 0:
            raise RuntimeError(f"{name} of undamaged inputs fails: {whole.output}")
        self._expected = digests(folder / "out")
        self.num_calls, self.duration_ms = len(whole.calls), max(1, int(1000 * whole.seconds))

    def kill(self, counts: Counts, *, fault: str, at: int) -> None:
        """Kill a new conversion, run it again and count.

        Args:
            counts: what is added to.
            fault: as for `QarlServer.run`: `kill` or `moment`.
            at: number of the call, or milliseconds.
        """
        folder = self._command.base
        for path in folder.glob("out*"):
            shutil.rmtree(path)
        ended = self._qarl.run(self._command.arguments(folder), watch=folder, fault=fault, at=at)
        if ended.code in (KILLED, -9):
            problem = "" if self._go_on() == self._expected else "other files"
            counts.note(f"{self._command.name}, {fault} at {at}", problem)

    def close(self) -> None:
        """End its server."""
        self._qarl.close()

    def _go_on(self) -> dict[str, str]:
        folder = self._command.base
        self._qarl.run(self._command.arguments(folder), watch=folder)
        left = [path.name for path in folder.glob("out?*")]
        return digests(folder / "out") if not left and (folder / "out").is_dir() else {}
