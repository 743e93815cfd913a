"""The blocks of data sets; keys are NeMo-RL's where both have them. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from qarl_nemo.config import StrictModel
from qarl_nemo.config.strict import InHome
from qarl_nemo.data.benchmarks import Benchmark, find_benchmark
from qarl_nemo.data.named import NAMED, OWN, AnswerFormat


def _has_a_place(template: str) -> str:
    if "{problem}" not in template:
        raise ValueError("there is no {problem} in it, which stands for the problem")
    return template


PromptTemplate = Annotated[str, AfterValidator(_has_a_place)]


class DatasetConfig(StrictModel):
    """Problems with answers: a set known by name, or records of one's own from a file, a folder or the hub."""

    dataset_name: Literal["ResponseDataset", "gsm8k", "math", "openr1_math"] = OWN
    """`ResponseDataset` reads `data_path`; the others know their place on the hub, their fields and answers."""
    data_path: Annotated[str | None, InHome] = Field(
        None, min_length=1, description="Local file or folder, or a name on the hub; None = the named one."
    )
    subset: str | None = Field(None, description="The hub's configuration; None = the named set's, or the only one.")
    split: str = Field("train", description="Split, or a part of one: train[:100], train[90%:].")
    input_key: str | None = Field(None, description="Field of the problem, text or messages; None = the set's.")
    output_key: str | None = Field(None, description="Field of the answer; a.b leads into nested fields.")
    answer_format: AnswerFormat | None = None
    """How the answer stands in its field: `plain`, after the last `####` (`hash`), or in the last `\\boxed{}`."""
    prompt_template: PromptTemplate = "{problem}"
    """The user's message, {problem} standing for the problem."""
    system_prompt: str | None = Field(None, description="A system message before it.")
    reward_function: str | None = Field(None, description="module:function in the place of math-verify.")

    @model_validator(mode="after")
    def own_records_have_a_place(self) -> "DatasetConfig":
        """Require a path unless the set is known by name."""
        if self.dataset_name == OWN and self.data_path is None:
            raise ValueError(
                f"data_path is missing: a local file or folder, or a name on the hub; without one, dataset_name is one "
                f"of {', '.join(NAMED)}"
            )
        return self

    @property
    def fields(self) -> tuple[str, str, AnswerFormat]:
        """The fields of problem and answer, and the answer's format: what is set here, else the named set's."""
        named = NAMED.get(self.dataset_name)
        defaults = (named.input_key, named.output_key, named.answer_format) if named else ("problem", "answer", "plain")
        return (
            self.input_key or defaults[0],
            self.output_key or defaults[1],
            self.answer_format or defaults[2],
        )

    @property
    def title(self) -> str:
        """What people call the set."""
        return self.dataset_name if self.dataset_name != OWN else str(self.data_path)


class BenchmarkConfig(StrictModel):
    """A benchmark as a validation set: `qarl eval`'s problems, words and check."""

    benchmark: str
    """Its name in `qarl eval`: math500, aime24, gsm8k."""
    data_path: Annotated[str | None, InHome] = Field(
        None, min_length=1, description="Local copy in the set's own fields; None = the hub."
    )
    prompt_template: PromptTemplate | None = None
    """The user's message, {problem} standing for the question; None = the words of `qarl eval`."""
    system_prompt: str | None = Field(None, description="A system message before it.")

    @model_validator(mode="before")
    @classmethod
    def replaces_a_data_set(cls, values: Any) -> Any:
        """Refuse a benchmark that was merged into a default's data set."""
        if isinstance(values, dict) and "dataset_name" in values:
            raise ValueError(
                "it is a data set and a benchmark; write `_override_: true` beside `benchmark`, so that it replaces "
                "the data set of the config that this one builds on"
            )
        return values

    @field_validator("benchmark")
    @classmethod
    def is_one_benchmark(cls, name: str) -> str:
        """Require the name of one benchmark."""
        find_benchmark(name)
        return name

    @property
    def record(self) -> Benchmark:
        """Where it is, and how it is asked and checked."""
        return find_benchmark(self.benchmark)

    @property
    def title(self) -> str:
        """What people call it."""
        return self.record.title


def is_benchmark(dataset: Any) -> Literal["a data set", "a benchmark"]:
    """Tell which of its two kinds an entry of `validation` is."""
    named = "benchmark" in dataset if isinstance(dataset, dict) else isinstance(dataset, BenchmarkConfig)
    return "a benchmark" if named else "a data set"


def one_or_several(datasets: Any) -> Literal["one", "several"]:
    """Tell which of the two forms of a list of data sets this is."""
    return "several" if isinstance(datasets, list | tuple) else "one"


# Tagged, so that an error is about the form that was written.
Datasets = Annotated[
    Annotated[DatasetConfig, Tag("one")]
    | Annotated[list[DatasetConfig], Tag("several"), Field(min_length=1, max_length=1000)],
    Discriminator(one_or_several),
]

ValidationSet = Annotated[
    Annotated[DatasetConfig, Tag("a data set")] | Annotated[BenchmarkConfig, Tag("a benchmark")],
    Discriminator(is_benchmark),
]
ValidationSets = Annotated[
    Annotated[ValidationSet, Tag("one")]
    | Annotated[list[ValidationSet], Tag("several"), Field(min_length=1, max_length=1000)],
    Discriminator(one_or_several),
]


class DatasetsData(StrictModel):
    """Data sets of problems, one or a list of them, which are then mixed."""

    source: Literal["datasets"]
    train: Datasets = Field(..., examples=["{dataset_name: gsm8k}", "{data_path: problems.jsonl}"])
    validation: ValidationSets | None = None
    """Data sets or benchmarks, scored in turn; None = the first training problems."""
    max_input_seq_length: int | None = Field(
        None, ge=1, le=1_048_576, description="Longest prompt, tokens; None = what rollout.max_new_tokens leaves."
    )
    overlong_prompts: Literal["error", "skip"] = "error"
    """What happens to longer prompts: `skip` leaves them out and says how many."""
