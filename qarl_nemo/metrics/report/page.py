"""One self-contained HTML page about one run or several compared: no scripts, no network, figures inline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from qarl_nemo import __version__
from qarl_nemo.files import FileError, read_text, require_file, require_makeable, write_atomic
from qarl_nemo.metrics.nemo_rl_logs import find_config
from qarl_nemo.metrics.report import tables
from qarl_nemo.metrics.report.arms import Arm, group_by_arm, mixed_settings
from qarl_nemo.metrics.report.bands import objective_bands
from qarl_nemo.metrics.report.examples import example_rows
from qarl_nemo.metrics.report.noise import stage_rows
from qarl_nemo.metrics.report.sections import build_sections
from qarl_nemo.metrics.report.style import report_style
from qarl_nemo.metrics.report.timings import phase_table
from qarl_nemo.metrics.report.validation import validation_tables
from qarl_nemo.metrics.runs import CONFIG_FILE, Run, load_runs
from qarl_nemo.metrics.summary import growing_mismatch, summarize_run

_TEMPLATE = "report.html.j2"
# Every report has this mark in its head; a file without it is not ours and is never overwritten.
_MARK, _HEAD_BYTES = b"- QaRL report</title>", 4096


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Write the HTML report of one run, or of several laid over each other by arm.

    A run that was killed, or has just begun, gives a page that says what is missing.

    Args:
        run_dirs: run directories, or folders of comparisons; those of one arm with different seeds are drawn as mean
            and range.
        output: HTML file to write; its folder is created.

    Returns:
        `output`.

    Raises:
        ValueError: directories that are not runs, all named with what was looked for; a broken file in one; or
            `output` exists and is not a report.
    """
    # The page's usual place is in the run's folder: of a path that is no run, say that first.
    runs = load_runs([Path(path) for path in run_dirs])
    _require_report_or_nothing(output)
    arms = group_by_arm(runs)
    with report_style():
        sections = build_sections(arms)
    context = {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs, {len(arms)} arm{'s' * (len(arms) > 1)}",
        "version": __version__,
        "runs": runs,
        "arms": arms,
        "sections": sections,
        "notices": [*_arm_notices(arms), *_notices(runs)],
        "cards": tables.headline(runs[0]) if len(runs) == 1 else [],
        "arm_rows": tables.arm_rows(arms),
        "seeds": tables.seed_table(arms),
        "differences": tables.config_differences(arms),
        "validations": validation_tables(arms),
        "noise_stages": stage_rows(arms),
        "phases": phase_table(runs),
        "modules": tables.module_tables(arms),
        "examples": example_rows(arms),
        "configs": [{"run": run, "text": _config_text(run)} for run in runs],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    # JSON can hold lone surrogates, which UTF-8 cannot encode.
    write_atomic(output, _environment().get_template(_TEMPLATE).render(context).encode(errors="replace"))
    return output


def _require_report_or_nothing(output: Path) -> None:
    require_makeable(output)
    if not output.exists():
        return
    require_file(output, "a report to replace")
    with output.open("rb") as file:
        if _MARK not in file.read(_HEAD_BYTES):
            raise FileError(f"{output} exists and is no report, so it stays as it is; name another file with --output")


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _arm_notices(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    notices = []
    for arm in arms:
        problems, ends = [], sorted({int(run.steps[-1]) if len(run.steps) else 0 for run in arm.runs})
        if keys := mixed_settings(arm.runs):
            problems.append(f"its {len(arm.runs)} runs are averaged, and differ in {', '.join(keys)}")
        if len(ends) > 1:
            where = f"its runs end at steps {', '.join(map(str, ends))}"
            problems.append(f"{where}: final values average these, and later points are those of fewer runs")
        if problems:
            notices.append({"run": arm.name, "problems": problems})
    return notices


def _notices(runs: Sequence[Run]) -> list[dict[str, Any]]:
    notices = []
    for run in runs:
        problems = list(run.missing)
        if run.config and objective_bands(run.config.get("loss_fn")) is None:
            problems.append(f"{CONFIG_FILE}: loss_fn is not an objective this version knows, so no band lines")
        if grown := growing_mismatch(run):
            problems.append(
                f"mismatch/kl_k3: grew from {grown[0]:.2g} to {grown[1]:.2g} nats, "
                "the learner moves away from its engine; "
                "look whether the gradient's norm rises as well, and stop before rewards fall or align the learner"
            )
        skipped = round(summarize_run(run)["skipped_steps"])
        if skipped:
            updates = "1 update" if skipped == 1 else f"{skipped} updates"
            problems.append(f"optim/skipped_steps: {updates} skipped, whose causes the log names")
        if problems:
            notices.append({"run": run.name, "problems": problems})
    return notices


def _config_text(run: Run) -> str:
    path = find_config(run.path) or run.path / CONFIG_FILE
    return read_text(path, "a run's config") if path.exists() else ""
