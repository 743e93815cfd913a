"""Every way from a learner to the ranks of an engine brings the announced bytes, or says what is wrong with them.

The ranks here are the real receiving half without an engine around it; `tests/integration` has them inside vLLM.
"""

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from qarl_kernels import get_format
from qarl_nemo.names import layer_of
from qarl_nemo.refit.arrive import Arrivals
from qarl_nemo.refit.incoming import IncomingUpdate
from qarl_nemo.refit.ipc import Imports, export_tensors, in_one_piece, memory_grows, shareable, shareable_memory
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate, StreamedUpdate
from qarl_nemo.refit.send import CollectiveSender, DirectSender, FileSender, IpcSender, messages
from support.asserts import assert_bitwise_equal
from support.programs import run_program

CPU = torch.device("cpu")
PACKED = "model.layers.0.mlp.experts.down_proj.weight_packed"
SCALE = "model.layers.0.mlp.experts.down_proj.weight_scale"
FP8 = "model.layers.1.self_attn.q_proj.weight"


class Ranks:
    """The receiving half of `num_ranks` ranks, each of which keeps its share of the experts."""

    def __init__(self, manifest: Manifest, num_ranks: int, *, process: int | None = None) -> None:
        self.process = process or os.getpid()
        self.arrivals = [Arrivals(rank, CPU) for rank in range(num_ranks)]
        self.updates = [
            IncomingUpdate(manifest, layer_of=layer_of, part=lambda name, whole, r=r: self.part(name, whole, r))
            for r in range(num_ranks)
        ]

    def part(self, name, whole, rank):
        return whole.chunk(len(self.arrivals))[rank] if ".experts." in name else whole

    def collective_rpc(self, method, *, args=()):
        calls = {"qarl_process": self._process, "qarl_connect": self._connect, "qarl_receive": self._receive}
        with ThreadPoolExecutor(len(self.arrivals)) as pool:
            answers = [pool.submit(calls[method], rank, *args) for rank in range(len(self.arrivals))]
        return [answer.result() for answer in answers]

    def reset_prefix_cache(self):
        return True

    def _process(self, rank):
        return self.process

    def _connect(self, rank, message):
        self.arrivals[rank].connect(dict(message))

    def _receive(self, rank, version, kind, message):
        assert version == self.updates[rank].manifest.version
        self.arrivals[rank].receive(kind, message, self.updates[rank])


@pytest.fixture
def update() -> RefitUpdate:
    torch.manual_seed(0)
    tensors = {
        PACKED: torch.randint(-(2**31), 2**31 - 1, (4, 6, 5), dtype=torch.int32),
        SCALE: torch.rand(4, 6, 1).bfloat16(),
        # A view that no file and no broadcast takes as it is.
        FP8: torch.randn(3, 8).to(torch.float8_e4m3fn).T,
        "model.norm.weight": torch.rand(7).bfloat16(),
        "scalar": torch.tensor(3.0),
    }
    return RefitUpdate(Manifest.of([tensors], version=3, fmt="w4a16"), [tensors])


def arrived(incoming):
    """What a rank keeps, by published name."""
    return {name: part for parts in incoming.layers.values() for name, part in parts.items()}


def senders(tmp_path):
    return {"direct": DirectSender(), "file": FileSender(tmp_path), "gloo": CollectiveSender(2, CPU, backend="gloo")}


@pytest.mark.parametrize(("kind", "num_ranks"), [("direct", 1), ("file", 1), ("file", 2), ("gloo", 2)])
def test_every_rank_gets_its_part_bit_for_bit(update, tmp_path, kind, num_ranks):
    ranks = Ranks(update.manifest, num_ranks)
    sender = senders(tmp_path)[kind]
    sender.send(update, ranks)
    for rank, incoming in enumerate(ranks.updates):
        assert incoming.problems() == []
        for layer, parts in incoming.layers.items():
            assert parts.keys() == {name for name in update.tensors if layer_of(name) == layer}
        assert len(arrived(incoming)) == len(update.tensors)
        for name, part in arrived(incoming).items():
            assert_bitwise_equal(part, ranks.part(name, update.tensors[name], rank))
    sender.release()


def layer_by_layer(update, made):
    """What a learner that cannot hold the update whole makes of it, and forgets."""
    for names in ([PACKED, SCALE], [FP8], ["model.norm.weight", "scalar"]):
        made += names
        layer = {name: update.tensors[name].clone() for name in names}
        yield layer
        layer.clear()


@pytest.mark.parametrize(("kind", "num_ranks"), [("direct", 1), ("file", 1), ("file", 2), ("gloo", 2)])
def test_a_streamed_update_arrives_layer_by_layer(update, tmp_path, kind, num_ranks):
    made = []
    streamed = StreamedUpdate(lambda: layer_by_layer(update, made), get_format("w4a16"), version=3)
    assert streamed.manifest == update.manifest
    assert streamed.num_bytes == update.num_bytes
    ranks = Ranks(streamed.manifest, num_ranks)
    with streamed:
        senders(tmp_path)[kind].send(streamed, ranks)
    for rank, incoming in enumerate(ranks.updates):
        assert incoming.problems() == []
        for name, part in arrived(incoming).items():
            assert_bitwise_equal(part, ranks.part(name, update.tensors[name], rank))
    assert made == 2 * list(update.tensors)


def test_only_what_stays_is_one_message(update):
    streamed = StreamedUpdate(lambda: layer_by_layer(update, []), get_format("w4a16"), version=3)
    with streamed:
        sent = [[name for layer in layers for name in layer] for layers in messages(streamed)]
    assert sent == [[PACKED, SCALE], [FP8], ["model.norm.weight", "scalar"]]
    whole = RefitUpdate(update.manifest, [{name: tensor} for name, tensor in update.tensors.items()])
    assert list(messages(whole)) == [whole.layers]


def test_a_streamed_update_that_nobody_took_is_made_to_its_end(update):
    made = []
    streamed = StreamedUpdate(lambda: layer_by_layer(update, made), get_format("w4a16"), version=3)
    with suppress(ConnectionError), streamed:
        next(streamed.layer_by_layer())
        raise ConnectionError
    assert made == 2 * list(update.tensors)


def test_a_streamed_update_that_changed_after_its_manifest_is_refused(update):
    streamed = StreamedUpdate(lambda: layer_by_layer(update, []), get_format("w4a16"), version=3)
    update.tensors[PACKED].view(-1)[7] ^= 1
    ranks = Ranks(streamed.manifest, 1)
    DirectSender().send(streamed, ranks)
    assert ranks.updates[0].problems() == [f"{PACKED}: its bytes differ from the manifest's checksum"]


@pytest.mark.parametrize(("kind", "num_ranks"), [("direct", 1), ("file", 2), ("gloo", 2)])
def test_one_wrong_bit_is_found_by_every_rank(update, tmp_path, kind, num_ranks):
    ranks = Ranks(update.manifest, num_ranks)
    update.tensors[PACKED].view(-1)[7] ^= 1
    senders(tmp_path)[kind].send(update, ranks)
    expected = [f"{PACKED}: its bytes differ from the manifest's checksum"]
    assert [incoming.problems() for incoming in ranks.updates] == [expected] * num_ranks


def test_a_second_update_uses_the_same_connection(update):
    ranks = Ranks(update.manifest, 2)
    sender = CollectiveSender(2, CPU, backend="gloo")
    sender.send(update, ranks)
    group = sender._group
    ranks.updates = Ranks(update.manifest, 2).updates
    sender.send(update, ranks)
    assert sender._group is group
    assert [incoming.problems() for incoming in ranks.updates] == [[], []]


@pytest.mark.parametrize("absent", [0, 1])
def test_an_update_arrives_after_one_whose_broadcast_a_rank_missed(update, monkeypatch, absent):
    ranks = Ranks(update.manifest, 2)
    sender = CollectiveSender(2, CPU, backend="gloo", timeout_s=2.0)
    sender.send(update, ranks)
    ranks.updates = Ranks(update.manifest, 2).updates
    with monkeypatch.context() as patched:
        patched.setattr(ranks.arrivals[absent], "receive", lambda *_: None)
        with pytest.raises(RuntimeError):
            sender.send(update, ranks)
    ranks.updates = Ranks(update.manifest, 2).updates
    sender.send(update, ranks)
    assert [incoming.problems() for incoming in ranks.updates] == [[], []]


def test_a_rank_that_cannot_join_is_the_reason_and_not_that_the_others_waited(update, monkeypatch):
    ranks = Ranks(update.manifest, 2)

    def refuse(message):
        raise ValueError("has no such backend")

    monkeypatch.setattr(ranks.arrivals[0], "connect", refuse)
    with pytest.raises(ValueError, match="has no such backend"):
        CollectiveSender(2, CPU, backend="gloo", timeout_s=1.0).send(update, ranks)


def test_everything_wrong_is_listed_at_once(update):
    ranks = Ranks(update.manifest, 1)
    incoming = ranks.updates[0]
    incoming.add({PACKED: update.tensors[PACKED], "stranger": torch.ones(1), FP8: update.tensors[FP8].float()})
    incoming.add({PACKED: update.tensors[PACKED], SCALE: update.tensors[SCALE][:2]})
    assert incoming.problems() == [
        "not in the manifest: stranger",
        f"{FP8}: got float32 [8, 3], the manifest says float8_e4m3fn [8, 3]",
        f"sent twice: {PACKED}",
        f"{SCALE}: got bfloat16 [2, 6, 1], the manifest says bfloat16 [4, 6, 1]",
        "missing: model.norm.weight",
        "missing: scalar",
    ]


def test_broadcasts_that_a_rank_cannot_take_are_refused_before_it_waits(update):
    ranks = Ranks(update.manifest, 1)
    rank, incoming = ranks.arrivals[0], ranks.updates[0]
    with pytest.raises(ValueError, match=r"^not in the manifest: stranger$"):
        rank.receive("collective", {"names": [FP8, "stranger"]}, incoming)
    with pytest.raises(RuntimeError, match="in no learner's group: qarl_connect comes first"):
        rank.receive("collective", {"names": [FP8]}, incoming)
    with pytest.raises(ValueError, match="unknown transport 'pigeon'; legal: direct, ipc, ipc_copied, file"):
        rank.receive("pigeon", {}, incoming)
    assert arrived(incoming) == {}


@pytest.mark.parametrize("kind", ["file", "gloo"])
def test_parts_of_buffers_do_not_keep_the_whole_buffer(update, tmp_path, kind):
    ranks = Ranks(update.manifest, 2)
    senders(tmp_path)[kind].send(update, ranks)
    part = arrived(ranks.updates[1])[PACKED]
    assert part.untyped_storage().nbytes() == part.nbytes


def test_direct_sender_refuses_an_engine_elsewhere(update):
    with pytest.raises(ValueError, match="use IpcSender"):
        DirectSender().send(update, Ranks(update.manifest, 1, process=1))
    with pytest.raises(ValueError, match="one engine rank"):
        DirectSender().send(update, Ranks(update.manifest, 2))


def test_ipc_sender_names_tensors_that_are_not_on_a_gpu(update):
    with pytest.raises(ValueError, match=rf"not on a GPU: {PACKED}, .*scalar"):
        IpcSender().send(update, Ranks(update.manifest, 1))


def test_unknown_transports_and_backends_name_the_legal_ones(update):
    ranks = Ranks(update.manifest, 1)
    with pytest.raises(ValueError, match="legal: direct, ipc, ipc_copied, file, collective"):
        ranks.collective_rpc("qarl_receive", args=(3, "pigeon", {}))
    with pytest.raises(ValueError, match="legal: nccl, gloo"):
        CollectiveSender(1, CPU, backend="mpi", timeout_s=5).send(update, ranks)


@pytest.mark.gpu
def test_memory_that_this_process_exports_is_not_its_own_to_import():
    # CUDA refuses to open a handle in the process that made it: what two processes do is tested with the engine.
    tensor = torch.arange(5, device="cuda")
    description = export_tensors({"a": tensor})["a"]
    assert description["num_bytes"] == tensor.nbytes
    with pytest.raises(RuntimeError, match="sees only"):
        Imports().import_bytes(description | {"gpu": "another"})


@pytest.mark.gpu
def test_what_lies_in_one_piece_is_exported_once():
    pieces = in_one_piece({"a": torch.arange(5, device="cuda"), "b": torch.ones(3, device="cuda")})
    first, second = export_tensors(pieces).values()
    assert first["storage"] == second["storage"]
    assert first["counter"] == second["counter"]
    assert (first["offset"], second["offset"]) == (0, 256)
    apart = export_tensors({name: tensor.clone() for name, tensor in pieces.items()})
    assert apart["a"]["counter"] != apart["b"]["counter"]


def test_one_piece_holds_the_same_tensors():
    tensors = {
        "packed": torch.arange(7, dtype=torch.int32),
        "nothing": torch.empty(0, 3),
        "scale": torch.linspace(0, 1, 5, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }
    found = in_one_piece(tensors)
    assert list(found) == list(tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    starts = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in found.values())
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(starts))
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].is_contiguous()
        assert found[name].storage_offset() * tensor.element_size() % 256 == 0
    assert in_one_piece({}) == {}


GROWING = "garbage_collection_threshold:0.8, expandable_segments : True"


@pytest.fixture
def said(monkeypatch):
    """What torch's allocator is told, on a machine that may have no GPU; at first nothing says that memory grows."""
    calls = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    return calls


@pytest.mark.parametrize(
    ("settings", "grows"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": GROWING}, True),
        ({"PYTORCH_ALLOC_CONF": GROWING}, True),
        # torch reads the other variable alone, and the last of two values.
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": GROWING}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": f"{GROWING},expandable_segments:False"}, False),
    ],
)
def test_memory_grows_if_torch_reads_so(monkeypatch, said, settings, grows):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert memory_grows() is grows
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not memory_grows()


def test_growing_is_off_only_inside_and_other_settings_stay(monkeypatch, said):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", GROWING)
    with shareable_memory():
        assert said == [f"{GROWING},expandable_segments:False"]
    assert said[1:] == [GROWING]
    with suppress(MemoryError), shareable_memory():
        raise MemoryError
    assert said == 2 * [f"{GROWING},expandable_segments:False", GROWING]


def test_what_is_exported_from_growing_memory_is_copied_while_growing_is_off(monkeypatch, said):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", GROWING)
    turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3)).t()
    copy = shareable(turned)
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert torch.equal(copy, turned)
    whole = torch.arange(4)
    assert shareable(whole).data_ptr() != whole.data_ptr()
    assert torch.equal(in_one_piece({"whole": whole})["whole"], whole)
    assert said == 3 * [f"{GROWING},expandable_segments:False", GROWING]


def test_nothing_is_copied_or_set_where_memory_does_not_grow(said):
    whole = torch.arange(4)
    with shareable_memory():
        assert shareable(whole).data_ptr() == whole.data_ptr()
    in_one_piece({"whole": whole})
    assert said == []


@pytest.mark.gpu
@pytest.mark.parametrize("grows", [True, False])
def test_another_process_opens_what_lies_in_one_piece(grows):
    settings = f"expandable_segments:{grows}"
    printed = run_program("refit.run_shared_memory", PYTORCH_CUDA_ALLOC_CONF=settings)
    [facts] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    # Without the change of the setting a tensor of the same size lies where memory grows.
    assert facts["plain_expandable"] is grows
    assert facts["expandable"] == dict.fromkeys(facts["same"], False)
    assert facts["same"] == dict.fromkeys(["small", "large", "copied"], True)
    assert facts["plain_after"] is grows
