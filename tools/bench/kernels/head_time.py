"""Log-probabilities of one chunk of tokens under a real vocabulary: the kernels beside torch's operators.

`scores` and `gradient` are the passes over logits alone; `forward` adds the head's product, as `prev_logprobs` needs
it, and `step` is a forward and the backward, which makes the logits again and adds to the head's FP32 gradient.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from device_time import copy_gb_s, interleaved_ms
from record import record
from torch import Tensor, nn

from qarl_kernels import token_logprobs, token_logprobs_backward
from qarl_kernels.dispatch_logprobs import token_logprobs_backward_reference, token_logprobs_reference
from qarl_nemo.layers.logprobs import add_product
from qarl_nemo.metrics.results import Figure

Calls = dict[str, Callable[[], object]]
BF16 = torch.bfloat16


class Head:
    """One chunk's inputs.

    Args:
        rows: tokens of the chunk.
        hidden_size: H.
        vocabulary: V.
        temperature: sampling temperature.
    """

    def __init__(self, rows: int, hidden_size: int, vocabulary: int, temperature: float) -> None:
        self.hidden = torch.randn(rows, hidden_size, device="cuda", dtype=BF16)
        self.weight = 0.05 * torch.randn(vocabulary, hidden_size, device="cuda", dtype=BF16)
        self.tokens = torch.randint(vocabulary, (rows,), device="cuda")
        self.grad = torch.randn(rows, device="cuda")
        self.total = torch.zeros(vocabulary, hidden_size, device="cuda")
        self.temperature = temperature
        # The gradient is written in place of the second, whose values do not matter to the time.
        self.scored, self.spent = self.logits(), self.logits()

    def logits(self) -> Tensor:
        """Return the head's product [rows, V]."""
        return nn.functional.linear(self.hidden, self.weight)

    def torch_step(self) -> None:
        """Score, and differentiate with torch's operators."""
        token_logprobs_reference(self.logits(), self.tokens, self.temperature)
        grad = token_logprobs_backward_reference(self.logits(), self.tokens, self.grad, self.temperature)
        torch.mm(grad, self.weight)
        self.total += grad.mT @ self.hidden

    def kernel_step(self) -> None:
        """Score, and differentiate with the kernels."""
        logprobs, _, log_z = token_logprobs(self.logits(), self.tokens, self.temperature)
        grad = token_logprobs_backward(self.logits(), self.tokens, logprobs, log_z, self.grad, self.temperature)
        torch.mm(grad, self.weight)
        add_product(self.total, grad.mT, self.hidden)

    def calls(self) -> Calls:
        """Return what is timed."""
        tokens, temperature = self.tokens, self.temperature
        logprobs, _, log_z = token_logprobs(self.scored, tokens, temperature)
        return {
            "torch/scores": lambda: token_logprobs_reference(self.scored, tokens, temperature),
            "kernel/scores": lambda: token_logprobs(self.scored, tokens, temperature),
            "torch/gradient": lambda: token_logprobs_backward_reference(self.spent, tokens, self.grad, temperature),
            "kernel/gradient": lambda: token_logprobs_backward(
                self.spent, tokens, logprobs, log_z, self.grad, temperature
            ),
            "torch/forward": lambda: token_logprobs_reference(self.logits(), tokens, temperature),
            "kernel/forward": lambda: token_logprobs(self.logits(), tokens, temperature),
            "torch/step": self.torch_step,
            "kernel/step": self.kernel_step,
        }


def require_agreement(head: Head) -> None:
    """Raise where the kernels say something else than the reference.

    Raises:
        RuntimeError: values differ by more than FP32's rounding, or gradients by more than BF16's.
    """
    *found, log_z = token_logprobs(head.scored, head.tokens, head.temperature)
    for name, mine, wanted in zip(
        ("logprobs", "entropy"),
        found,
        token_logprobs_reference(head.scored, head.tokens, head.temperature),
        strict=True,
    ):
        gap = float((mine - wanted).abs().max())
        if not gap <= 2e-5:
            raise RuntimeError(f"{name}: the kernel is {gap:.1e} nats off the reference")
    common = head.tokens, found[0], log_z, head.grad, head.temperature
    mine = token_logprobs_backward(head.scored.clone(), *common).float()
    wanted = token_logprobs_backward_reference(head.scored.float(), head.tokens, head.grad, head.temperature)
    error = float((mine - wanted).norm() / wanted.norm())
    if not error <= 2**-8:
        raise RuntimeError(f"gradient: the kernel is {error:.1e} off the reference")


def figures(head: Head, name: str) -> Iterator[Figure]:
    """Measure one shape."""
    ms = interleaved_ms(head.calls())
    gigabytes = head.scored.numel() * head.scored.element_size() / 1e9
    for part in ("scores", "gradient", "forward", "step"):
        for path in ("torch", "kernel"):
            yield Figure(f"head_{part}_ms_{path}_{name}", ms[f"{path}/{part}"], "ms", "<=")
        yield Figure(f"head_{part}_ratio_{name}", ms[f"kernel/{part}"] / ms[f"torch/{part}"], "", "<=", 1.0)
    yield Figure(f"head_scores_gb_s_{name}", 1e3 * gigabytes / ms["kernel/scores"], "GB/s", ">=")
    yield Figure(f"head_gradient_gb_s_{name}", 2e3 * gigabytes / ms["kernel/gradient"], "GB/s", ">=")


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    found = [Figure("copy_gb_s", copy_gb_s(), "GB/s", ">=")]
    for temperature in options.temperature:
        head = Head(options.rows, options.hidden, options.vocabulary, temperature)
        require_agreement(head)
        found += figures(head, f"n{options.rows}_v{options.vocabulary}_t{temperature}")
        del head
        torch.cuda.empty_cache()
    record(found, options.record)


if __name__ == "__main__":
    main()
