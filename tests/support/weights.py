"""BF16 weights that quantizers get wrong first, layouts of experts in memory, and all pairs of significands."""

import torch

from support.formats import uneven_weight


def heavy_tailed(*shape):
    return (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).bfloat16()


def extreme(*shape):
    """Gaussian, but with a zero row, a zero group, -0.0, the largest numbers, subnormal ones, and tied maxima."""
    weight = uneven_weight(*shape)
    rows = weight.view(-1, shape[-1])
    rows[0, 32:64] = 0.0
    rows[0, 1::2] *= -0.0
    rows[-1] = torch.where(rows[-1] > 0, 1.0, -1.0)
    if len(rows) > 3:
        largest = torch.finfo(torch.bfloat16).max
        rows[1] = 0.0
        rows[2] = torch.randint(-300, 300, rows[2].shape) * 2.0**-133
        rows[3, :2] = torch.tensor([largest, -largest])
    return weight


WEIGHTS = {"uneven": uneven_weight, "heavy_tailed": heavy_tailed, "extreme": extreme}


def in_reverse(stack):
    """The experts of a stack as a list of views that follow one another backwards, as Megatron's optimizer has them."""
    memory = stack.flip(0).contiguous()
    return [memory[expert] for expert in reversed(range(len(stack)))]


def scattered(stack):
    memory = [torch.empty(64 + one.numel(), dtype=one.dtype, device=one.device) for one in stack]
    order = sorted(range(len(stack)), key=lambda expert: expert % 2)
    weights = [memory[position][: stack[0].numel()].view_as(stack[0]) for position in order]
    for weight, one in zip(weights, stack, strict=True):
        weight.copy_(one)
    return weights


def spaced(stack):
    wide = torch.full((len(stack), 2, *stack.shape[1:]), torch.nan, dtype=stack.dtype, device=stack.device)
    wide[:, 0] = stack
    return wide[:, 0]


def unaligned(stack):
    memory = torch.empty(stack.numel() + 1, dtype=stack.dtype, device=stack.device)
    return memory[1:].view(stack.shape).copy_(stack)


LAYOUTS = {"reverse": in_reverse, "scattered": scattered, "spaced": spaced, "unaligned": unaligned}


def significand_pairs(group_size, octaves):
    """A row for each of the 128 significands of a maximum, with each significand in each octave below it, both signs.

    Every group begins with its maximum; what exceeds it is replaced by it.
    """
    significands = torch.arange(128, 256).float() / 128
    values = (significands * torch.exp2(-torch.arange(octaves).float())[:, None]).flatten()
    values = torch.cat([values, -values])
    per_group = group_size - 1
    values = torch.nn.functional.pad(values, (0, -len(values) % per_group)).view(1, -1, per_group)
    amax = significands.view(-1, 1, 1)
    values = values.expand(128, -1, -1).clamp(-amax, amax)
    return torch.cat([amax.expand(-1, values.shape[1], 1), values], -1).flatten(-2).bfloat16()
