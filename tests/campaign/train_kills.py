"""`kill -9` of `qarl train`: at every file-system call of one small run, and at random moments in every format.

    python tests/campaign/train_kills.py --num-kills 50 --every-call

After each kill the same command runs again. The result counts as identical when metrics (clocks aside) and the bytes of
the last checkpoint's model are those of a run that was not killed, and no half of a checkpoint is left.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kill_points import KILLED, Ended, QarlServer
from kill_pool import Case, Counts, kill_each

from qarl_nemo.files import checksum

PRELOAD = ("qarl_nemo.train.run", "qarl_nemo.metrics.report")
FORMATS: dict[str, dict[str, Any]] = {
    "w4a16": {"format": "w4a16", "group_size": 32},
    "w4a8": {"format": "w4a8"},
    "fp8_block": {"format": "fp8_block"},
    "fp8_channel": {"format": "fp8_channel"},
    "int8": {"format": "int8"},
    "nvfp4": {"format": "nvfp4"},
    "bf16": {"alignment": "none", "format": "bf16"},
}
_CLOCKS = ("time_s", "timing/", "throughput/", "memory/")


def run(num_kills: int, seed: int, formats: Sequence[str], jobs: int, *, every_call: bool = False) -> Counts:
    """Kill runs and let them go on.

    Args:
        num_kills: random moments over all formats.
        seed: seeds the moments.
        formats: some of `FORMATS`.
        jobs: processes.
        every_call: kill a run of the first format at each of its file-system calls, too.

    Returns:
        The counts.
    """
    cases: list[Case] = []
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="qarl-kills-") as scratch, QarlServer(PRELOAD) as qarl:
        for index, name in enumerate(formats):
            whole = KilledRun(qarl, Path(scratch) / name, FORMATS[name])
            share = num_kills * (index + 1) // len(formats) - num_kills * index // len(formats)
            cases += [(name, "moment", moments.randrange(whole.duration_ms)) for _ in range(share)]
            if every_call and index == 0:
                cases += [(name, "kill", number) for number in range(1, whole.num_calls + 1)]
    return kill_each(cases, _killed_run, jobs, "train")


def _killed_run(name: str, folder: Path) -> "KilledRun":
    return KilledRun(QarlServer(PRELOAD), folder, FORMATS[name])


class KilledRun:
    """A small run that is killed again and again, and the one that was not.

    Args:
        qarl: where commands run.
        folder: this run's own folder; made here.
        block: the `qarl:` block.
    """

    def __init__(self, qarl: QarlServer, folder: Path, block: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self._qarl, self._folder, self.run_dir = qarl, folder, folder / "run"
        self._command = ["train", folder / "run.yaml"]
        (folder / "run.yaml").write_text(json.dumps(_config(self.run_dir, block)))
        ended = qarl.run(self._command, watch=self.run_dir)
        if ended.code:
            raise RuntimeError(f"the run that nobody killed ended with code {ended.code}:\n{ended.output}")
        self.calls = ended.calls
        self.duration_ms = int(1000 * ended.seconds)
        self._expected = self._result()

    @property
    def num_calls(self) -> int:
        """File-system calls of the run, its report left out."""
        return max(number for number, call in enumerate(self.calls, start=1) if call.endswith(".lock"))

    def kill(self, counts: Counts, *, fault: str, at: int) -> None:
        """Kill a new run, run it again and count.

        Args:
            counts: what is added to.
            fault: as for `QarlServer.run`: `kill` or `moment`.
            at: number of the call, or milliseconds.
        """
        if self.meet(fault, at).code in (KILLED, -9):
            counts.note(f"{self._folder.name}, {fault} at {at}", self.go_on())

    def meet(self, fault: str, at: int) -> Ended:
        """Run the command in a new folder until it meets a fault.

        Args:
            fault: as for `QarlServer.run`.
            at: where.

        Returns:
            How it ended.
        """
        shutil.rmtree(self.run_dir)
        return self._qarl.run(self._command, watch=self.run_dir, fault=fault, at=at)

    def go_on(self) -> str:
        """Run the command again.

        Returns:
            What differs from a run that was not killed; nothing if nothing does.
        """
        ended = self._qarl.run(self._command, watch=self.run_dir)
        if ended.code:
            return f"ended with code {ended.code}: {ended.output[-500:]}"
        found = self._result()
        return "; ".join(f"other {name}" for name, value in self._expected.items() if found[name] != value)

    def _result(self) -> dict[str, Any]:
        records = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        checkpoints = sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())
        model = self.run_dir / "checkpoints" / checkpoints[-1] / "model" / "model.safetensors"
        return {
            "metrics": [{k: v for k, v in record.items() if not k.startswith(_CLOCKS)} for record in records],
            "checkpoints": checkpoints,
            "weights": checksum(model) if model.exists() else None,
        }


def _config(run_dir: Path, block: dict[str, Any]) -> dict[str, Any]:
    sizes = {"num_experts": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return {
        "run_dir": str(run_dir),
        "device": "cpu",
        "num_threads": 1,
        "qarl": block,
        "policy": {"model_init": sizes, "optimizer": {"name": "adamw", "lr": 1e-3}},
        "rollout": {"max_new_tokens": 2},
        "loss_fn": {"objective": "tbpo"},
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "train_global_batch_size": 2,
            "max_num_steps": 3,
            "val_period": 0,
        },
        "data": {"source": "arithmetic", "digits": 1, "answer_digits": 1},
        "checkpointing": {"save_period": 1, "keep_last": 1},
        "logger": {"diagnostics_period": 2},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", action="append", choices=FORMATS, help="Repeat for several. Default: all.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every-call", action="store_true")
    arguments = parser.parse_args()
    formats = arguments.format or list(FORMATS)
    found = run(arguments.num_kills, arguments.seed, formats, arguments.jobs, every_call=arguments.every_call)
    print(f"{found.identical} of {found.kills} killed runs ended identically", *found.different, sep="\n  ")
    raise SystemExit(found.identical != found.kills)
