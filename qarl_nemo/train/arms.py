"""Several arms and seeds from one config: all runs are validated first, then each runs in its own process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from qarl_nemo.config import ConfigError, flatten, literal, merge_mappings, validate, write_yaml
from qarl_nemo.config.kinds import dump_as_written, without_meaningless
from qarl_nemo.files import FileError, make_folder
from qarl_nemo.metrics.recorded import ARM_FILE
from qarl_nemo.train.config import MAX_SEED, CompareConfig, LocalConfig
from qarl_nemo.train.gpu_pool import SHARE, GpuPool, own_share, visible_gpus
from qarl_nemo.train.run_dir import RunStoppedError, RunToldError, is_complete, require_same_run, where_it_stands
from qarl_nemo.train.time_limit import STARTED, limit_seconds

_LOG_LINES = 15
_PATIENCE_S = 10.0
_NOT_OF_AN_ARM = ("seed", "run_dir", "run", "compare")


class RunsFailedError(RuntimeError):
    """Runs of a comparison failed; the message names each with its log's end."""


class _TerminatedError(Exception):
    pass


class _Running(NamedTuple):
    config: LocalConfig
    gpus: list[str]
    process: subprocess.Popen[bytes]


def expand_arms(config: LocalConfig, source: str) -> list[LocalConfig]:
    """Return one config for each arm and seed; run directories are `<run_dir>/<arm>-seed<seed>`.

    Args:
        config: a config with a `compare:` block.
        source: where it came from, for errors.

    Returns:
        The runs' configs, seeds outermost.

    Raises:
        ConfigError: an arm's overrides are illegal, or runs would share a folder; every problem is listed.
    """
    assert config.compare is not None
    _require_own_folders(config.compare, source)
    base = {key: value for key, value in dump_as_written(config).items() if key != "compare"}
    runs, problems = [], []
    for seed in config.compare.seeds:
        for arm, overrides in config.compare.arms.items():
            labels = {"name": f"{arm}-seed{seed}", "arm": arm}
            own = {"seed": seed, "run_dir": str(config.run_dir / f"{_slug(arm)}-seed{seed}"), "run": labels}
            below = without_meaningless(base, overrides, [LocalConfig], anew=True)
            values: dict[str, Any] = merge_mappings(merge_mappings(below, overrides), own)
            where = f"{source}, arm {arm!r}"
            try:
                run = validate(values, LocalConfig, source=where)
                _ = run.qarl.served_format  # refuses options that the format does not take
            except ConfigError as error:
                problems.append(str(error))
            except ValueError as error:
                problems.append(f"{where}: {error}")
            else:
                runs.append(run)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return runs


def expand_trained(config: LocalConfig, source: str) -> list[LocalConfig]:
    """Return what `expand_arms` does, arms outermost, also for seeds that other commands trained in the same folder.

    Args:
        config: a config with a `compare:` block.
        source: where it came from, for errors.
    """
    assert config.compare is not None
    names = "|".join(re.escape(_slug(arm)) for arm in config.compare.arms)
    found = (re.fullmatch(rf"(?:{names})-seed(0|[1-9]\d{{0,9}})", path.name) for path in config.run_dir.glob("*-seed*"))
    legal = {seed for name in found if name and (seed := int(name[1])) <= MAX_SEED}
    seeds = {*config.compare.seeds, *legal}
    compare = config.compare.model_copy(update={"seeds": sorted(seeds)})
    runs = expand_arms(config.model_copy(update={"compare": compare}), source)
    order = list(compare.arms)
    return sorted(runs, key=lambda run: order.index(run.run.arm or ""))


def require_alike(runs: Sequence[LocalConfig], every: Sequence[LocalConfig]) -> None:
    """Refuse runs where other settings have run, in their own folders or as another seed of their arm.

    Args:
        runs: what would start.
        every: from `expand_trained`.

    Raises:
        ConfigError: one mean over an arm's seeds would be of different runs; every key that differs is listed.
        FileError: what the folder of one of `runs` holds cannot be read.
    """
    own, arms = {run.run_dir for run in runs}, {run.run.arm for run in runs}
    problems: list[str] = []
    for run in every:
        if run.run.arm not in arms:
            continue
        try:
            require_same_run(run)
        except ConfigError as error:
            problems.append(f"{run.name}: {error}")
        except FileError:
            # Another seed's damage is for the command that goes on with it.
            if run.run_dir in own:
                raise
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} run(s) of other settings, nothing was started:", *problems]))


def select_arms(runs: list[LocalConfig], arms: Sequence[str]) -> list[LocalConfig]:
    """Return the runs of some arms.

    Args:
        runs: from `expand_arms`.
        arms: their names; none selects all.

    Raises:
        ValueError: there is no such arm; all such names are listed.
    """
    legal = list(dict.fromkeys(run.run.arm for run in runs))
    unknown = [arm for arm in arms if arm not in legal]
    if unknown:
        raise ValueError(f"no arm is called {', '.join(map(repr, unknown))}; legal: {', '.join(map(repr, legal))}")
    return [run for run in runs if not arms or run.run.arm in arms]


def require_effect(compare: CompareConfig, overrides: Sequence[str]) -> None:
    """Refuse overrides that no run of a comparison would follow.

    Args:
        compare: the block.
        overrides: the command line's, `a.b=c`.

    Raises:
        ConfigError: they set seed or labels, which follow from the block, or what every arm sets itself; all are
            listed.
    """
    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    problems = [f"{key} has no effect with compare: use compare.seeds=[...]" for key in keys if key == "seed"]
    problems += [
        f"{key} has no effect with compare: names follow from arms and seeds"
        for key in keys
        if key.partition(".")[0] == "run"
    ]
    problems += [
        f"{key} has no effect, because every arm sets it: set compare.arms.ARM.{key}"
        for key in keys
        if all(_sets(arm, key.split(".")) for arm in compare.arms.values())
    ]
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} override(s) that would change nothing", *problems]))


def require_reach(config: LocalConfig, runs: Sequence[LocalConfig], overrides: Sequence[str]) -> None:
    """Refuse overrides that only some arms would follow, because others start that block anew.

    Args:
        config: with the overrides in it, and a `compare:` block.
        runs: from `expand_arms`.
        overrides: the command line's, `a.b=c`.

    Raises:
        ConfigError: an arm has the key, does not set it, and has another value; all are listed.
    """
    assert config.compare is not None
    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    written, problems = dump_as_written(config), []
    base = {key: value for key, value in written.items() if key not in _NOT_OF_AN_ARM}
    for run in {run.run.arm: run for run in runs}.values():
        arm, found = str(run.run.arm), flatten(run.model_dump(mode="json"))
        said = config.compare.arms[arm]
        meant = flatten(without_meaningless(base, said, [LocalConfig], anew=False))
        problems += [
            f"{name} does not reach arm {arm!r}, which starts that block anew; say which arms it is for: "
            f"compare.arms.ARM.{name}={value}"
            for name, value in meant.items()
            if any(f"{name}.".startswith(f"{key}.") for key in keys)
            and name in found
            and found[name] != value
            and not _sets(said, name.split("."))
        ]
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} override(s) that only some arms would follow", *problems]))


def _sets(arm: Any, path: Sequence[str]) -> bool:
    if not path:
        return not isinstance(arm, dict)
    return isinstance(arm, dict) and path[0] in arm and _sets(arm[path[0]], path[1:])


def _require_own_folders(compare: CompareConfig, source: str) -> None:
    arms: dict[str, list[str]] = {}
    for arm in compare.arms:
        arms.setdefault(_slug(arm), []).append(arm)
    shared = [
        f"arms {' and '.join(map(repr, names))} would share the folder {slug}-seed{compare.seeds[0]}; rename one"
        for slug, names in arms.items()
        if len(names) > 1
    ]
    repeated = [
        f"compare.seeds holds {seed} {count} times; those runs would share a folder"
        for seed, count in Counter(compare.seeds).items()
        if count > 1
    ]
    taken = {arm: [key for key in overrides if key in _NOT_OF_AN_ARM] for arm, overrides in compare.arms.items()}
    wrong = [
        f"arm {arm!r} sets {', '.join(keys)}: the seeds are compare.seeds, folders and names follow; remove it"
        for arm, keys in taken.items()
        if keys
    ]
    problems = [*shared, *repeated, *wrong]
    if problems:
        raise ConfigError("\n  ".join([f"{source}: {len(problems)} problem(s)", *problems]))


def _slug(arm: str) -> str:
    return re.sub(r"[^\w.-]+", "-", arm)


def run_arms(runs: list[LocalConfig], parallel: int) -> list[Path]:
    """Run every config to its end, `parallel` at a time; finished runs are skipped, killed ones resume.

    Each run starts on the visible GPUs with the fewest runs, and PyTorch holds no more of their memory than its share.
    A limit of time is that of all of them: runs that still wait then are left to the next command.

    Args:
        runs: from `expand_arms`.
        parallel: processes at a time, on all GPUs together.

    Returns:
        The directories of the runs that were started, in order.

    Raises:
        RunsFailedError: runs failed, after the others have finished.
        RunStoppedError: it was interrupted from the keyboard; a `RunToldError` if it was told to end (SIGTERM), and its
            runs ended after a step each.
    """
    running: list[_Running] = []
    try:
        with _terminable():
            late, failed = _run_all(runs, parallel, running)
    except (KeyboardInterrupt, _TerminatedError) as stopped:
        interrupted = isinstance(stopped, KeyboardInterrupt)
        _end(running, interrupted=interrupted)
        stands = [f"{one.config.name}: {where_it_stands(one.config)}" for one in running]
        error = RunStoppedError if interrupted else RunToldError
        raise error("\n  ".join(["interrupted; the same command goes on with", *stands])) from None
    except BaseException:
        _end(running, interrupted=False)
        raise
    if failed:
        raise RunsFailedError("\n".join(failed))
    return [config.run_dir for config in runs if config not in late]


def _run_all(runs: list[LocalConfig], parallel: int, running: list[_Running]) -> tuple[list[LocalConfig], list[str]]:
    """Run all for which there is time; return the others, and what failed."""
    console, pool = Console(markup=False), GpuPool(visible_gpus())
    began, started = time.time(), time.perf_counter()
    late: list[LocalConfig] = []
    waiting, failed, finished, share = list(runs), [], 0, pool.share(runs, parallel)
    while waiting or running:
        while waiting and len(running) < parallel:
            config = waiting.pop(0)
            limit = config.checkpointing.checkpoint_must_save_by
            if limit is not None and time.time() - began >= limit_seconds(limit):
                late.append(config)
                finished += 1
                console.print(f"{config.name} not started, {limit} is over; the same command starts it", soft_wrap=True)
                continue
            gpus = pool.take(config)
            running.append(_Running(config, gpus, _start(config, gpus, share, began)))
            where = f" on GPU {', '.join(gpus)}" if gpus else ""
            console.print(f"{config.name} started{where}, log in {_log(config)}", soft_wrap=True)
        time.sleep(0.5)
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            pool.give_back(one.gpus)
            finished += 1
            code = one.process.returncode
            if code:
                failed.append(_failure(one.config, code))
            elapsed = time.perf_counter() - started
            eta = elapsed / finished * (len(runs) - finished)
            state = "failed" if code else "done" if is_complete(one.config) else where_it_stands(one.config)
            console.print(f"{one.config.name} {state}  {finished}/{len(runs)}  {elapsed:.0f} s, ETA {eta:.0f} s")
    return late, failed


def _start(config: LocalConfig, gpus: list[str], share: float, began: float) -> subprocess.Popen[bytes]:
    make_folder(config.run_dir, "a run's folder")
    path = config.run_dir / ARM_FILE
    write_yaml(path, literal(config.model_dump(mode="json", exclude={"compare"})))
    environment = os.environ | {"OMP_NUM_THREADS": str(config.num_threads or 1), STARTED: str(began)}
    if gpus:
        # The command may have no more than a share itself.
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), SHARE: str(share * own_share())}
    with _log(config).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "qarl_nemo.cli", "train", str(path)], stdout=log, stderr=log, env=environment
        )


def _end(running: list[_Running], *, interrupted: bool) -> None:
    # Ctrl-C in a terminal has reached the runs, too, and a run that it does not end hangs. A signal sent to this
    # process only has not; told of it, a run finishes its step.
    deadline = time.monotonic() + (_PATIENCE_S if interrupted else 0.0)
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))
        if interrupted:
            one.process.kill()
        else:
            one.process.terminate()
    for one in running:
        one.process.wait()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Raise `_TerminatedError` where SIGTERM would end this process alone, whose runs would go on without it."""

    def stop(*_: object) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log(config: LocalConfig) -> Path:
    return config.run_dir / "log.txt"


def _failure(config: LocalConfig, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    lines = _log(config).read_text(errors="replace").splitlines()
    return "\n    ".join([f"{config.name} {how}; its log, {_log(config)}, ends with", *lines[-_LOG_LINES:]])
