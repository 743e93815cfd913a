"""One run from start to end: is anything left to do, lock the folder, train, and end well when interrupted."""

from rich.console import Console

from qarl_nemo.files import exclusive, make_folder
from qarl_nemo.metrics.events import METRICS_FILE, recorded_steps
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.run_dir import RunStoppedError, is_complete, where_it_stands
from qarl_nemo.train.setup import MakeLearner, transformers_learner
from qarl_nemo.train.trainer import Trainer

LOCK_FILE = ".lock"


def train_run(config: LocalConfig, make_learner: MakeLearner = transformers_learner) -> Trainer | None:
    """Run what remains of a run, alone in its folder.

    Args:
        config: the resolved config.
        make_learner: makes the learner; by default from the transformers model of this process.

    Returns:
        The trainer, or None if the run was complete already.

    Raises:
        ValueError: something in config, data or run folder cannot be used, or another process uses the folder.
        RunStoppedError: it was interrupted from the keyboard.
    """
    if is_complete(config):
        recorded = recorded_steps(config.run_dir / METRICS_FILE)
        Console().print(f"{config.run.name}: already complete, {recorded} steps in {config.run_dir}", soft_wrap=True)
        return None
    prepared = prepare(config)
    make_folder(config.run_dir, "a run's folder")
    with exclusive(config.run_dir / LOCK_FILE, f"run folder {config.run_dir}"):
        try:
            trainer = Trainer(config, make_learner, prepared)
            trainer.train()
        except KeyboardInterrupt:
            raise RunStoppedError(where_it_stands(config)) from None
    return trainer
