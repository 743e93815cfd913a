"""A list of jobs for GPUs: what each runs and needs; read from YAML, everything wrong with it named at once."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from qarl_nemo.config import ConfigError, read_yaml, validate
from qarl_nemo.config.strict import StrictModel
from qarl_nemo.train.gpu_pool import SHARE

_PLACE = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")
# Those that need not be set: ${X:-default} and the like.
_DEFAULTED = re.compile(r"\$\{[A-Z][A-Z0-9_]*:?[-=+]")
_ASSIGNED = re.compile(r"(?:^|[\s;(])(?:for\s+)?([A-Z][A-Z0-9_]*)(?==|\s+in\s)")


class Job(StrictModel):
    """One command and what it needs of the host."""

    name: str = Field(pattern=r"^[a-z0-9_.]+$", description="names its log, too")
    why: str = Field(min_length=1, description="what is known once it has run")
    run: str = Field(min_length=1, description="for bash, in the repository's root")
    gpus: int = Field(1, ge=1)
    memory_gib: float = Field(gt=0, description="of each of its GPUs")
    host_gib: float = Field(0, ge=0, description="of the host's memory, where it takes so much that it may not fit")
    seconds: float = Field(gt=0, description="as it took the last time, or a guess")
    alone: bool | Literal["host"] = Field(False, description="nothing else on its GPUs or host, so that figures count")
    one_of: str | None = Field(None, description="of the jobs with the same word here one runs at a time")
    each: dict[str, tuple[str | int, ...]] = Field({}, description="a job for each choice of values, {key} in `run`")

    @model_validator(mode="after")
    def _each_is_used(self) -> "Job":
        if unused := [key for key in self.each if f"{{{key}}}" not in self.run]:
            raise ValueError(f"run has no {', '.join(f'{{{key}}}' for key in unused)} for what `each` lists")
        return self

    def expand(self) -> Iterator["Job"]:
        """Yield this job, or, with `each`, one for each choice of its values, the last key's changing fastest."""
        if not self.each:
            yield self
            return
        for values in itertools.product(*self.each.values()):
            run = self.run
            for key, value in zip(self.each, values, strict=True):
                run = run.replace(f"{{{key}}}", str(value))
            words = [re.sub(r"[^a-z0-9]+", "_", str(value).lower()).strip("_") for value in values]
            yield self.model_copy(update={"name": ".".join([self.name, *words]), "run": run, "each": {}})


class JobList(StrictModel):
    """Jobs, the most wanted first."""

    texts: dict[str, str] = Field({}, description="what commands share as {key}; a later one may hold earlier ones")
    jobs: tuple[Job, ...] = Field(min_length=1)

    def expand(self) -> Iterator[Job]:
        """Yield each job with its command written out."""
        for job in self.jobs:
            run = job.run
            for key, text in reversed(self.texts.items()):
                run = run.replace(f"{{{key}}}", text)
            yield from job.model_copy(update={"run": run}).expand()


def read_jobs(path: Path, select: str = "") -> list[Job]:
    """Return the jobs of a list whose names match.

    Returns:
        Them, in the file's order.

    Raises:
        ConfigError: it is no such list, a name stands twice, a command names a text that is none, the pattern is none,
            or nothing matches.
    """
    jobs = list(validate(read_yaml(path), JobList, source=str(path)).expand())
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: two jobs are called {', '.join(twice)}; each needs a name of its own")
    if left_open := {place: job.name for job in jobs for place in _PLACE.findall(job.run)}:
        found = ", ".join(f"{{{place}}} ({name})" for place, name in left_open.items())
        raise ConfigError(f"{path}: nothing says what {found} stands for: add it to `texts`, or to the job's `each`")
    try:
        chosen = [job for job in jobs if re.search(select, job.name)]
    except re.error as error:
        raise ConfigError(f"--select {select!r} is no pattern: {error}") from error
    if not chosen:
        raise ConfigError(f"{path}: no job's name matches {select!r}; there are {', '.join(names)}")
    return chosen


def unset_variables(jobs: list[Job]) -> list[str]:
    """Return the variables that commands read, do not set, and the environment lacks."""
    read: set[str] = set()
    for job in jobs:
        read.update(set(_VARIABLE.findall(_DEFAULTED.sub("", job.run))) - set(_ASSIGNED.findall(job.run)))
    # What a command finds set: the environment and bash's own, some of them after its first word.
    found = subprocess.run(["bash", "-c", "true; compgen -v"], capture_output=True, text=True, check=True).stdout
    return sorted(read - set(found.split()) - {"CUDA_VISIBLE_DEVICES", SHARE})
