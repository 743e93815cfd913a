"""Run a launcher whose curves are on disk at any time: `python -m support.nemo_rl.run_flushed LAUNCHER ARGUMENTS...`.

TensorBoard's writer keeps two minutes of them, which is longer than these runs, and some of them are killed.
"""

import runpy
import sys

from torch.utils.tensorboard import SummaryWriter

_made = SummaryWriter.__init__


def _flushing(self: SummaryWriter, *arguments: object, **named: object) -> None:
    _made(self, *arguments, **named | {"flush_secs": 2})


SummaryWriter.__init__ = _flushing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
