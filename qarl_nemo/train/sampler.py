"""The built-in rollout engine: a model that holds only the packed tensors that refits have brought."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from qarl_kernels import QuantFormat
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.layers.lora import LoraSettings, add_adapters
from qarl_nemo.layers.packed import PackedExperts, PackedLinear, PackedWeight
from qarl_nemo.layers.router import NO_ROUTE, AlignedRouter, RouteControl
from qarl_nemo.names import module_kind
from qarl_nemo.refit.manifest import Layout, require_no_problems
from qarl_nemo.refit.publish import Update
from qarl_nemo.train.engine_forward import follow_engine
from qarl_nemo.train.rollouts import Rollouts, pad_left, positions, require_finite
from qarl_nemo.train.sampler_session import SamplerSession
from qarl_nemo.train.sampling import SamplingParams, draw


class PackedSampler:
    """Batched decoding with a KV cache from packed weights.

    Args:
        config: the learner's model config.
        fmt: format of the packed weights; nested codes are rounded when they arrive.
        targets: which layers are packed.
        dtype: activations and unquantized parameters.
        device: where everything lives.
        stop_ids: tokens that end a response.
        pad_id: filler.
        keep_operand: see `PackedWeight`.
        frozen: what the learner holds for good; it is served from the same memory, and no refit brings it.
        lora: settings of the adapters that refits bring.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        fmt: QuantFormat,
        targets: tuple[str, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        stop_ids: list[int],
        pad_id: int,
        keep_operand: bool = True,
        frozen: FrozenBase | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        frozen = frozen or FrozenBase()
        self.format = fmt = fmt.narrowed
        self.device = device
        self.pad_id = pad_id
        self.stop_ids = torch.tensor(stop_ids, device=device)
        self.routes = RouteControl()
        self.num_routers = 0
        # The learner's model holds the same config, and its attention reads whole sequences only.
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = follow_engine(AutoModelForCausalLM.from_config(config, dtype=dtype))
        self.slots = self._packed_layers(model, targets, dtype, keep_operand, frozen.weights)
        if lora is not None:
            add_adapters(model, lora)
        model.to_empty(device=device)
        for name, parameter in model.named_parameters():
            if name in frozen.parameters:
                parameter.data = frozen.parameters[name]
        # Rotary frequencies are computed, not loaded, so building on the meta device left them empty.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
        model.tie_weights()
        self.model = model.eval().requires_grad_(False)
        self._session = SamplerSession(self.model, self.slots, fmt, device, frozen)

    @property
    def version(self) -> int | None:
        """The weight version served; None before the first refit."""
        return self._session.version

    @property
    def layout(self) -> Layout:
        """Shape and dtype of every tensor that an update holds, by its published name."""
        return self._session.layout()

    def _packed_layers(
        self,
        model: nn.Module,
        targets: tuple[str, ...],
        dtype: torch.dtype,
        keep_operand: bool,
        frozen: Mapping[str, PackedWeight],
    ) -> dict[str, PackedWeight]:
        slots: dict[str, PackedWeight] = {}

        def slot(name: str, weight: Tensor) -> PackedWeight:
            empty = PackedWeight(self.format, tuple(weight.shape), dtype, keep_operand=keep_operand, name=name)
            slots[name] = frozen.get(name, empty)
            return slots[name]

        for name, module in list(model.named_modules()):
            kind = module_kind(name)
            replacement: nn.Module
            if kind == "router":
                replacement = AlignedRouter(module, self.routes, self.num_routers)
                self.num_routers += 1
            elif isinstance(module, nn.Linear) and (kind in targets or name in frozen):
                replacement = PackedLinear(slot(name, module.weight), module.bias)
            elif hasattr(module, "gate_up_proj") and (kind in targets or f"{name}.gate_up_proj" in frozen):
                pair = ("gate_up_proj", "down_proj")
                replacement = PackedExperts(*(slot(f"{name}.{key}", module.get_parameter(key)) for key in pair))
            else:
                continue
            model.set_submodule(name, replacement)
        return slots

    @torch.no_grad()
    def load(self, update: Update) -> None:
        """Serve `update` from now on; nothing changes unless the whole update is as its manifest says and as expected.

        Raises:
            ValueError: a tensor is missing, unexpected, different from the manifest or from what this engine holds, or
                the version is not newer; all are listed, and the old version keeps serving.
        """
        session, version = self._session, update.manifest.version
        kept = "nothing" if session.version is None else f"version {session.version}"
        try:
            problems = session.begin(update.manifest.to_message(), update.rehearsed)
            if not problems:
                for layer in update.layer_by_layer():
                    session.receive(version, "direct", layer)
                problems = session.verify(version)
            require_no_problems(problems, f"refit to version {version} refused, {kept} keeps serving")
            session.replace(version)
        finally:
            session.abort(version)

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        generator: torch.Generator,
        *,
        num_prompt_columns: int = 0,
    ) -> Rollouts:
        """Sample one response for each prompt.

        Args:
            prompts: token ids.
            params: how to draw.
            generator: source of randomness on this engine's device.
            num_prompt_columns: least number of prompt columns P.

        Returns:
            The rollouts; `generation_logprobs` are log_softmax(logits / temperature) in FP32.

        Raises:
            RuntimeError: the weights give logits that are not finite.
        """
        assert self.version is not None, "no refit has reached this engine"
        input_ids, prompt_mask = pad_left(prompts, self.pad_id, self.device, width=num_prompt_columns)
        return self._decode(input_ids, prompt_mask, params, generator, self.version)

    def _decode(
        self,
        input_ids: Tensor,
        prompt_mask: Tensor,
        params: SamplingParams,
        generator: torch.Generator,
        version: int,
    ) -> Rollouts:
        tokens, logprobs, masks, routes = [], [], [], []
        alive = torch.ones(len(input_ids), dtype=torch.bool, device=self.device)
        cache, step_ids, attention = DynamicCache(), input_ids, prompt_mask
        for column in range(params.max_new_tokens):
            with self.routes.record() as chosen:
                logits = self._step(step_ids, attention, cache)
            require_finite(logits, "logits", version)
            routes.append(_stack_routes(chosen, step_ids.shape))
            token, logprob = draw(logits, params, generator)
            token = torch.where(alive, token, self.pad_id)
            tokens.append(token)
            logprobs.append(torch.where(alive, logprob, 0.0))
            masks.append(alive)
            alive = alive & ~torch.isin(token, self.stop_ids)
            if column + 1 == params.max_new_tokens or not bool(alive.any()):
                break
            step_ids = token.unsqueeze(-1)
            attention = torch.cat([attention, masks[-1].unsqueeze(-1)], dim=-1)
        response_mask = torch.stack(masks, dim=-1)
        return Rollouts(
            input_ids=torch.cat([input_ids, torch.stack(tokens, dim=-1)], dim=-1),
            attention_mask=torch.cat([prompt_mask, response_mask], dim=-1),
            response_mask=response_mask,
            generation_logprobs=torch.stack(logprobs, dim=-1),
            routes=_join_routes(routes, input_ids.shape[1] + len(tokens)),
            truncated=alive,
            weight_version=version,
        )

    def _step(self, step_ids: Tensor, attention: Tensor, cache: DynamicCache) -> Tensor:
        out = self.model(
            input_ids=step_ids,
            attention_mask=attention,
            position_ids=positions(attention)[:, -step_ids.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].float()

    @property
    def num_bytes(self) -> int:
        """Weights held, in bytes: packed tensors and unquantized parameters, without the repacked GEMM operands."""
        packed = sum(slot.weight.num_bytes for slot in self.slots.values() if slot.weight)
        return packed + sum(parameter.nbytes for parameter in self.model.parameters())


def _stack_routes(chosen: list[Tensor], shape: torch.Size) -> Tensor | None:
    if not chosen:
        return None
    return torch.stack(chosen, dim=1).view(*shape, len(chosen), -1).to(torch.int16)


def _join_routes(parts: list[Tensor | None], num_columns: int) -> Tensor | None:
    if parts[0] is None:
        return None
    joined = torch.cat(parts, dim=1)
    # The last token was sampled but never fed back, so no router has seen it.
    return nn.functional.pad(joined, (0, 0, 0, 0, 0, num_columns - joined.shape[1]), value=NO_ROUTE)
