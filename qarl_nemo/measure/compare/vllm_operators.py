"""Records each operator's output of a Qwen3 or Qwen3-MoE model while vLLM serves it; does not import vLLM.

Tensors are copied as soon as an operator returns them, since the next one may overwrite them. Rows are tokens in the
order in which the engine computed them. An operator's inputs are earlier outputs, so only outputs are kept:

    tokens, positions, step                 [rows] int64; which forward of the engine computed the row
    <layer>.input_norm, .residual           normalized, and the residual stream before the norm
    <layer>.qkv_proj .q_norm .k_norm        [rows, heads * head size]
    <layer>.q .k .v                         after the rotary embedding, as attention takes them
    <layer>.attention .o_proj
    <layer>.post_norm .post_residual
    <layer>.router                          [rows, E] logits
    <layer>.topk_weights .topk_ids          [rows, k]; absent where the engine's kernel chooses inside
    <layer>.mlp                             of the experts, or of a dense layer's MLP
    final_norm, final_residual              [rows, H]
    logits                                  [P, V], one row for each request and step
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


class OperatorRecorder:
    """Hooks on a model of vLLM, from now until `stop`.

    Args:
        model: what `LLM.apply_model` passes: `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM`, run eagerly.
    """

    def __init__(self, model: Any) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self._steps = 0
        self._hooks = ExitStack()
        # vLLM bypasses the whole model's hooks, so parts of it are hooked.
        self._watch(model.model.embed_tokens, lambda inputs, _: self._keep("tokens", inputs[0].long()))
        self._hooks.enter_context(model.model.layers[0].register_forward_pre_hook(self._start))
        for index, layer in enumerate(model.model.layers):
            self._watch_layer(str(index), layer)
        self._watch(model.model.norm, self._keep_norm("final_norm", "final_residual"))
        self._watch(model.logits_processor, lambda _, out: self._keep("logits", out))

    def tensors(self) -> dict[str, Tensor]:
        """Return the record on the CPU, all forwards together."""
        return {name: torch.cat(parts) for name, parts in self.kept.items()}

    def stop(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _watch_layer(self, index: str, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._watch(layer.input_layernorm, self._keep_norm(f"{index}.input_norm", f"{index}.residual"))
        self._watch(layer.post_attention_layernorm, self._keep_norm(f"{index}.post_norm", f"{index}.post_residual"))
        for name in ("qkv_proj", "o_proj", "q_norm", "k_norm"):
            self._watch(getattr(attention, name), self._keeper(f"{index}.{name}"))
        self._hooks.enter_context(attention.attn.register_forward_pre_hook(self._keep_qkv(index)))
        self._watch(attention.attn, self._keeper(f"{index}.attention"))
        self._watch(mlp, self._keeper(f"{index}.mlp"))
        if hasattr(mlp, "gate"):
            self._watch(mlp.gate, self._keeper(f"{index}.router"))
            self._watch_choice(index, mlp.experts.router)

    def _watch(self, module: nn.Module, keep: Callable[[tuple, Any], None]) -> None:
        self._hooks.enter_context(module.register_forward_hook(lambda _, inputs, out: keep(inputs, out)))

    def _watch_choice(self, index: str, router: Any) -> None:
        select = router.select_experts

        def kept_choice(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, ids = select(*args, **kwargs)
            self._keep(f"{index}.topk_weights", weights)
            self._keep(f"{index}.topk_ids", ids)
            return weights, ids

        # An instance's attribute hides the class's until it is deleted.
        router.select_experts = kept_choice
        self._hooks.callback(delattr, router, "select_experts")

    def _start(self, _: nn.Module, inputs: tuple) -> None:
        positions = inputs[0]
        self._keep("positions", positions.long())
        self._keep("step", torch.full_like(positions, self._steps, dtype=torch.int64))
        self._steps += 1

    def _keeper(self, name: str) -> Callable[[tuple, Any], None]:
        # vLLM's linear layers return their output and a bias that was not added.
        return lambda _, out: self._keep(name, out[0] if isinstance(out, tuple) else out)

    def _keep_norm(self, name: str, residual: str) -> Callable[[tuple, Any], None]:
        def keep(inputs: tuple, out: Any) -> None:
            normalized, stream = out if isinstance(out, tuple) else (out, inputs[0])
            self._keep(name, normalized)
            self._keep(residual, stream)

        return keep

    def _keep_qkv(self, index: str) -> Callable[[nn.Module, tuple], None]:
        def keep(_: nn.Module, inputs: tuple) -> None:
            for name, value in zip("qkv", inputs, strict=True):
                self._keep(f"{index}.{name}", value)

        return keep

    def _keep(self, name: str, value: Tensor) -> None:
        self.kept.setdefault(name, []).append(value.detach().flatten(1 if value.ndim > 1 else 0).cpu().clone())
