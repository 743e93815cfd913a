"""NeMo-RL's GRPO, synchronous or asynchronous, with quantized rollouts and a learner that is aligned with them.

    python examples/run_qarl_grpo.py --config examples/configs/qarl-....yaml [a.b=c ...] [--check]

This is NeMo-RL's own examples/run_grpo.py with three of its names bound to ours: `MasterConfig`, which also checks the
`qarl:` block against everything it depends on, `setup_response_data`, which also looks at the prompts' lengths and at
reward functions, and `setup`, which gets our policy workers, our refit and our loss.
`--check` stops once the config is checked, before Ray starts, and says what would run.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

from qarl_nemo.installation import nemo_rl_python_problem
from qarl_nemo.nemo_rl import upstream

if {"-h", "--help"} & set(sys.argv):
    upstream.launcher_arguments().parse_args(["--help"])
# An older one ends in a traceback of Pydantic's.
if problem := nemo_rl_python_problem():
    sys.exit(f"{Path(sys.argv[0]).name}: {problem}")
# Whatever is imported here may need a package that is not there.
try:
    import nemo_rl
    import torch
    from nemo_rl.package_info import __version__ as nemo_rl_version
    from nemo_rl.utils.config import OverridesError, load_config
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError
    from yaml import YAMLError

    from qarl_nemo.config import ConfigError
    from qarl_nemo.files import FileError
    from qarl_nemo.nemo_rl import plugin
    from qarl_nemo.nemo_rl.block import NemoQarlConfig
    from qarl_nemo.nemo_rl.checks.hints import budget_hints, find_hints
    from qarl_nemo.nemo_rl.checks.key_hints import config_types, key_hints
    from qarl_nemo.nemo_rl.checks.muon import muon_hints
    from qarl_nemo.nemo_rl.config import apply_qarl, as_mapping
    from qarl_nemo.nemo_rl.launch_summary import launch_summary
    from qarl_nemo.nemo_rl.model_shapes import fetch_model_config
    from qarl_nemo.nemo_rl.recording import completed_steps
    from qarl_nemo.nemo_rl.run_folder import describe_run
    from qarl_nemo.nemo_rl.start_progress import StartProgress, start_key
    from qarl_nemo.nemo_rl.start_together import StartTogether
except ImportError as error:
    sys.exit(f"{Path(sys.argv[0]).name}: {upstream.not_importable(error)}")

_ROOT = Path(nemo_rl.__file__).parents[1]
# Positions in what `setup` returns.
_LOSS, _STATE = 6, 9
_DRIVER_THREADS = 4
_REPLACED = (
    "; a list does not merge with a block of settings: write it in a recipe that builds on this one, with `_override_: "
    "true` in the top-level block (such as `data:`), which is then repeated whole"
)
# A comma within these is no list without brackets.
_ENCLOSED = re.compile(r"\[[^\[\]]*\]|\{[^{}]*\}|\([^()]*\)|'[^']*'|\"[^\"]*\"")
# What NeMo-RL says of an override that it cannot apply -> what to do.
_FIXES = {
    "Could not override": "; ++KEY=VALUE sets a key that the config does not have yet",
    "Error merging override": _REPLACED,
}


def main() -> None:
    """Run NeMo-RL's launcher on the command line's config."""
    # Our recipes build on NeMo-RL's, which they find through this variable.
    os.environ.setdefault("NEMO_RL_ROOT", str(_ROOT))
    check_only = _parse_arguments()
    with closing(StartProgress()) as progress:
        run_grpo = _import_launcher()
        run = _Run(run_grpo, check_only, progress)
        run.bind()
        _run_launcher(run_grpo)
    # NeMo-RL's asynchronous loop prints why its first refit failed, and returns.
    if run.synchronizer is not None and run.synchronizer.failure is not None:
        sys.exit(f"{Path(sys.argv[0]).name}: a refit failed: {run.synchronizer.failure}")


def _import_launcher() -> Any:
    """Import NeMo-RL's own launcher, and with it all that NeMo-RL needs."""
    sys.path.insert(0, str(_ROOT / "examples"))
    try:
        import run_grpo
    # Of some packages it asserts the version.
    except (ImportError, AssertionError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {upstream.not_importable(error)}")
    return run_grpo


def _run_launcher(launcher: Any) -> None:
    try:
        launcher.main()
    except OverridesError as error:
        fix = _list_fix(sys.argv[1:]) or next((words for said, words in _FIXES.items() if said in str(error)), "")
        sys.exit(f"{Path(sys.argv[0]).name}: {error}{fix}")
    except (ConfigError, FileError, OmegaConfBaseException) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def _list_fix(arguments: Sequence[str]) -> str:
    """Say how overrides are written whose value is a list without brackets, which Hydra takes for values to try."""
    lists = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        rest, enclosed = value, 1
        while enclosed:
            rest, enclosed = _ENCLOSED.subn("", rest)
        lists += [f"'{key}=[{value}]'"] if "," in rest else []
    return f"; a list needs brackets: set {' '.join(lists)}" if lists else ""


def _parse_arguments() -> bool:
    """Check what NeMo-RL's launcher will parse, and take `--check` away from it."""
    parser = upstream.launcher_arguments()
    arguments, _ = parser.parse_known_args()
    if arguments.config and not arguments.config.is_file():
        sys.exit(f"{parser.prog}: --config {arguments.config}: no such file")
    try:
        # NeMo-RL asserts that it is a mapping; `defaults` may name a file that is not there.
        if arguments.config:
            load_config(arguments.config)
    except (AssertionError, OSError, TypeError, ValueError, YAMLError, OmegaConfBaseException) as error:
        fix = _REPLACED if "incompatible container types" in str(error) else ""
        sys.exit(f"{parser.prog}: --config {arguments.config} cannot be read: {error}{fix}")
    sys.argv = [argument for argument in sys.argv if argument != "--check"]
    return arguments.check


class _Run:
    """Carries what our `MasterConfig` learns to our `setup`."""

    def __init__(self, launcher: Any, check_only: bool, progress: StartProgress) -> None:
        self.launcher, self.check_only, self.progress = launcher, check_only, progress
        self.master_config, self.setup = launcher.MasterConfig, launcher.setup
        self.setup_data = launcher.setup_response_data
        self.qarl: NemoQarlConfig | None = None
        self.grpo: Mapping[str, Any] = {}
        self.synchronizer: Any = None
        self.together = StartTogether()

    def bind(self) -> None:
        """Bind our names in NeMo-RL's launcher."""
        self.launcher.MasterConfig, self.launcher.setup = self.checked_config, self.aligned_setup
        self.launcher.setup_response_data = self.checked_data

    def checked_config(self, **values: Any) -> Any:
        """Make NeMo-RL's config, checked together with its `qarl:` block."""
        upstream.require_fitting(nemo_rl_version)
        try:
            config = self.master_config(**values)
        except ValidationError as error:
            raise ConfigError(f"NeMo-RL refuses the config: {error}") from error
        unchecked = fetch_model_config(config.policy["model_name"])
        # The check writes into the config what it decides, and hints are about what was asked for.
        given = deepcopy(as_mapping(config))
        self.qarl = apply_qarl(config)
        self.grpo = as_mapping(config)["grpo"]
        print(launch_summary(as_mapping(config), self.qarl, sys.argv, unchecked))
        hints = [*key_hints(values, config_types(self.master_config)), *muon_hints(as_mapping(config))]
        hints += [*find_hints(as_mapping(config)), *budget_hints(given, self.qarl)]
        hints += upstream.upstream_hints(_ROOT, nemo_rl_version)
        print(*(f"qarl: hint: {hint}" for hint in hints), sep="\n", flush=True)
        if self.check_only:
            sys.exit(0)
        # Now, because NeMo-RL starts environments before it calls `setup`.
        plugin.register()
        self.progress.begin(start_key(as_mapping(config), self.qarl), Path(config.logger["log_dir"]), "Ray")
        return config

    def checked_data(self, tokenizer: Any, data: Any, env: Any) -> Any:
        """Set up the data as NeMo-RL does, and look at prompts and reward functions."""
        self.progress.enter("data")
        return plugin.setup_data(self.setup_data, tokenizer, data, env, self.grpo)

    def aligned_setup(self, config: Any, *arguments: Any, policy_factory: Any = None, **named: Any) -> tuple[Any, ...]:
        """Set up NeMo-RL with our workers, then put our refit and our loss in place."""
        assert policy_factory is None, "data_plane.enabled is refused with the config"
        assert self.qarl is not None
        log_dir = Path(config.logger["log_dir"])
        describe_run(log_dir, as_mapping(config))
        if "OMP_NUM_THREADS" not in os.environ:
            # It only shares batches out; more threads than idle cores took five times as long, on a CPU.
            torch.set_num_threads(min(_DRIVER_THREADS, torch.get_num_threads()))
        self.progress.enter("engines and learner")
        # NeMo-RL itself starts engines beside a learner on other GPUs.
        shared = config.policy["generation"]["colocated"]["enabled"]
        factory = self.aligned_policy if shared else plugin.policy_factory
        with self.together.engines(sys.modules[self.setup.__module__]) if shared else nullcontext():
            parts = list(self.setup(config, *arguments, policy_factory=factory, **named))
        self.progress.enter("first refit")
        policy, policy_generation = parts[:2]
        self.synchronizer = plugin.install_refit(policy, policy_generation)
        self.progress.end_with_refit(self.synchronizer, log_dir)
        done = completed_steps(parts[_STATE], asynchronous=config.grpo.async_grpo.enabled)
        parts[_LOSS] = plugin.install_loss(policy, parts[_LOSS], self.qarl, log_dir=log_dir, done=done)
        return tuple(parts)

    def aligned_policy(self, **named: Any) -> Any:
        """Make the policy, whose ranks wait until the engines on their GPUs sleep."""
        policy = self.together.learner(lambda: plugin.policy_factory(**named))
        self.progress.enter("learner")
        return policy


if __name__ == "__main__":
    main()
