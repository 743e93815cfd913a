"""What `qarl eval` is given: a BF16 or quantized checkpoint, or a run, which is served as its rollouts were.

A run on a frozen base is served as base and adapters beside it, which is what its rollouts were sampled from.
"""

import zlib
from dataclasses import dataclass, field
from pathlib import Path

from qarl_formats import BASELINE, QuantFormat, get_format
from qarl_nemo.architecture import CONFIG_FILE
from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.checkpoints.hf_config import require_no_adapters
from qarl_nemo.checkpoints.hints import folder_hint, no_folder
from qarl_nemo.checkpoints.reader import Checkpoint
from qarl_nemo.checkpoints.stored import Stored
from qarl_nemo.config import QarlConfig, validate
from qarl_nemo.files import FileError
from qarl_nemo.metrics.recorded import FACTS_FILE
from qarl_nemo.train.checkpoint import RUN_CONFIG, checkpoint_dir, require_checkpoint
from qarl_nemo.train.config import TokenizerConfig
from qarl_nemo.train.frozen_run import FrozenRun
from qarl_nemo.train.prompts import DEFAULT_TEMPLATE
from qarl_nemo.train.run_dir import read_run_config
from qarl_nemo.train.trained import ADAPTER_FILE, TRAINED_FILE, is_trained_alone


@dataclass(frozen=True, slots=True)
class EvalModel:
    """One model to be evaluated.

    Attributes:
        label: what tables call it.
        checkpoint: table of contents of the Hugging Face checkpoint, or of a run's frozen base.
        served: the format that an engine serves; None for a quantized checkpoint in a format that is not one of ours.
        targets: which layers are in that format.
        quantized: whether the checkpoint's tensors are quantized already.
        prompts: how prompts are written: a run's own way, else in the tokenizer's chat template if it has one.
        run: the run that trained on `checkpoint`, which is frozen; None: the checkpoint is the whole model.
    """

    label: str
    checkpoint: Checkpoint
    served: QuantFormat | None
    targets: tuple[str, ...]
    quantized: bool
    prompts: TokenizerConfig = field(default_factory=TokenizerConfig)
    run: FrozenRun | None = None

    @property
    def folder(self) -> Path:
        """Where the model and its tokenizer are; of a frozen base what was trained on it."""
        return self.run.folder if self.run else self.checkpoint.folder

    @property
    def format_name(self) -> str:
        """Name of the served format."""
        return self.served.name if self.served else str(self.checkpoint.config["quantization_config"]["quant_method"])

    def fingerprint(self) -> str:
        """Return eight hexadecimal digits that change if the folder's weights are replaced."""
        files = [self.checkpoint.folder / file for file in self.checkpoint.files]
        if self.run:
            files += filter(Path.is_file, (self.folder / name for name in (ADAPTER_FILE, TRAINED_FILE)))
        stats = [(path.name, path.stat()) for path in files]
        text = repr([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats] + [self.format_name])
        return f"{zlib.crc32(text.encode()):08x}"


def find_model(path: Path, base: Path | None = None) -> EvalModel:
    """Say what a folder holds.

    Args:
        path: a Hugging Face checkpoint, quantized or not, or a run's folder, whose newest checkpoint is taken.
        base: where the frozen base of a run is now; None for where it was.

    Returns:
        The model; a run's is served in the format of its rollouts.

    Raises:
        ValueError: it is neither, or damaged, or lacks the adapters of a run.
    """
    if (path / CONFIG_FILE).is_file():
        return _checkpoint_model(path)
    if (path / RUN_CONFIG).is_file() and ((path / "checkpoints").is_dir() or (path / FACTS_FILE).is_file()):
        return _run_model(path, base)
    if absent := no_folder(path):
        raise FileError(f"no model: {absent}")
    hint = folder_hint(path)
    megatron = "" if "qarl convert" in hint else "; Megatron checkpoints of NeMo-RL become one by qarl convert"
    raise FileError(
        f"{path} is neither a Hugging Face checkpoint ({CONFIG_FILE}) nor a run of qarl train ({RUN_CONFIG} and "
        f"checkpoints/){hint}{megatron}"
    )


def _checkpoint_model(path: Path) -> EvalModel:
    require_no_adapters(path)
    checkpoint = open_checkpoint(path)
    stored = Stored.of(checkpoint)
    if stored is None:
        return EvalModel(str(path), checkpoint, get_format(BASELINE), (), quantized=False)
    return EvalModel(str(path), checkpoint, stored.format, stored.targets, quantized=True)


def _run_model(path: Path, base: Path | None) -> EvalModel:
    step = require_checkpoint(path)
    config, source = read_run_config(path), str(path / RUN_CONFIG)
    qarl = validate(config["qarl"], QarlConfig, source=source)
    prompts = validate(config["policy"].get("tokenizer") or {}, TokenizerConfig, source=source)
    if prompts.chat_template is not None:
        # A template of the config's own was saved with the tokenizer.
        prompts = prompts.model_copy(update={"chat_template": DEFAULT_TEMPLATE})
    served = qarl.served_at(step)
    folder = checkpoint_dir(path, step) / "model"
    run = FrozenRun.read(path, step, base) if is_trained_alone(folder) else None
    checkpoint = open_checkpoint(run.base if run else folder)
    quantized = Stored.of(checkpoint) is not None
    targets = qarl.targets if served.is_quantized else ()
    return EvalModel(f"{path}, step {step}", checkpoint, served, targets, quantized, prompts, run)
