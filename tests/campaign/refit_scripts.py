"""The messages of one refit as a script, and every way to spoil it; played to the ranks, whatever they answer."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import Layer

# A method of the ranks and its arguments.
Message = tuple[str, tuple[Any, ...]]
Script = tuple[Message, ...]
Spoiling = Callable[[Script, Script, random.Random], Script]
NUM_FILES = 3
_NUM_SHUFFLED = 5


def save_parts(layers: Sequence[Layer], folder: Path) -> list[Path]:
    """Write layers into files, each of which one message offers.

    Args:
        layers: tensors by name.
        folder: is made.

    Returns:
        The files.
    """
    folder.mkdir(parents=True)
    paths = [folder / f"{part}.safetensors" for part in range(NUM_FILES)]
    for part, path in enumerate(paths):
        tensors = {name: tensor for layer in layers[part::NUM_FILES] for name, tensor in layer.items()}
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
    return paths


def script(manifest: Manifest, paths: list[Path], *, rehearsed: bool) -> Script:
    """Return a whole refit through files, whose messages can be sent any number of times and in any order.

    Args:
        manifest: the update's manifest.
        paths: files of its tensors.
        rehearsed: they come twice.

    Returns:
        The messages.
    """
    version = manifest.version
    sent = [("qarl_receive", (version, "file", {"path": str(path)})) for path in paths]
    messages = [("qarl_begin", (manifest.to_message(), rehearsed)), *sent]
    messages += [("qarl_verify", (version,)), ("qarl_replace", (version,))]
    return (*messages, *sent, ("qarl_replaced", (version,))) if rehearsed else tuple(messages)


def spoilings(sample: Script) -> Iterator[tuple[str, Spoiling]]:
    """Yield every fault, by name.

    Args:
        sample: any script of the kind that is to be spoiled.

    Yields:
        Name, and what makes the fault of a script, one of an older version and a source of chance. Some are harmless:
        whoever verifies twice is served.
    """
    for place, (method, arguments) in enumerate(sample):
        at = f"at {place} ({method})"
        yield f"cut {at}", partial(_cut, place)
        yield f"lost {at}", partial(_lost, place)
        yield f"repeated {at}", partial(_repeated, place)
        if place:
            yield f"reordered {at}", partial(_reordered, place)
        yield f"replayed {at}", partial(_replayed, place)
        yield f"overtaken {at}", partial(_overtaken, place)
        for number in range(len(list(_corruptions((method, arguments), random.Random(0))))):
            yield f"corrupted {number} {at}", partial(_corrupted, place, number)
    for number in range(_NUM_SHUFFLED):
        yield f"shuffled {number}", lambda whole, _, chance: tuple(chance.sample(whole, len(whole)))
    yield "an older one, whole", lambda _, earlier, __: earlier


def _cut(place: int, whole: Script, *_: Any) -> Script:
    return whole[:place]


def _lost(place: int, whole: Script, *_: Any) -> Script:
    return whole[:place] + whole[place + 1 :]


def _repeated(place: int, whole: Script, *_: Any) -> Script:
    return whole[: place + 1] + whole[place:]


def _reordered(place: int, whole: Script, *_: Any) -> Script:
    return (*whole[: place - 1], whole[place], whole[place - 1], *whole[place + 1 :])


def _replayed(place: int, whole: Script, earlier: Script, _: Any) -> Script:
    return (*whole[:place], earlier[place], *whole[place:])


def _overtaken(place: int, whole: Script, earlier: Script, _: Any) -> Script:
    return whole[:place] + earlier + whole[place:]


def _corrupted(place: int, number: int, whole: Script, _: Any, chance: random.Random) -> Script:
    return (*whole[:place], list(_corruptions(whole[place], chance))[number], *whole[place + 1 :])


def _corruptions(message: Message, chance: random.Random) -> Iterator[Message]:
    method, arguments = message
    if method == "qarl_begin":
        manifest, *rest = arguments
        for corrupted in _corrupt_manifests(manifest, chance):
            yield method, (corrupted, *rest)
        return
    version, *rest = arguments
    for other in (version + 1, version - 1, "x", None, -1):
        yield method, (other, *rest)
    yield method, ()
    if method == "qarl_receive":
        kind, offer = rest
        path = Path(offer["path"])
        for other in (_flipped(path, chance), _shortened(path, chance), path.with_suffix(".gone")):
            yield method, (version, kind, {"path": str(other)})
        yield method, (version, kind, 7)
        yield method, (version, "pigeon", offer)


def _corrupt_manifests(manifest: dict[str, Any], chance: random.Random) -> Iterator[Any]:
    yield from (7, {})
    for key, value in (("version", "x"), ("version", None), ("version", 0), ("format", "w9a9"), ("records", [])):
        yield manifest | {key: value}
    name = chance.choice(sorted(manifest["records"]))
    for place, value in ((0, [1]), (0, [-1]), (0, "x"), (1, "float64"), (1, "load"), (2, 0), (2, "x")):
        corrupted = copy.deepcopy(manifest)
        corrupted["records"][name][place] = value
        yield corrupted
    renamed, without = copy.deepcopy(manifest), copy.deepcopy(manifest)
    renamed["records"][f"{name}.other"] = renamed["records"].pop(name)
    del without["records"][name]
    yield from (renamed, without)


def _flipped(path: Path, chance: random.Random) -> Path:
    content = bytearray(path.read_bytes())
    # Within the tensors, which follow a header and its length.
    first = 8 + int.from_bytes(content[:8], "little")
    content[chance.randrange(first, len(content))] ^= 1 << chance.randrange(8)
    return _beside(path, ".flipped", content)


def _shortened(path: Path, chance: random.Random) -> Path:
    content = path.read_bytes()
    return _beside(path, ".shortened", content[: chance.randrange(len(content))])


def _beside(path: Path, ending: str, content: bytes) -> Path:
    other = path.with_suffix(ending)
    other.write_bytes(content)
    return other
