"""An update on its way into one rank of an engine: announced, received, verified, and only then passed on."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from qarl_nemo.refit.manifest import Manifest, checksum_on_device, narrowed, read_checksums


class IncomingUpdate:
    """What has arrived of one update.

    Args:
        manifest: what the learner announced.
        layer_of: names the layer of this rank that takes a tensor.
        part: returns what this rank keeps of a whole tensor.

    Attributes:
        layers: what this rank keeps, by its own layers and by published name.
    """

    def __init__(
        self, manifest: Manifest, *, layer_of: Callable[[str], str], part: Callable[[str, Tensor], Tensor]
    ) -> None:
        self.manifest = manifest
        self.layers: dict[str, dict[str, Tensor]] = {}
        self._layer_of = layer_of
        self._part = part
        self._nested = manifest.nested
        self._checksums: dict[str, Tensor] = {}
        self._arrived: set[str] = set()
        self._problems: list[str] = []

    def add(self, tensors: Mapping[str, Tensor], *, buffered: bool = False) -> None:
        """Take whole tensors in, rounded where they come nested; `problems` reports what is wrong with them.

        Args:
            tensors: tensors by published name; their bytes must stay until the update is done.
            buffered: whether the tensors are this rank's own buffers, of which it frees what it does not serve.
        """
        for name, tensor in tensors.items():
            again = name in self._arrived and name in self.manifest.records
            problem = f"sent twice: {name}" if again else self.manifest.problem(name, tensor)
            self._arrived.add(name)
            if problem:
                self._problems.append(problem)
                continue
            self._checksums[name] = checksum_on_device(tensor)
            whole = narrowed(name, tensor, self._nested)
            part = self._part(name, whole)
            owned = buffered or whole is not tensor
            kept = part.clone() if owned and part.numel() < whole.numel() else part
            self.layers.setdefault(self._layer_of(name), {})[name] = kept

    def refuse(self, problems: Iterable[str]) -> None:
        """Add further reasons against this update to `problems`."""
        self._problems += problems

    def problems(self) -> list[str]:
        """Say which missing, unexpected, repeated or different tensors make this update unfit to serve."""
        return self.problems_of_arrived() + self.manifest.missing(self._arrived)

    def problems_of_arrived(self) -> list[str]:
        """Say what is wrong with the tensors that have arrived: unexpected, repeated and different ones."""
        # Each checksum is read only once, because reading waits for the device.
        unread, self._checksums = self._checksums, {}
        for name, value in zip(unread, read_checksums(unread.values()), strict=True):
            if value != self.manifest.records[name].checksum:
                self._problems.append(f"{name}: its bytes differ from the manifest's checksum")
        return list(self._problems)
