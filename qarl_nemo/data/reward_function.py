"""A reward function of one's own, by its import path."""

import contextlib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

_MAX_QUOTED = 200
# Advantages are computed in FP32, where its square has to fit.
_LARGEST = 1e18
# What verl passes to a reward function, by name.
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


class RewardFunction:
    """Calls `function(response, answer)`, or `function(response, answer, record)` if it takes three.

    A third parameter with a default is an option of the function's own, unless it is called `record`.

    A function with verl's `solution_str` and `ground_truth` is called by name, as verl calls it, with the record's
    `data_source` and `extra_info`; of a mapping that a function returns, `score` is the reward.

    Args:
        path: `module:function`; the module is found in the current folder or wherever Python finds modules.

    Attributes:
        path: `module:function`.
        code_sha256: checksum of the source of its module, and of the one that the function comes from; None if neither
            has a source.

    Raises:
        ValueError: the path is not of this form, the module cannot be imported, or has no such function.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._function = _load(path)
        # Taken now, because the file may change while what was imported from it runs on.
        self.code_sha256 = _code_sha256(path, self._function)
        self._verl = _verl_parameters(self._function)
        self._takes_record = _takes(self._function, 3) and not _has_own_option(self._function)
        if not self._verl and not self._takes_record and not _takes(self._function, 2):
            raise ValueError(
                f"reward function {path} takes {inspect.signature(self._function)}; it is called with response and "
                "answer, or with response, answer and record (the data set's fields), or as verl's with "
                + ", ".join(_VERL)
            )

    @property
    def reads_record(self) -> bool:
        """Whether rewards may depend on the record's other fields."""
        return self._takes_record or bool(set(self._verl) - {"solution_str", "ground_truth"})

    def __call__(self, response: str, answer: str, record: Mapping[str, Any]) -> float:
        """Return the reward of one response.

        Args:
            response: decoded text.
            answer: the problem's answer.
            record: all fields of the data set's record.

        Returns:
            Any finite number.

        Raises:
            ValueError: the function failed, or returned something else.
        """
        named = {"solution_str": response, "ground_truth": answer}
        arguments = (response, answer, record) if self._takes_record else (response, answer)
        quoted = f"for the answer {answer[:_MAX_QUOTED]!r} and the response {response[:_MAX_QUOTED]!r}"
        try:
            if self._verl:
                value = self._function(**{name: named.get(name, record.get(name)) for name in self._verl})
            else:
                value = self._function(*arguments)
        # A function that runs what a model wrote may meet its exit().
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"reward function {self.path} failed with {type(error).__name__}: {str(error)[:_MAX_QUOTED]} {quoted}; "
                "QARL_DEBUG=1 shows the traceback"
            ) from error
        number = _number(value)
        if number is None or not abs(number) <= _LARGEST:
            raise ValueError(
                f"reward function {self.path} returned {str(value)[:_MAX_QUOTED]} {quoted}; it must be a number of at "
                f"most {_LARGEST:g} in size, or a mapping whose `score` is one"
            )
        return number


def _number(value: Any) -> float | None:
    """Return what a function returned as a number; None if it is none."""
    try:
        return float(value["score"] if isinstance(value, Mapping) else value)
    # Its type may be anybody's.
    except Exception:  # noqa: BLE001
        return None


def _load(path: str) -> Any:
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ValueError(f"reward function {path!r} must be module:function, my_rewards:score for example")
    # Python looks into the current folder for its own programs only. Last, so that no folder there hides a package.
    if "" not in sys.path:
        sys.path.append("")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's, and importing runs it
        raise ValueError(
            f"reward function {path}: module {module_name} cannot be imported, {type(error).__name__}: "
            f"{str(error)[:_MAX_QUOTED]}; it is looked for in the current folder and on PYTHONPATH"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"reward function {path}: {found.__name__} has no {part!r}; it has {_functions(found)}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"reward function {path} is {type(found).__name__}, which cannot be called")
    return found


def _code_sha256(path: str, function: Any) -> str | None:
    """Return the checksum of the modules that name and define a function, as far as they have a source."""
    names = (path.partition(":")[0], getattr(function, "__module__", None))
    modules = dict.fromkeys(sys.modules[name] for name in names if name in sys.modules)
    sources = []
    for module in modules:
        # A builtin or compiled one has none.
        with contextlib.suppress(OSError, TypeError):
            sources.append(inspect.getsource(module))
    return hashlib.sha256("\0".join(sources).encode()).hexdigest() if sources else None


def _functions(module: Any) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return ", ".join(names)[:_MAX_QUOTED] or "no functions"


def _verl_parameters(function: Any) -> list[str]:
    """Return which of verl's arguments one of its reward functions takes; none of any other function."""
    try:
        signature = inspect.signature(function)
        taken = [name for name in _VERL if name in signature.parameters]
        signature.bind(**dict.fromkeys(taken))
    except (TypeError, ValueError):  # it needs others, or is a builtin that does not tell
        return []
    return taken if {"solution_str", "ground_truth"} <= set(taken) else []


def _has_own_option(function: Any) -> bool:
    """Tell whether a third parameter has a default and another name than `record`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin that does not tell
        return False
    third = parameters[2] if len(parameters) > 2 else None
    return third is not None and third.default is not inspect.Parameter.empty and third.name != "record"


def _takes(function: Any, num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        return num_arguments == 2
    return True
