"""What NeMo-RL's worker builds is aligned or refused, and runs as another format for its reference model."""

import pytest
import torch

from support.needs import MEGATRON
from support.programs import run_program

pytestmark = [pytest.mark.slow, MEGATRON]


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligned")
    # A process of its own: Megatron keeps global state.
    run_program("nemo_rl.run_aligned_model", folder)
    return torch.load(folder / "rank0.pt", weights_only=True)


def test_another_format_runs_for_a_while_and_leaves_no_trace(facts):
    assert facts["formats"] == dict.fromkeys(facts["formats"], True)
    assert len(facts["formats"]) == 5


def test_a_worker_builds_aligned_models_and_records_the_providers_own_spec(facts):
    built = dict(facts["built"])
    assert built.pop("aligned") == "w4a16 in experts of 2 layers"
    assert built == {"spec_is_back": True, "runs_the_format": True, "spec_is_back_after_failure": True}


def test_a_model_that_would_not_execute_the_format_is_refused_by_layer(facts):
    refusals = facts["refusals"]
    assert "layer 1: experts are MoELayer" in refusals["plain"]
    assert "layer 2: experts are MoELayer" in refusals["plain"]
    assert "layer 2: SelfAttention rounds where Megatron does" in refusals["plain"]
    assert "model.layers.0.mlp.experts.gate_up_proj executes bf16" in refusals["other format"]
    assert refusals["attention"].count("layer 2: ") == 2


def test_a_recomputed_layer_forgets_its_batch_where_megatrons_own_keeps_it(facts):
    assert facts["batches_kept"] == {"alltoall": 0, "allgather": 0, "megatron": 2}


def test_a_model_enters_every_stage_before_its_first_step(facts):
    stages = dict(facts["stages"])
    three, two = (f"step {step}: codes of {bits} bits from here on" for step, bits in ((3, 3), (5, 2)))
    two += "; the optimizer's moments begin anew"
    assert stages.pop("said") == [None, None, three, None, two]
    # In the middle of a stage the moments are those of the stage; at its first step they are not yet.
    assert stages.pop("resumed") == {
        4: ["step 4: codes of 3 bits from here on", 3, False],
        5: [two, 2, True],
        6: ["step 6: codes of 2 bits from here on", 2, False],
    }
    assert stages.pop("bumps") == 2
    assert stages == dict.fromkeys(("due", "runs_the_stage", "publishes_the_stage", "is_another_grid"), True)
