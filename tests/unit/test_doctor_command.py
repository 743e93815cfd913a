"""What `qarl doctor` says without a model, and which options it then refuses."""

import pytest
import torch

from qarl_nemo import installation
from qarl_nemo.measure import doctor


def test_it_says_what_the_machine_can_run(qarl):
    code, printed = qarl("doctor")
    assert code == 0, printed
    assert "Python >= 3.11" in printed


def test_a_megatron_learner_needs_a_gpu_beside_its_package(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda _: "1.0")
    for gpus, usable, reason in (
        (True, True, "megatron-core 1.0"),
        (False, False, "megatron-core 1.0; it computes on GPUs, and torch sees none"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        (found,) = (finding for finding in doctor._engines() if finding.capability == "Megatron learner")
        assert (found.usable, found.reason) == (usable, reason)


@pytest.mark.parametrize("newest", [(3, 0), (99, 0)])
def test_nemo_rl_needs_a_python_that_can_read_its_configs(newest, tmp_path, monkeypatch):
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installation, "NEMO_RL_PYTHON", newest)
    found = doctor._nemo_rl()
    assert found.usable == (newest == (3, 0))
    assert found.reason.startswith("nemo_rl found" if found.usable else "NeMo-RL needs Python 99.0 or newer, this is 3")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--format", "w4a16"], "--format"),
        (["--repeats", "3", "--batch-size", "32"], "--batch-size, --repeats"),
    ],
)
def test_options_of_a_measurement_need_a_model(options, named, qarl):
    code, printed = qarl("doctor", *options)
    assert code == 2
    assert f"only --rollout has these options: {named}; name its model, or leave them out" in " ".join(printed.split())


def test_places_are_refused_with_the_rest_before_an_engine_starts(tmp_path, qarl):
    file = tmp_path / "file"
    file.touch()
    for output, record, said in (
        (file, file, (f"--output {file} is a file; name a folder", f"{file}: expected a JSON list of results")),
        (file / "a", file / "b.json", (f"{file / 'a'} cannot be made: {file}", f"{file / 'b.json'} cannot be made")),
    ):
        options = ["--rollout", tmp_path, "--repeats", 0, "--output", output, "--record", record]
        code, printed = qarl("doctor", *options)
        assert code == 2
        for text in (*said, "repeats=0 must be at least 1"):
            assert text in printed, printed
