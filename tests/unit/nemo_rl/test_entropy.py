"""Exact entropy from NeMo-RL's logits: in every layout, and over ranks that share vocabulary and context."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed, multiprocessing

from qarl_nemo.nemo_rl.entropy import entropy_of_logits, mean_entropy, next_token_mask
from qarl_nemo.nemo_rl.loss import ENTROPY_KEY

VOCABULARY, LENGTHS, PADDED = 8, (5, 8, 4), (8, 8, 8)


def make_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [3, 8, V] of three sequences, of which the last one does not count."""
    torch.manual_seed(0)
    positions, lengths = torch.arange(8), torch.tensor(LENGTHS).unsqueeze(-1)
    mask = (positions >= 2) & (positions < lengths)
    return 5 * torch.randn(3, 8, VOCABULARY), {"token_mask": mask.float(), "sample_mask": torch.tensor([1.0, 1, 0])}


def expected(logits, data) -> float:
    """Position by position, from the definition."""
    found = []
    for row, length in enumerate(LENGTHS):
        for position in range(1, length - 1):
            if data["sample_mask"][row]:
                p = logits[row, position].double().softmax(-1)
                found.append(-(p * p.log()).sum())
    assert len(found) == 3 + 6
    return float(torch.stack(found).mean())


def ends(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def layouts(logits, data):
    """One sequence a row, and all in one row with their padding."""
    yield logits, next_token_mask(data, 8, None, None, None)
    packed = logits.reshape(1, 24, VOCABULARY)
    yield packed, next_token_mask(data, 24, ends(LENGTHS), ends(PADDED), None)
    # NeMo-RL counts a row's last padding to its last sequence.
    yield packed, next_token_mask(data, 24, ends((5, 8, 8)), ends(PADDED), None)


def test_it_is_that_of_the_response_tokens_in_each_layout():
    logits, data = make_batch()
    for rows, mask in layouts(logits, data):
        assert float(mean_entropy(rows, mask, None, None)) == pytest.approx(expected(logits, data), rel=1e-5)
        shifted = mean_entropy(rows, mask.roll(1, -1), None, None)
        assert float(shifted) != pytest.approx(expected(logits, data), rel=1e-2), "the token itself, not the next one"
    assert float(mean_entropy(logits, torch.zeros(3, 8, dtype=torch.bool), None, None)) == 0.0


def test_logits_far_apart_have_an_entropy():
    # e^200 is beyond FP32.
    found = mean_entropy(torch.tensor([[[0.0, 200.0]]]), torch.ones(1, 1, dtype=torch.bool), None, None)
    assert float(found) == pytest.approx(0.0, abs=1e-6)


def test_a_loss_is_handed_it_inside_the_block_alone():
    logits, data = make_batch()

    def prepare(logits, data, loss_fn, **_parallel):
        return {"next_token_logprobs": logits[..., 0]}, data

    module = SimpleNamespace(prepare_loss_input=prepare, prepare_packed_loss_input=prepare)
    loss_fn = SimpleNamespace(use_fused_linear_logprobs=False)
    with entropy_of_logits(module):
        loss_input, handed = module.prepare_loss_input(logits=logits, data=data, loss_fn=loss_fn)
        fused = SimpleNamespace(use_fused_linear_logprobs=True)
        without = module.prepare_loss_input(logits=logits, data=data, loss_fn=fused)[1]
    assert set(loss_input) == {"next_token_logprobs"}
    assert float(handed[ENTROPY_KEY]) == pytest.approx(expected(logits, data), rel=1e-5)
    assert ENTROPY_KEY not in data
    assert without is data
    assert module == SimpleNamespace(prepare_loss_input=prepare, prepare_packed_loss_input=prepare)


def run_rank(rank: int, store: str) -> None:
    """One of four ranks: two parts of the vocabulary times two of the context."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    tensor_groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    context_groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    context, tensor = divmod(rank, 2)
    logits, data = make_batch()
    # Each sequence of 8 in quarters, of which a rank has one from the front and one from the back.
    columns = [[0, 1, 6, 7], [2, 3, 4, 5]][context]
    own = logits[:, columns, tensor * 4 : tensor * 4 + 4].to(torch.bfloat16)
    wanted = expected(logits.to(torch.bfloat16), data)
    group = context_groups[tensor]
    for rows, bounds in ((own, (None, None)), (own.reshape(1, 12, 4), (ends(LENGTHS), ends(PADDED)))):
        mask = next_token_mask(data, rows.shape[1], *bounds, group)
        found = mean_entropy(rows, mask, tensor_groups[context], group)
        assert float(found) == pytest.approx(wanted, rel=1e-5)
    distributed.destroy_process_group()


def test_ranks_that_share_vocabulary_and_context_agree(tmp_path):
    multiprocessing.spawn(run_rank, (str(tmp_path / "store"),), nprocs=4)
