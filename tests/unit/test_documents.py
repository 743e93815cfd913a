"""What documents name exists, and the commands they give can be given."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from qarl_nemo.cli import app
from support.documents import commands, named_commands

ROOT = Path(__file__).parents[2]
FOLDERS = ("docker", "docs", "examples", "kernels", "qarl_nemo", "tests", "tools")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
QARL = typer.main.get_command(app)
# What typer raises for a command line it cannot read; it has a click of its own.
UNREADABLE = typer.BadParameter.__mro__[1]
# A path in the repository, alone or as an option's or an override's value.
IN_REPOSITORY = re.compile(r"(?:^|=)((?:docker|docs|examples|kernels|tests|tools)/[\w./-]+)$")


def unreadable(arguments: list[str], whole: bool) -> list[str]:
    if not whole and arguments[0].startswith("-"):
        return []
    try:
        QARL.commands[arguments[0]].make_context(arguments[0], arguments[1:]).close()
    except (UNREADABLE, KeyError) as error:
        kind = type(error).__name__
        if whole or kind in ("NoSuchOption", "KeyError"):
            return [f"{kind}: {error}"]
    return []


def problems(command: list[str], whole: bool = True) -> list[str]:
    program, arguments = Path(command[0]).name, command[1:]
    paths = [match[1] for word in command if (match := IN_REPOSITORY.search(word))]
    found = [f"{path} is not there" for path in paths if not (ROOT / path).exists()]
    if program == "make":
        found += [f"make has no {word}" for word in arguments if "=" not in word and word not in TARGETS]
    elif program == "qarl":
        found += unreadable(arguments, whole)
    elif scripts := [path for path in paths if path.endswith(".py") and not path.startswith("tests/")]:
        source = (ROOT / scripts[0]).read_text() if not found else ""
        options = {word.split("=")[0] for word in command if word.startswith("--")} - {"--nproc-per-node", "--config"}
        found += [f"{scripts[0]} does not know {option}" for option in sorted(options) if option not in source]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_documents_name_what_is_there(page):
    assert [(shlex.join(words), problem) for words in commands(page) for problem in problems(words)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_name_what_is_there(page):
    named = named_commands(page)
    assert [(shlex.join(words), problem) for words in named for problem in problems(words, whole=False)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_blocks_that_are_read(page):
    """A block that is only indented, or fenced as nothing, would be shown and never held against the code."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL)
    unread = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    unread += "".join(block for kind, block in blocks if kind not in ("bash", "console"))
    assert re.findall(r"^ *(?:python|qarl|vllm serve) \S.*", unread, re.MULTILINE) == []


@pytest.mark.parametrize("command", ["qarl quantise", "qarl quantize --bits", "make tests", "python tools/nothing.py"])
def test_a_name_in_a_sentence_that_is_not_there_is_found(command):
    assert problems(command.split(), whole=False)
    assert problems(["qarl", "quantize", "--format", "w4a16"], whole=False) == []


@pytest.mark.parametrize("command", [
    "make tests", "qarl train", "qarl quantise a b", "qarl quantize a b --bits 4", "python tools/nothing.py",
    "python examples/run_qarl_grpo.py --config examples/configs/none.yaml", "python tools/small_model.py --fast",
])  # fmt: skip
def test_a_command_that_cannot_be_given_is_found(command):
    assert problems(command.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_documents_name_are_there(page):
    named = re.findall(r"`((?:docker|examples|kernels|qarl_nemo|tests|tools)/[\w./-]+\.\w+)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_examples_in_python_import_is_there(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for module, names in re.findall(r"^from (qarl_\S+) import (.+)$", block, re.MULTILINE):
            imported = importlib.import_module(module)
            assert [name for name in names.split(", ") if not hasattr(imported, name)] == [], module


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
