"""Environment variables that look like secrets: found in configs and commands, and hidden where those are shown."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
# NeMo-RL's key for the variables that it sets in its workers.
_VARIABLES = "env_vars"
_SECRET = r"(?:[A-Z0-9]+_)*(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_[A-Z0-9]+)*"
# Keys of a config that hold secrets. A lower-case key with another name, as stop_token_ids or input_key, holds none.
_SECRET_KEY = (
    r"(?:\w+_)?(?:api_?key|(?:access|secret|private|wandb)_key|secret|password|passwd|credentials?)"
    r"|(?:(?:access|api|auth|bearer|github|gitlab|hf|hub|huggingface|wandb)_)?token"
)
# Variables that end like this say where a secret is stored, and are no secrets.
_PLACES = ("_FILE", "_PATH", "_DIR", "_HOME")
# Any but a reference to another variable.
_VALUE = r"(?![\"']?\$)[\"']?[^\s\"']"
# NAME=value as in a shell or an override, and NAME: value in braces; /x/token:/token is a volume.
_ASSIGNED = re.compile(rf"(?<![A-Z0-9_])({_SECRET})={_VALUE}", re.IGNORECASE)
_IN_BRACES = re.compile(rf"[{{,]\s*[\"']?({_SECRET})[\"']?\s*:\s*{_VALUE}", re.IGNORECASE)
_OPTION = r"(?<![\w.-])(--?(?!no[-_])[a-z][\w.-]*)"
# The option whose name goes on to the end of a text.
_OPTION_BEGUN = re.compile(r"(?<![\w.-])--?[\w.-]*$")
# What stands between an option and its word: space, a line that goes on, or the comma of a list.
_GAP = r"[\"']?(?:\s|,|\\\n)++"
# No word of an option's: another option, or what a shell reads as the command's end or redirection.
_WORD = rf"(?![\"']?-|[|&;<>)]){_VALUE}"
_TWO_WORDS = re.compile(rf"{_OPTION}{_GAP}{_WORD}", re.IGNORECASE)
_OPTION_AND_VALUE = re.compile(rf"{_OPTION}(=|{_GAP})(?={_WORD})(\"[^\"]*\"?|'[^']*'?|\S+)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Say whether an environment variable of this name is likely to hold a secret, as WANDB_API_KEY does."""
    return re.fullmatch(_SECRET, name.upper()) is not None and not name.upper().endswith(_PLACES)


def assigned_secrets(text: str) -> list[str]:
    """Return the names of secrets to which shell words give values; references to other variables are none.

    Args:
        text: shell words, such as `WANDB_API_KEY=abc run --redis-password def`.

    Returns:
        The names of what is assigned, also by `--name=value`, and options whose value is the next word, with their
        dashes.
    """
    found = []
    for match in _ASSIGNED.finditer(text):
        before = text[: match.start()]
        variable = before.endswith(f"{_VARIABLES}.")
        if (option := _OPTION_BEGUN.search(before)) and not variable:
            # The whole of it, of which `pad-token` ends in a secret's name and is none.
            name = option[0] + match[1]
            found += [name.lstrip("-")] if _takes_secret(name) else []
        else:
            found += _if_secret(match[1], in_config=before.endswith(".") and not variable)
    for name in _IN_BRACES.findall(text):
        found += _if_secret(name, in_config=True)
    return found + [option for option in _TWO_WORDS.findall(text) if _takes_secret(option)]


def _takes_secret(option: str) -> bool:
    """Say whether an option such as `--redis-password` takes a secret; `--pad-token` and `--input-key` take none."""
    name = option.lstrip("-").rpartition(".")[2].replace("-", "_")
    return bool(_if_secret(name, in_config=True))


def _if_secret(name: str, *, in_config: bool) -> list[str]:
    """Return a name if it is a secret's: a variable's or, in lower case within a config, a key's."""
    if in_config and name.islower() and not re.fullmatch(_SECRET_KEY, name):
        return []
    return [name] if is_secret(name) else []


def secret_variables(config: Any, place: str = "") -> list[str]:
    """Return where the `env_vars` blocks of a config hold secrets.

    Args:
        config: nested dictionaries and lists.
        place: its own key, with a dot at the end.
    """
    if not isinstance(config, Mapping):
        return []
    found = []
    for key, value in config.items():
        if key == _VARIABLES and isinstance(value, Mapping):
            found += [f"{place}{key}.{name}" for name in value if is_secret(str(name))]
        else:
            found += secret_variables(value, f"{place}{key}.")
    return found


def without_secrets(config: Any) -> Any:
    """Return a copy whose `env_vars` blocks show `***` for every value that `secret_variables` would name."""
    if not isinstance(config, Mapping):
        return config
    shown = {key: without_secrets(value) for key, value in config.items()}
    if isinstance(variables := shown.get(_VARIABLES), Mapping):
        shown[_VARIABLES] = {name: HIDDEN if is_secret(str(name)) else value for name, value in variables.items()}
    return shown


def words_without_secrets(words: Iterable[str]) -> list[str]:
    """Return the words of a command line as `word_without_secrets` does, and `***` for a secret that is a word.

    Args:
        words: e.g. `["serve", "--api-key", "abc"]`.
    """
    shown: list[str] = []
    option = False
    for word in words:
        shown.append(HIDDEN if option and not word.startswith("-") else word_without_secrets(word))
        option = re.fullmatch(_OPTION, word, re.IGNORECASE) is not None and _takes_secret(word)
    return shown


def word_without_secrets(word: str) -> str:
    """Return a word of a command line that shows no secret of an `env_vars` block or an option.

    Args:
        word: e.g. `policy.megatron_cfg.env_vars.HF_TOKEN=abc`, or a whole block in braces, also of one around it;
            `--api-key=abc`, or a text with options in it.

    Returns:
        The word, with `***` for its value if that is or holds a secret of a block, else for each value of an option.
    """
    key, assigned, value = word.partition("=")
    if assigned and re.fullmatch(_OPTION, key, re.IGNORECASE) and _takes_secret(key):
        return f"{key}={HIDDEN}"
    path = key.split(".")
    inside = _VARIABLES in path
    hidden = (inside and is_secret(path[-1])) or (
        (inside or _VARIABLES in value) and any(is_secret(name) for name in re.findall(r"\w+(?=[\"']?\s*:)", value))
    )
    return f"{key}={HIDDEN}" if assigned and hidden else _OPTION_AND_VALUE.sub(_option_alone, word)


def _option_alone(given: re.Match[str]) -> str:
    option, gap, value = given.groups()
    # Of another option the value may be a command with options of its own, as of `bash -c`.
    return f"{option}{gap}{HIDDEN if _takes_secret(option) else _OPTION_AND_VALUE.sub(_option_alone, value)}"
