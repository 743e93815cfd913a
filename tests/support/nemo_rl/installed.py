"""Import this first in a test module that needs NeMo-RL: it skips the module where NeMo-RL cannot be imported."""

import pytest
from pydantic.errors import PydanticUserError

try:
    import nemo_rl.algorithms.grpo  # noqa: F401
except (ImportError, PydanticUserError) as error:
    # Pydantic's: on Python 3.11 it refuses the TypedDicts of NeMo-RL's configs.
    pytest.skip(f"needs NeMo-RL on PYTHONPATH, and Python 3.12: {error}", allow_module_level=True)
