"""Example configs and install commands, from a checkout and from a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qarl_nemo.cli.configs import configs
from qarl_nemo.config import load_config
from qarl_nemo.installation import find_config, pip_command, shipped_configs, vllm_command
from qarl_nemo.train.config import LocalConfig

ROOT = Path(__file__).parents[2]


def test_a_checkout_runs_its_own_examples_by_name(tmp_path, monkeypatch):
    assert find_config(ROOT / "examples/configs/local_demo.yaml") == ROOT / "examples/configs/local_demo.yaml"
    monkeypatch.chdir(tmp_path)
    demo = ROOT / "examples/configs/local_demo.yaml"
    for name in ("demo", "local_demo", "local_demo.yaml", "examples/configs/local_demo.yaml"):
        assert find_config(Path(name)) == demo
    (tmp_path / "demo").mkdir()
    assert find_config(Path("demo")) == demo, "a folder of data may be called as a config"
    (tmp_path / "demo").rmdir()
    (tmp_path / "demo").write_text("mine")
    assert find_config(Path("demo")) == Path("demo"), "a file comes first"
    assert pip_command("vllm") == "pip install -e '.[vllm]'"
    assert vllm_command() == "pip install -e '.[vllm]', in an environment of its own"


@pytest.mark.parametrize("given", ["demmo", "elsewhere/demo.yaml"])
def test_an_unknown_config_is_answered_with_the_nearest_and_the_list(given):
    with pytest.raises(ValueError, match=rf"no config file {given}.*did you mean 'demo'\? `qarl configs` lists"):
        find_config(Path(given))


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(ValueError, match="is a folder, and no config; `qarl configs` lists"):
        find_config(tmp_path)


def test_configs_are_listed_with_their_first_line_and_printed(capsys):
    with pytest.raises(SystemExit):
        configs()
    listed = capsys.readouterr().out
    for name, path in shipped_configs().items():
        first = path.read_text().splitlines()[0]
        assert first.startswith("# "), f"{name} says what it is in its first line"
        assert first.endswith((".", "?")), f"{name}: the first line is a whole sentence, as it is listed by itself"
        assert f"  {name} " in listed
    with pytest.raises(SystemExit):
        configs("demo")
    assert capsys.readouterr().out == (ROOT / "examples/configs/local_demo.yaml").read_text()


def test_a_wheel_holds_the_configs_and_names_itself_in_hints(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("qarl_nemo", "kernels", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = {"check": True, "timeout": 300, "capture_output": True, "text": True, "env": environment}
    subprocess.run([sys.executable, "-c", build], cwd=source, **run)
    (wheel,) = (source / "dist").glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shutil.rmtree(source)
    run["env"] = environment | {"PYTHONPATH": str(installed)}
    program = (
        "from qarl_nemo.config import load_config; from qarl_nemo.train.config import LocalConfig\n"
        "from qarl_nemo.installation import find_config, pip_command; from pathlib import Path\n"
        "print(load_config(find_config(Path('objective_gspo')), [], LocalConfig).run.name, pip_command('vllm'))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, **run)
    assert done.stdout == "gspo pip install 'qarl-nemo[vllm]'\n"
    listed = subprocess.run([sys.executable, "-m", "qarl_nemo", "configs"], cwd=tmp_path, **run).stdout
    assert all(f"  {name} " in listed for name in shipped_configs())


def test_a_config_that_is_no_text_is_one_line(qarl, tmp_path):
    (tmp_path / "odd.yaml").write_bytes(b"\xe4\xe4")
    code, said = qarl("configs", tmp_path / "odd.yaml")
    assert (code, "odd.yaml: expected a config, but it is not UTF-8: byte 0xe4 at position 0" in said) == (
        2,
        True,
    )


def test_a_printed_config_can_be_run_from_anywhere(capsys, tmp_path):
    with pytest.raises(SystemExit):
        configs("lora")
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    shipped = shipped_configs()["lora"]
    assert load_config(tmp_path / "mine.yaml", [], LocalConfig) == load_config(shipped, [], LocalConfig)
