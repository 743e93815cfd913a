"""What is asked of a refitted engine: each check returns facts, `test_vllm_refit.py` says what they must be."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from refit_campaign import Campaign

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.refit.adapters import ADAPTER_ID, ADAPTER_NAME
from qarl_nemo.refit.answers import ask
from qarl_nemo.refit.engine import VllmEngine
from qarl_nemo.refit.engine_methods import chosen_methods
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate, Update
from qarl_nemo.refit.push import push
from support.refit.cases import EngineCase
from support.refit.learner import VOCAB_SIZE, published, published_adapters
from support.refit.senders import CutSender, RepeatingSender, make_sender, rehearsed, with_stranger
from support.refit.vllm_target import VllmTarget

# Longer than a block of the prefix cache.
PROMPTS = [[(7 * row + 13 * column) % (VOCAB_SIZE - 1) + 1 for column in range(20 + row)] for row in range(8)]
NUM_TOKENS = 12
# vLLM allocates these, fills some of them with nothing, and no kernel reads them.
UNREAD = re.compile(r"g_idx|weight_shape|weight_zero_point")
Responses = list[tuple[list[int], list[float]]]


class Rig:
    """An engine, the learner's two updates, and how they are sent."""

    def __init__(self, case: EngineCase, source: Path, scratch: Path, start: Callable[[EngineCase, Path], Any]) -> None:
        self.case = case
        self.format = get_format(case.format, group_size=case.group_size, nested_in=case.nested_in)
        self.scratch = scratch
        checkpoint = scratch / "checkpoint"
        quantize_checkpoint(source / f"{case.starts_from}{case.expert_size}", checkpoint, self.format, case.targets)
        self.llm = start(case, checkpoint)
        self.engine = VllmEngine(self.llm)
        device = "cpu"
        if case.device == "cuda":
            # A collective's learner has the GPU after the engine's.
            device = f"cuda:{case.tensor_parallel if case.sender == 'collective' else 0}"
            torch.cuda.set_device(device)
        self.updates = {name: self._update(name, seed, source, device) for seed, name in enumerate("AB", start=1)}
        self.request = refitted_adapter() if case.adapters else None
        self.norm = "model.layers.0.input_layernorm.weight" if case.adapters else "model.norm.weight"
        self.version = 0
        self.other = "B" if case.starts_from == "A" else "A"
        self.device = device
        self.sender = self.new_sender()

    def _update(self, name: str, seed: int, source: Path, device: str) -> RefitUpdate:
        case = self.case
        if case.adapters:
            base, folder = source / f"{case.starts_from}{case.expert_size}", self.scratch / f"adapter_{name}"
            return published_adapters(base, self.format, case.targets, device, seed, folder)
        return published(source / f"{name}{case.expert_size}", self.format, case.targets, device, version=0)

    def new_sender(self, timeout_s: float | None = None) -> Any:
        """Return a sender of the case's kind, with its own limit on each wait or another."""
        return make_sender(self.case, self.device, self.scratch, timeout_s)

    def next(self, name: str) -> RefitUpdate:
        """Return update `A` or `B` as the next version, which no update had before."""
        self.version += 1
        update = self.updates[name]
        return replace(update, manifest=replace(update.manifest, version=self.version))

    def push(self, name: str) -> Any:
        """Refit the engine to update `A` or `B`."""
        update = self.next(name)
        return push(rehearsed(update, self.format) if self.case.rehearsed else update, self.engine, self.sender)

    def refusal(self, update: Update, sender: Any = None) -> str:
        """Return the error of a refit that must fail."""
        try:
            push(update, self.engine, sender or self.sender)
        except Exception as error:  # noqa: BLE001 which one is for the test to say
            return f"{type(error).__name__}: {error}"
        return ""

    def respond(self, *, keep_cache: bool = False) -> Responses:
        """Return greedy tokens and logprobs; always in the same batches."""
        if not keep_cache:
            self.llm.reset_prefix_cache()
        # Requests reach an engine of another process one by one, and its first batch holds those that were in time.
        batches = [PROMPTS] if self.case.in_this_process else [[prompt] for prompt in PROMPTS[:4]]
        return [answer for batch in batches for answer in self._generate(batch)]

    def _generate(self, prompts: list[list[int]]) -> Responses:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling(), use_tqdm=False, lora_request=self.request)
        return [answered(output) for output in outputs]

    def rpc(self, method: str) -> list[Any]:
        """Ask every rank."""
        return ask(self.engine, method)

    def digests(self) -> list[dict[str, int]]:
        """Return every rank's checksum of each tensor that kernels read."""
        ranks = self.rpc("qarl_digests")
        return [{name: value for name, value in rank.items() if not UNREAD.search(name)} for rank in ranks]

    def weights(self) -> tuple[Responses, list[dict[str, int]]]:
        """Return what an engine's weights show of themselves, whatever version they are called."""
        return self.respond(), self.digests()

    def state(self) -> tuple[Responses, list[dict[str, int]], list[Any]]:
        """Return all that a refused refit must leave alone."""
        return *self.weights(), self.rpc("qarl_version")


def refitted_adapter() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, "from-refits")


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)


def answered(output: Any) -> tuple[list[int], list[float]]:
    best = output.outputs[0]
    tokens = list(best.token_ids)
    return tokens, [entry[token].logprob for token, entry in zip(tokens, best.logprobs, strict=True)]


def methods(rig: Rig) -> list[list[dict[str, str]]]:
    """Which methods every rank runs."""
    return [[asdict(record) for record in rank] for rank in rig.llm.apply_model(chosen_methods)]


def first_refit(rig: Rig) -> dict[str, Any]:
    """The engine as it loaded, after the first refit to the other weights, and after one back to its own."""
    loaded, answers = rig.digests(), rig.respond()
    report = rig.push(rig.other)
    refitted, other_answers, versions = rig.digests(), rig.respond(), rig.rpc("qarl_version")
    rig.push(rig.case.starts_from)
    back = rig.digests()
    return {
        "loaded": loaded,
        "refitted": refitted,
        "back": back,
        "same_answers": rig.respond() == answers,
        "other_answers": other_answers != answers,
        "versions": versions,
        "expected_version": 1,
        "reported": [report.version, report.num_bytes],
        "num_bytes": rig.updates[rig.other].num_bytes,
        "num_tokens": len({token for tokens, _ in answers for token in tokens}),
    }


def there_and_back(rig: Rig) -> dict[str, int]:
    """How often A -> B -> A gave the answers of A, and of B on the way."""
    wanted = {}
    for name in "BA":
        rig.push(name)
        wanted[name] = rig.respond()
    same = {"A": 0, "B": 0}
    for _ in range(rig.case.rounds):
        for name in "BA":
            rig.push(name)
            same[name] += rig.respond() == wanted[name]
    return {"rounds": rig.case.rounds, **same, "differ": int(wanted["A"] != wanted["B"])}


def prefix_cache(rig: Rig) -> dict[str, bool]:
    """Whether prefixes computed with old weights reach a new version's answers."""
    rig.push("A")
    rig.respond()
    rig.push("B")
    kept = rig.respond(keep_cache=True)
    return {"same_answers": kept == rig.respond()}


def refusals(rig: Rig) -> dict[str, dict[str, Any]]:
    """What updates that are not whole, or of another layout, are answered; and whether they left the engine alone."""
    rig.push("A")
    before = rig.state()
    found = {}
    for name, (update, offending) in broken_updates(rig).items():
        error = rig.refusal(update)
        found[name] = {"error": error, "offending": offending, "same": rig.state() == before}
    error = rig.refusal(rig.next("B"), RepeatingSender(rig.sender, rig.norm))
    found["sent twice"] = {"error": error, "offending": [rig.norm], "same": rig.state() == before}
    if rig.case.device == "cpu" or rig.case.adapters:
        error = rig.refusal(rehearsed(rig.next("B"), rig.format))
        found["rehearsed"] = {"error": error, "offending": ["as a whole"], "same": rig.state() == before}
    else:
        error = rig.refusal(rehearsed(rig.next("B"), rig.format, in_pieces=True))
        found["in pieces"] = {"error": error, "offending": ["comes in pieces"], "same": rig.state() == before}
    rig.push("B")
    found["whole again"] = {"error": "", "offending": [], "same": rig.state() == before}
    return found


def broken_updates(rig: Rig) -> dict[str, tuple[RefitUpdate, list[str]]]:
    """Name -> an update, and what its error must name."""
    update = rig.next("B")
    experts = sorted(name for name in update.tensors if "mlp.experts" in name)
    weight, scale = experts[0], experts[-1]
    norm = rig.norm
    cases: dict[str, tuple[RefitUpdate, list[str]]] = {}

    def add(name: str, changes: dict[str, Any], offending: list[str], *, announced: bool) -> None:
        tensors = {key: value for key, value in (update.tensors | changes).items() if value is not None}
        manifest = (
            Manifest.of([tensors], version=update.manifest.version, fmt=rig.format.name)
            if announced
            else update.manifest
        )
        cases[name] = RefitUpdate(manifest, [tensors]), offending

    for announced in (True, False):
        suffix = "" if announced else ", not announced"
        wrong = {
            weight: update.tensors[weight][1:].contiguous(),
            scale: update.tensors[scale].double(),
            norm: None,
            "model.layers.9.extra.weight": update.tensors[norm].clone(),
        }
        add("shape, dtype, missing and unknown" + suffix, wrong, list(wrong), announced=announced)
    flipped = update.tensors[weight].clone()
    flipped.view(torch.uint8).view(-1)[5] ^= 1
    broken_norm = update.tensors[norm].clone()
    broken_norm.view(torch.uint8)[3] ^= 1
    add("bytes", {weight: flipped, norm: broken_norm}, [weight, norm], announced=False)
    scales = [name for name in update.tensors if name.endswith("weight_scale")]
    if rig.format.weight_kind == "int" and scales:
        halves = {name: update.tensors[name].repeat_interleave(2, dim=-1) for name in scales}
        add("group size", halves, scales, announced=True)
    served = "w4a8" if rig.format.name == "w4a16" else "w4a16"
    layer = served if rig.format.name == "bf16" else "model.layers.0.mlp.experts"
    for other, offending in ((served, layer), ("w9a16", "w9a16")):
        cases[f"format {other}"] = RefitUpdate(replace(update.manifest, format=other), update.layers), [offending]
    return cases


def broken_rehearsal(rig: Rig) -> dict[str, Any]:
    """What an engine says that is sent other weights than were rehearsed, and whether the next refit mends it."""
    rig.push("B")
    wanted = rig.weights()
    error = rig.refusal(rehearsed(rig.next("A"), rig.format, spoiled="model.norm.weight"))
    versions = rig.rpc("qarl_version")
    rig.push("B")
    return {"error": error, "versions": versions, "mended": rig.weights() == wanted}


def cuts(rig: Rig) -> dict[str, dict[str, Any]]:
    """Whether the old version keeps serving when the sender fails after so many tensors."""
    rig.push("A")
    before = rig.state()
    found = {}
    for count in (0, 1, 7, len(rig.updates["B"].tensors) - 1):
        error = rig.refusal(rig.next("B"), CutSender(rig.sender, count))
        found[str(count)] = {"error": error, "same": rig.state() == before}
    rig.push("B")
    found["next refit"] = {"error": "", "same": rig.state() == before}
    return found


def faults(rig: Rig) -> dict[str, Any]:
    """What the engine does under every fault of the campaign; its process is killed in the end."""
    target = VllmTarget(rig)
    campaign = Campaign(target, 0, rig.scratch / "faults")
    campaign.there_and_back(rig.case.rounds)
    # vLLM's CPU layers take no rehearsal, and an engine that broke off in one does not come back there.
    campaign.scripts()
    if not rig.case.in_this_process:
        campaign.scripts(rehearsed=True, every=3)
        campaign.pushes(kills=False)
    killed = "" if rig.case.in_this_process else campaign.last_words(target.kill)
    return campaign.counts.facts() | {"killed": killed}


def missed_broadcast(rig: Rig) -> dict[str, Any]:
    """What a rank says that takes no part in a broadcast, and whether the next refit reaches it."""
    rig.push("B")
    wanted = rig.respond()
    rig.push("A")
    before = rig.state()
    error = rig.refusal(with_stranger(rig.next("B"), rig.format, "model.stranger"))
    same = rig.state() == before
    rig.push("B")
    return {"error": error, "same": same, "reached": rig.respond() == wanted != before[0]}


def in_flight(rig: Rig) -> dict[str, Any]:
    """Whether a refit is kept off requests that are being answered."""
    served = rig.push("A").version
    whole = rig._generate(PROMPTS[:1])
    rig.llm.reset_prefix_cache()
    engine, outputs = rig.llm.llm_engine, []
    engine.add_request("flying", {"prompt_token_ids": PROMPTS[0]}, sampling(), lora_request=rig.request)
    for _ in range(3):
        outputs += engine.step()
    error = rig.refusal(rig.next("B"))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    kept = rig.rpc("qarl_version") == [{"version": served, "whole": True}] * rig.case.tensor_parallel
    return {"error": error, "same": [answered(outputs[-1])] == whole, "kept": kept}


def memory(rig: Rig) -> list[list[dict[str, int]]]:
    """Every rank's memory after each of 20 refits."""
    found = []
    for count in range(20):
        rig.push("AB"[count % 2])
        found.append(rig.rpc("qarl_memory"))
    return found


def saved_adapter(rig: Rig) -> dict[str, bool]:
    """Whether vLLM answers alike with an adapter that it reads from a folder, and takes refits again after that."""
    from vllm.lora.request import LoRARequest

    rig.push("B")
    other = rig.respond()
    rig.push("A")
    wanted, buffers = rig.respond(), rig.digests()
    refitted, rig.request = rig.request, LoRARequest("saved", ADAPTER_ID + 1, str(rig.scratch / "adapter_A"))
    read = rig.respond()
    found = {"same": read == wanted, "same_buffers": rig.digests() == buffers, "differ": other != wanted}
    rig.request = refitted
    rig.push("A")
    return found | {"refitted_again": rig.respond() == wanted}


def sleep(rig: Rig) -> dict[str, Any]:
    """Whether a refit after a night gives what it gave by day, and whether the night changed anything."""
    rig.push("B")
    by_day, by_day_weights = rig.state(), rig.weights()
    _night(rig)
    after_night = rig.state()
    rig.push("A")
    _night(rig)
    rig.push("B")
    refitted = rig.weights()
    _night(rig, forgets=True)
    ask(rig.llm, "qarl_overwrite_what_refits_bring")
    rig.push("B")
    return {
        "after_night": after_night == by_day,
        "refitted": refitted == by_day_weights,
        "remembered": rig.weights() == by_day_weights,
    }


def _night(rig: Rig, *, forgets: bool = False) -> None:
    if forgets:
        ask(rig.llm, "qarl_forget")
    unnoticed = False
    try:
        rig.llm.sleep(level=1)
    except Exception as error:
        # vLLM holds the memory that another test's engine took meanwhile for its own; it sleeps without knowing.
        unnoticed = "Memory usage increased" in str(error)
        if not unnoticed:
            raise
    if forgets:
        ask(rig.llm, "qarl_asleep")
    if unnoticed:
        rig.llm.collective_rpc("wake_up")
    rig.llm.wake_up()
