"""What documents name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_map_of_the_code_names_files_that_exist():
    text = (ROOT / "docs" / "design" / "architecture.md").read_text()
    named = re.findall(r"`((?:qarl_nemo|kernels|tests|tools)/[\w./]+)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
