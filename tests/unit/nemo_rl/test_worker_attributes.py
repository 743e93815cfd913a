"""The policy worker and the class below it are written apart and share one `self`."""

import ast
from pathlib import Path

NEMO_RL = Path(__file__).parents[3] / "qarl_nemo" / "nemo_rl"


def assigned(file, name):
    """The attributes of itself that a class assigns."""
    tree = ast.parse((NEMO_RL / file).read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    stored = (node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_no_attribute_has_two_meanings():
    worker, below = (
        assigned("policy_worker.py", "QarlMegatronPolicyWorkerImpl"),
        assigned("gpu_sharing.py", "SharesGpu"),
    )
    assert {"_published_bytes", "alignment"} <= worker
    assert "_refit_bytes" in below
    # What the worker tells the class below it.
    assert worker & below == {"refitted"}
