"""A run that trained on a frozen base: its checkpoints hold what it trained alone, and need the base beside it."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qarl_nemo.config import validate
from qarl_nemo.names import expert_names, is_stacked_expert
from qarl_nemo.train.base_files import find_base
from qarl_nemo.train.checkpoint import RUN_CONFIG, checkpoint_dir
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.run_dir import read_run_config
from qarl_nemo.train.setup import BASE_FOLDER
from qarl_nemo.train.trained import TRAINED_FILE, read_trained


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """What a run trained, and on what.

    Attributes:
        config: the run's; its `policy.model_path` is the base, also where the run made the base itself.
        base: folder of the base.
        folder: what a checkpoint of the run holds beside its optimizer: adapters, other trained parameters, tokenizer.
    """

    config: LocalConfig
    base: Path
    folder: Path

    @classmethod
    def read(cls, run: Path, step: int, base: Path | None = None) -> "FrozenRun":
        """Read a run's config.

        Args:
            run: the run's folder.
            step: which checkpoint.
            base: where the base is now; None for where it was.

        Raises:
            FileError: the base is gone, or has changed.
        """
        config = validate(read_run_config(run), LocalConfig, source=str(run / RUN_CONFIG))
        base = find_base(run, config.policy.model_path or run / BASE_FOLDER, base)
        policy = config.policy.model_copy(update={"model_path": base, "model_init": None})
        return cls(config.model_copy(update={"policy": policy}), base, checkpoint_dir(run, step) / "model")

    def parameters(self) -> dict[str, Tensor]:
        """Return what was trained beside adapters, such as norms, by the names that checkpoints have."""
        path = self.folder / TRAINED_FILE
        found: dict[str, Tensor] = {}
        for name, tensor in read_trained(path).items() if path.is_file() else ():
            if not is_stacked_expert(name):
                found[name] = tensor
                continue
            for parts, expert in zip(expert_names(name, len(tensor)), tensor, strict=True):
                found |= dict(zip(parts, expert.chunk(len(parts)), strict=True))
        return found
