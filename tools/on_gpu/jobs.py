"""A list of jobs for GPUs: what each runs and needs; read from YAML, everything wrong with it named at once."""

import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from qarl_nemo.config import ConfigError, read_yaml, validate
from qarl_nemo.config.strict import StrictModel

_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")


class Job(StrictModel):
    """One command and what it needs of the host."""

    name: str = Field(pattern=r"[a-z0-9_.]+", description="names its log, too")
    why: str = Field(min_length=1, description="what is known once it has run")
    run: str = Field(min_length=1, description="for bash, in the repository's root")
    gpus: int = Field(1, ge=1)
    memory_gib: float = Field(gt=0, description="of each of its GPUs")
    seconds: float = Field(gt=0, description="as it took the last time, or a guess")
    alone: bool | Literal["host"] = Field(False, description="nothing else on its GPUs or host, so that figures count")
    one_of: str | None = Field(None, description="of the jobs with the same word here one runs at a time")


class JobList(StrictModel):
    """Jobs, the most wanted first."""

    jobs: tuple[Job, ...] = Field(min_length=1)


def read_jobs(path: Path, select: str = "") -> list[Job]:
    """Return the jobs of a list whose names match.

    Returns:
        Them, in the file's order.

    Raises:
        ConfigError: it is no such list, a name stands twice, the pattern is none, or nothing matches.
    """
    jobs = validate(read_yaml(path), JobList, source=str(path)).jobs
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: two jobs are called {', '.join(twice)}; each needs a name of its own")
    try:
        chosen = [job for job in jobs if re.search(select, job.name)]
    except re.error as error:
        raise ConfigError(f"--select {select!r} is no pattern: {error}") from error
    if not chosen:
        raise ConfigError(f"{path}: no job's name matches {select!r}; there are {', '.join(names)}")
    return chosen


def unset_variables(jobs: list[Job]) -> list[str]:
    """Return the variables that commands read and the environment lacks."""
    read = {name for job in jobs for name in _VARIABLE.findall(job.run)}
    return sorted(read - set(os.environ) - {"CUDA_VISIBLE_DEVICES"})
