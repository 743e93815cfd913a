"""The ranks' half of `send.py`: takes in the tensors that a sender offers to one rank of an engine."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_nemo.refit.collective import address_towards, broadcast, make_group
from qarl_nemo.refit.incoming import IncomingUpdate
from qarl_nemo.refit.ipc import Imports
from qarl_nemo.refit.manifest import TensorRecord


class Arrivals:
    """All the ways in which tensors reach one rank.

    Args:
        rank: the rank's number in the engine.
        device: the rank's device.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._group: Any = None

    def connect(self, message: dict[str, Any]) -> None:
        """Join a learner's process group.

        Args:
            message: host, port and the settings of `make_group`.
        """
        settings = dict(message)
        host, port = settings.pop("host"), settings.pop("port")
        timeout = timedelta(seconds=settings["timeout_s"])
        store = dist.TCPStore(host, port, None, is_master=False, timeout=timeout)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._group = make_group(store, self.rank + 1, host=address_towards(host, port), **settings)

    def receive(self, kind: str, message: Any, update: IncomingUpdate) -> None:
        """Add what a sender offers to an update.

        Args:
            kind: `direct`, `ipc`, `ipc_copied`, `file` or `collective`.
            message: the sender's message.
            update: takes the tensors.

        Raises:
            ValueError: unknown kind, or a broadcast of tensors that the manifest does not announce.
        """
        ways: dict[str, Callable[[Any, IncomingUpdate], None]] = {
            "direct": self._direct,
            "ipc": self._ipc,
            "ipc_copied": self._ipc_copied,
            "file": self._file,
            "collective": self._collective,
        }
        if kind not in ways:
            raise ValueError(f"unknown transport {kind!r}; legal: {', '.join(ways)}")
        ways[kind](message, update)

    def _direct(self, tensors: dict[str, Tensor], update: IncomingUpdate) -> None:
        update.add(tensors)

    def _ipc(self, descriptions: dict[str, list[dict[str, Any]]], update: IncomingUpdate) -> None:
        imports = Imports()
        for name, by_rank in descriptions.items():
            raw, record = imports.import_bytes(by_rank[self.rank]), update.manifest.records.get(name)
            # A tensor that was not announced or has another size stays bytes, and `add` reports it.
            update.add({name: raw if record is None else _shaped(raw, record)})

    def _ipc_copied(self, descriptions: dict[str, list[dict[str, Any]]], update: IncomingUpdate) -> None:
        imports = Imports()
        for name, by_rank in descriptions.items():
            raw, record = imports.import_bytes(by_rank[self.rank]).clone(), update.manifest.records.get(name)
            update.add({name: raw if record is None else _shaped(raw, record)}, buffered=True)
        # The copy must be finished, because the learner will overwrite this memory with the next layer.
        torch.cuda.synchronize(self.device)

    def _file(self, message: dict[str, str], update: IncomingUpdate) -> None:
        from safetensors import safe_open

        with safe_open(Path(message["path"]), framework="pt", device=str(self.device)) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                update.add({name: file.get_tensor(name)}, buffered=True)

    def _collective(self, message: dict[str, list[str]], update: IncomingUpdate) -> None:
        records = update.manifest.records
        unknown = [name for name in message["names"] if name not in records]
        if unknown:
            raise ValueError(f"not in the manifest: {', '.join(unknown)}")
        tensors = {
            name: torch.empty(records[name].shape, dtype=getattr(torch, records[name].dtype), device=self.device)
            for name in message["names"]
        }
        if self._group is None:
            raise RuntimeError("this rank is in no learner's group: qarl_connect comes first")
        broadcast(self._group, list(tensors.values()))
        update.add(tensors, buffered=True)


def _shaped(raw: Tensor, record: TensorRecord) -> Tensor:
    return raw.view(getattr(torch, record.dtype)).view(record.shape) if record.num_bytes == raw.numel() else raw
