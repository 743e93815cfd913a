"""Measures rollout speed and memory of each format on this machine: a vLLM engine with dummy weights for each."""

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qarl_formats import BASELINE, QuantFormat, get_format
from qarl_nemo.checkpoints import model_quantization_config
from qarl_nemo.files import read_json, write_atomic
from qarl_nemo.measure.kept import keep_others
from qarl_nemo.measure.speed.settings import SETTLE_TOKENS, SpeedJob
from qarl_nemo.refit.engine_methods import ChosenMethod, method_problems
from qarl_nemo.refit.engine_settings import kernel_options, serving_options

_SCRIPT = Path(__file__).with_name("vllm_speed.py")
_EVENT = "QARL "
_CPU_OPTIONS = {"enforce_eager": True, "distributed_executor_backend": "uni"}
_ERROR = re.compile(r"\b(\w*(?:Error|Exception|Interrupt)): (.+)")
_CONSEQUENCE = "Engine core initialization failed"
_SECONDS_TO_STOP = 60


@dataclass(slots=True)
class FormatSpeed:
    """The measurements of one format.

    Attributes:
        name: the format.
        reason: why it is not served here; None if it is.
        engine: version, weights_gib, kv_cache_tokens, peak_gib, busiest_expert.
        batches: batch size -> reason why it was not measured, or decode_tokens_s and prefill_tokens_s of each repeat.
    """

    name: str
    reason: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    batches: dict[int, dict[str, Any]] = field(default_factory=dict)


def measure_speed(job: SpeedJob, folder: Path, show: Callable[[str, int], None]) -> list[FormatSpeed]:
    """Measure every format and save each result in `folder`; a later call with the same settings resumes from there.

    Args:
        job: what to measure.
        folder: gets `<format>.json` and the engine's `<format>.log`; created if missing.
        show: called with what was just done and how many of the job's `num_steps` that was.

    Returns:
        One record for each format of the settings, bf16 first; those that are not served have a reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for fmt in job.formats:
        speed = _read(folder, job, fmt)
        missing = [size for size in job.settings.batch_sizes if size not in speed.batches]
        show(f"{fmt.name}: {'starting vLLM' if missing else 'measured before'}", 1 + _num_done(job, speed))
        if missing:
            for size in _measure(job, fmt, missing, speed, folder):
                show(f"{fmt.name}, batch {size}: {_summary(speed.batches[size])}", 1)
        if speed.reason:
            show(f"{fmt.name} ended: {speed.reason}", len(job.settings.batch_sizes) - _num_done(job, speed))
        found.append(_settled(job, speed))
    refused = [FormatSpeed(name, reason) for name, reason in job.refused.items()]
    return found + refused


def num_steps(job: SpeedJob) -> int:
    """Return how many steps `measure_speed` shows: a start and every batch size, for each format."""
    return len(job.formats) * (1 + len(job.settings.batch_sizes))


def _summary(batch: dict[str, Any]) -> str:
    return batch.get("reason") or f"{statistics.median(batch['decode_tokens_s']):,.0f} tokens/s"


def _settled(job: SpeedJob, speed: FormatSpeed) -> FormatSpeed:
    """Keep the requested batch sizes; an engine that failed after the first one did serve the format."""
    sizes = job.settings.batch_sizes
    batches = {size: speed.batches.get(size, {"reason": speed.reason}) for size in sizes}
    return FormatSpeed(speed.name, None if speed.batches else speed.reason, speed.engine, batches)


def _num_done(job: SpeedJob, speed: FormatSpeed) -> int:
    return sum(size in speed.batches for size in job.settings.batch_sizes)


def _measure(job: SpeedJob, fmt: QuantFormat, sizes: list[int], speed: FormatSpeed, folder: Path) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="qarl-speed-") as name:
        request = Path(name) / "request.json"
        request.write_text(json.dumps(engine_request(job, fmt, sizes, Path(name))), encoding="utf-8")
        for event in _events(request, folder / f"{fmt.name}.log", speed):
            kind, size = event.pop("event"), event.pop("batch_size", None)
            if kind == "started" and (problems := _method_problems(event.pop("methods"), fmt, job)):
                speed.reason = f"vLLM chose other methods than the format's: {'; '.join(problems)}"
                break
            if kind == "batch":
                speed.batches[size] = event
            else:
                speed.engine = _of_both(speed.engine, event)
            _write(folder, job, fmt, speed)
            if kind == "batch":
                yield size


def _of_both(earlier: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """Add an engine's facts to those of an earlier one, which measured other batch sizes."""
    known = earlier | event
    # One engine for all sizes would have had the lesser room and the higher peak.
    for key, choose in (("kv_cache_tokens", min), ("peak_gib", max)):
        found = [facts[key] for facts in (earlier, event) if facts.get(key) is not None]
        known |= {key: choose(found)} if found else {}
    return known


def engine_request(job: SpeedJob, fmt: QuantFormat, sizes: list[int], folder: Path) -> dict[str, Any]:
    """Return what `vllm_speed` is asked, and write the model's config.json that it names.

    Args:
        job: a checked measurement.
        fmt: the format that is served.
        sizes: batch sizes.
        folder: an existing folder for config.json.
    """
    settings = job.settings
    names = (name for name, _ in job.model.architecture.parameters())
    quantization = model_quantization_config(fmt, names, settings.targets)
    config = job.model.config | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options: dict[str, Any] = {"dtype": "bfloat16"}
    if job.device == "cpu":
        options |= _CPU_OPTIONS
    else:
        options |= {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "enable_expert_parallel": settings.enable_expert_parallel,
            # With graphs for exactly the measured sizes and no compilation, an engine starts within a minute.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted(sizes),
            },
        }
        if "experts" not in settings.targets and "num_experts" in job.model.config:
            # Experts that stay BF16 run on the kernel of the baseline.
            options |= kernel_options(get_format(BASELINE), ["experts"])
        options |= serving_options(fmt, settings.targets)
    return {
        "model": str(folder),
        "device": job.device,
        "batch_sizes": sizes,
        "prompt_tokens": settings.prompt_tokens,
        "settle_tokens": SETTLE_TOKENS,
        "new_tokens": settings.new_tokens,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "options": options,
    }


def _events(request: Path, log: Path, speed: FormatSpeed) -> Iterator[dict[str, Any]]:
    """Yield what the engine's process prints; if it fails, its last error becomes the reason."""
    command = [sys.executable, "-P", str(_SCRIPT), str(request)]
    lines: deque[str] = deque(maxlen=400)
    with (
        log.open("w", encoding="utf-8") as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(_EVENT):
                    yield json.loads(line.removeprefix(_EVENT))
                else:
                    lines.append(line)
                    kept.write(line)
                    kept.flush()
            if process.wait():
                speed.reason = _last_error(lines) or f"vLLM ended with status {process.returncode}, see {log}"
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        # Like Ctrl-C, on which vLLM ends its own processes; otherwise they would keep the GPU's memory.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()


def _last_error(lines: deque[str]) -> str | None:
    errors = [match for line in lines if "WARNING" not in line for match in _ERROR.finditer(line)]
    causes = [match for match in errors if _CONSEQUENCE not in match[2]]
    return f"{causes[-1][1]}: {causes[-1][2].strip()}" if causes else None


def _method_problems(methods: dict[str, str], fmt: QuantFormat, job: SpeedJob) -> list[str]:
    chosen = [ChosenMethod(layer, method, job.device.upper()) for layer, method in methods.items()]
    problems = method_problems(chosen, fmt, job.settings.targets)
    return list(dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", problem) for problem in problems))


def _write(folder: Path, job: SpeedJob, fmt: QuantFormat, speed: FormatSpeed) -> None:
    content = {"settings": job.identity(fmt), "engine": speed.engine, "batches": speed.batches}
    write_atomic(folder / f"{fmt.name}.json", json.dumps(content, indent=1) + "\n")


def _read(folder: Path, job: SpeedJob, fmt: QuantFormat) -> FormatSpeed:
    path = folder / f"{fmt.name}.json"
    if not path.is_file():
        return FormatSpeed(fmt.name)
    content = read_json(path, "an earlier measurement")
    if content.get("settings") != json.loads(json.dumps(job.identity(fmt))):
        keep_others(path, job.identity(fmt), ".log")
        return FormatSpeed(fmt.name)
    batches = {int(size): row for size, row in content["batches"].items() if "reason" not in row}
    return FormatSpeed(fmt.name, engine=content["engine"], batches=batches)
