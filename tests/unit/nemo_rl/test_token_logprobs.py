"""Log-probabilities that are taken out of an engine's answers stand where NeMo-RL's worker would have put them."""

from types import SimpleNamespace

import pytest
import torch

from qarl_nemo.nemo_rl.token_logprobs import logprobs_apart, write_logprobs


def answer(tokens, logprobs):
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])


def found(**logprobs):
    return {int(token[1:]): SimpleNamespace(logprob=value) for token, value in logprobs.items()}


def answers():
    """A whole one whose second token is not its likeliest, one with gaps, one that was cut, one without any."""
    return [
        answer([5, 7, 5], [found(t5=-0.5), found(t9=-0.1, t7=-3.0), found(t5=-0.25)]),
        answer([1, 2], [None, found(t9=-0.1)]),
        answer([3, 4], [found(t3=-1.0)]),
        answer([6], None),
    ]


PROMPTS = torch.tensor([2, 4, 1, 3])


def by_nemo_rl(outputs):
    """Write them as NeMo-RL's `VllmGenerationWorker.generate` does."""
    rows = []
    for length, output in zip(PROMPTS, outputs, strict=True):
        row, generation = torch.zeros(7), output.outputs[0]
        for index, (token, logprobs) in enumerate(zip(generation.token_ids, generation.logprobs or [], strict=False)):
            if logprobs and (sampled := logprobs.get(token)) is not None:
                row[length + index] = sampled.logprob
        rows.append(row)
    return torch.stack(rows)


def test_they_stand_where_nemo_rl_puts_them():
    outputs = answers()
    llm = SimpleNamespace(generate=lambda prompts, use_tqdm: outputs)
    own = llm.generate
    with logprobs_apart(llm) as taken:
        # NeMo-RL writes none of them itself.
        assert llm.generate(["a", "b", "c", "d"], use_tqdm=False) is outputs
        assert not by_nemo_rl(outputs).any()
    assert llm.generate is own
    logprobs = torch.zeros(4, 7)
    write_logprobs(logprobs, taken, PROMPTS)
    assert torch.equal(logprobs, by_nemo_rl(answers()))
    wrong = torch.zeros(4, 7)
    write_logprobs(wrong, taken, PROMPTS + torch.tensor([0, 0, 1, 0]))
    assert not torch.equal(wrong, logprobs)


def test_an_engine_that_fails_or_answers_nothing_is_left_as_it_was():
    def fail(_prompts):
        raise RuntimeError("out of memory")

    llm = SimpleNamespace(generate=fail)
    with pytest.raises(RuntimeError, match="out of memory"), logprobs_apart(llm) as taken:
        llm.generate([])
    assert llm.generate is fail
    assert taken == []
    # A rank without prompts does not ask its engine.
    empty = torch.zeros(0, 0)
    write_logprobs(empty, taken, torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0, 0)
