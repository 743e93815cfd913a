"""`train` on damaged configs, data and run folders, and `report` on damaged run folders.

Oracle of `train`. Success is right if the config that the run says it had holds every value that the damaged config and
the overrides say (nothing is dropped or rewritten), every line of the data has a problem and an answer, and the metrics
are those steps, finite, with rewards of 0 to 1. A run that was continued must end with the weights and, from where it
was continued, the records of one that was not; what earlier records say is free, as long as they are numbers of these
steps.

Oracle of `report`. Success is right if the page is there and every damaged file still is what it should be: metrics of
ascending steps and numbers, a config that is a mapping, arrays of numbers; numbers and texts in them are free. What a
file lacks must be said on the page.

Nothing is left behind if a refused call changed no file that it was given and, in a run folder it made, the repaired
inputs give what undamaged ones give.
"""

import contextlib
import hashlib
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from commands import Command, Run
from edits import Edit
from inputs import write_run
from trees import draw_override

from qarl_nemo.data.config import DatasetConfig

_CLOCKS = ("time_s", "timing/", "throughput/", "memory/")
_REPORTS = ("report.html", "summary.png")


class _Train(Command):
    preload = ("qarl_nemo.train.trainer", "qarl_nemo.metrics.report", "transformers.models.qwen3_moe")

    def prepare(self) -> None:
        """Write config and data."""
        write_run(self.base)

    def arguments(self, folder: Path) -> list[str]:
        """Return the call; paths in the config are relative to where it is started."""
        return ["train", "run.yaml"]

    def learn(self, run: Run) -> None:
        code, output = run(self.arguments(self.base), self.base)
        assert code == 0, output
        expected = self.base.with_name(f"{self.name}-expected")
        os.replace(self.base / "run", expected)
        self._records = _records(expected)
        self._weights = _newest_weights(expected)

    def works_on(self, folder: Path) -> bool:
        """Look for finished steps: a config without `max_num_steps` asks for hundreds."""
        metrics = folder / "run" / "metrics.jsonl"
        return metrics.is_file() and metrics.read_text().count("\n") > 1

    def wrongly_accepted(self, folder: Path, edits: Sequence[Edit]) -> str | None:
        """Judge a success as the module says."""
        run_dir = folder / _run_dir(folder, edits)
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        problem = _lost_setting(folder, edits, config) or _data_problem(folder, config)
        if problem:
            return problem
        records = _records(run_dir)
        if [record["step"] for record in records] != list(range(1, config["grpo"]["max_num_steps"] + 1)):
            return f"metrics of steps {[record['step'] for record in records]}"
        # A record that was written before may have lost its reward; it is kept as it is.
        if not all(0 <= record.get("reward/mean", 0) <= 1 for record in records):
            return "rewards outside of 0 and 1"
        return self._continued_problem(folder, edits, records)

    def _continued_problem(self, folder: Path, edits: Sequence[Edit], records: list[dict[str, Any]]) -> str | None:
        return None

    def left_behind(self, folder: Path, run: Run) -> str | None:
        """Repair what was damaged and run again, if the refused call left a run folder with results."""
        if not (folder / "run" / "checkpoints").exists() and not (folder / "run" / "metrics.jsonl").exists():
            return None
        for path in self.base.iterdir():
            if path.is_file():
                (folder / path.name).unlink(missing_ok=True)
                (folder / path.name).write_bytes(path.read_bytes())
        code, output = run(self.arguments(folder), folder)
        if code == 2 and "Differing keys" in output:
            return None
        if code != 0:
            return f"the repaired inputs end with {code}: {output[-300:]}"
        same = _newest_weights(folder / "run") == self._weights and _records(folder / "run") == self._records
        return None if same else "the repaired inputs give another run than undamaged ones"


class TrainAnew(_Train):
    """`qarl train` of a new run, with damaged config, data or overrides."""

    name, share = "train", 0.1

    def places(self) -> Mapping[str, float]:
        """Return config and data."""
        return {"run.yaml": 5.0, "train.jsonl": 2.5, "validation.jsonl": 1.0}

    def draw(self, rng: random.Random) -> list[Edit]:
        """Draw overrides in a third of all cases."""
        if rng.random() < 0.67:
            return super().draw(rng)
        tree = yaml.safe_load((self.base / "run.yaml").read_text())
        texts = tuple(draw_override(rng, tree) for _ in range(rng.choice((1, 1, 2))))
        return [Edit("arguments", text[:80], arguments=(text,)) for text in texts]


class TrainOn(_Train):
    """`qarl train` of a run that was stopped after its first step, with a damaged run folder."""

    name, share = "train again", 0.07

    def learn(self, run: Run) -> None:
        """Keep the whole run, and stop another after its first step."""
        super().learn(run)
        code, output = run([*self.arguments(self.base), "grpo.max_num_steps=1"], self.base)
        assert code == 0, output

    def places(self) -> Mapping[str, float]:
        """Return what a run is continued from."""
        weights = {"config.yaml": 2.0, "metrics.jsonl": 2.0, "quantized.json": 0.3}
        step = "checkpoints/step_000001"
        found = [path for path in sorted((self.base / "run" / step).rglob("*")) if path.is_file()]
        names = [str(path.relative_to(self.base / "run")) for path in found]
        return {f"run/{name}": weight for name, weight in (weights | dict.fromkeys(names, 8.0 / len(names))).items()}

    def _continued_problem(self, folder: Path, edits: Sequence[Edit], records: list[dict[str, Any]]) -> str | None:
        if _newest_weights(folder / "run") != self._weights:
            return "the weights are not those of a run that was not stopped"
        if records[1:] != self._records[1:]:
            return "the records are not those of a run that was not stopped"
        if records[0].keys() != self._records[0].keys() and not any("metrics" in edit.place for edit in edits):
            return "an earlier record has changed"
        return None

    def left_behind(self, folder: Path, run: Run) -> str | None:
        """Put the damaged files back, and continue the run."""
        before, after = _tree(self.base / "run"), _tree(folder / "run")
        if set(after) <= set(before) and sum(before[name] != after.get(name) for name in before) <= 2:
            return None
        for name in before:
            path = folder / "run" / name
            if after.get(name) != before[name] and not name.startswith("tensorboard"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.write_bytes((self.base / "run" / name).read_bytes())
        return super().left_behind(folder, run)


class Report(Command):
    """`qarl report` of a finished run."""

    name, share = "report", 0.08
    preload = ("qarl_nemo.metrics.report",)

    def prepare(self) -> None:
        """Write config and data; the run follows in `learn`."""
        write_run(self.base)

    def learn(self, run: Run) -> None:
        """Train the run that is reported."""
        code, output = run(["train", "run.yaml"], self.base)
        assert code == 0, output
        for name in _REPORTS:
            (self.base / "run" / name).unlink()

    def places(self) -> Mapping[str, float]:
        """Return what the report reads."""
        weights = {"config.yaml": 3.0, "metrics.jsonl": 4.0, "quantized.json": 2.0}
        steps = sorted((self.base / "run" / "diagnostics").iterdir())
        weights |= {f"diagnostics/{path.name}": 1.5 for path in steps}
        return {f"run/{name}": weight for name, weight in weights.items() if (self.base / "run" / name).exists()}

    def arguments(self, folder: Path) -> list[str]:
        """Return the call."""
        return ["report", str(folder / "run")]

    def wrongly_accepted(self, folder: Path, edits: Sequence[Edit]) -> str | None:
        """Judge a success as the module says."""
        page = (folder / "run" / "report.html").read_text()
        if not page.rstrip().endswith("</html>"):
            return "the page is not whole"
        if not (folder / "run" / "metrics.jsonl").is_file():
            # Nothing else of such a run is read.
            return None if "metrics.jsonl" in page else "the page does not say that there are no metrics"
        for edit in edits:
            path = folder / edit.place
            problem = None if not path.is_file() else _file_problem(path)
            if problem and path.name not in page:
                return f"{edit.place} {problem}, and the page does not say so"
        return None

    def left_behind(self, folder: Path, run: Run) -> str | None:
        """Look for a page."""
        return "a report was written" if any((folder / "run" / name).exists() for name in _REPORTS) else None


def _run_dir(folder: Path, edits: Sequence[Edit]) -> str:
    """Return the run's folder; any text but an empty one is the name of one."""
    said = [text.partition("=")[2] for edit in edits for text in edit.arguments if text.startswith("run_dir=")]
    return said[-1] if said else str(yaml.safe_load((folder / "run.yaml").read_text())["run_dir"])


def _records(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(_CLOCKS)} for line in lines]


def _newest_weights(run_dir: Path) -> str:
    newest = max((run_dir / "checkpoints").glob("step_*"))
    return hashlib.sha256((newest / "model" / "model.safetensors").read_bytes()).hexdigest()


def _tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def _lost_setting(folder: Path, edits: Sequence[Edit], resolved: dict[str, Any]) -> str | None:
    """Say which value of the damaged YAML the run does not have; overrides are compared with it one by one."""
    given = _leaves(yaml.safe_load((folder / "run.yaml").read_text()) or {}, "")
    for edit in edits:
        for text in edit.arguments:
            key, _, value = text.partition("=")
            given = {name: old for name, old in given.items() if not (name + ".").startswith(key + ".")}
            with contextlib.suppress(yaml.YAMLError):
                given |= _leaves(yaml.safe_load(value), key)
    found = _leaves(resolved, "")
    # Text for a key that holds text is not read as YAML.
    overrides = dict(text.partition("=")[::2] for edit in edits for text in edit.arguments)
    for name, value in given.items():
        key = next((key for key in overrides if f"{name}.".startswith(f"{key}.")), "")
        if key and found.get(key) == overrides[key]:
            continue
        if name.endswith("_override_") or name.startswith(("defaults", "compare")) or "${" in str(value):
            continue
        if name not in found:
            if not any(key.startswith(name) for key in found) or value not in (None, {}, []):
                return f"{name}={value!r} was accepted and is not in the run's config"
        elif not _same_value(found[name], value):
            return f"{name}={value!r} was accepted as {found[name]!r}"
    return None


def _leaves(tree: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        name: leaf
        for key, value in tree.items()
        for name, leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _same_value(found: Any, given: Any) -> bool:
    if isinstance(found, list) and isinstance(given, str | int | float):
        # Lists may be written as text with commas.
        return ",".join(map(str, found)).replace(" ", "") == str(given).replace(" ", "")
    if isinstance(found, list) and isinstance(given, list):
        return len(found) == len(given) and all(map(_same_value, found, given))
    if isinstance(found, dict) and isinstance(given, dict):
        return all(key in found and _same_value(found[key], value) for key, value in given.items())
    try:
        return found == given or math.isclose(float(found), float(given))
    except (TypeError, ValueError):
        return str(found) == str(given)


def _data_problem(folder: Path, config: dict[str, Any]) -> str | None:
    of_key = [config["data"].get(key) or [] for key in ("train", "validation")]
    for dataset in [one for found in of_key for one in (found if isinstance(found, list) else [found])]:
        name = dataset.get("data_path")
        if not name or dataset != DatasetConfig(data_path=name).model_dump(mode="json"):
            continue
        for number, line in enumerate((folder / name).read_text("utf-8").splitlines()):
            record = json.loads(line) if line.strip() else {"problem": "", "answer": ""}
            answer = record["answer"]
            if not isinstance(record["problem"], str) or isinstance(answer, bool | None | list | dict):
                return f"{name}, line {number + 1} has no problem and answer, and was accepted"
    return None


def _file_problem(path: Path) -> str | None:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                wrong = [name for name in arrays if arrays[name].dtype.kind not in "bfiu" or arrays[name].ndim != 1]
            return f"has arrays {wrong} that are no columns of numbers" if wrong else None
        text = path.read_text("utf-8")
        if path.suffix == ".yaml":
            return None if isinstance(yaml.safe_load(text), dict) else "is no mapping"
        if path.suffix == ".json":
            rows = json.loads(text)
            whole = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
            return None if whole else "is no list of objects"
        lines = text.splitlines(keepends=True)
        lines = lines[:-1] if lines and not lines[-1].endswith("\n") else lines
        records = [json.loads(line) for line in lines]
        if path.name == "metrics.jsonl":
            steps = [record["step"] for record in records]
            if any(isinstance(step, bool) or not isinstance(step, int) for step in steps) or steps != sorted(
                set(steps)
            ):
                return f"has steps {steps}"
            values = [value for record in records for value in record.values()]
            wrong = [value for value in values if value is not None and not isinstance(value, int | float)]
            return f"has values {wrong[:3]} that are no numbers" if wrong else None
        return None if all(isinstance(record, dict) for record in records) else "has lines that are no objects"
    except (ValueError, KeyError, TypeError, OSError, yaml.YAMLError, RecursionError) as error:
        return f"cannot be read ({type(error).__name__})"
