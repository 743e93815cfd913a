"""What documents tell readers to do."""

import re
import shlex
from pathlib import Path


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, as words, without comments and with variables filled in."""
    found, variables = [], {}
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = [re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), word) for word in words]
            while words and re.match(r"\w+=", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words:
                found.append(words)
    return found


def named_commands(page: Path) -> list[list[str]]:
    """The commands that a page's sentences and tables name, as words; arguments may be left out or made up."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [shlex.split(command) for command in re.findall(r"`((?:make|python|qarl) [^`]+)`", prose)]
