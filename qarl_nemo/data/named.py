"""The data sets that are known by name: where they are, and in which fields problem and answer stand."""

from dataclasses import dataclass
from typing import Literal

AnswerFormat = Literal["plain", "hash", "boxed"]
# NeMo-RL's name for records of one's own.
OWN = "ResponseDataset"


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """Where a data set is, and how its records read.

    Attributes:
        hub_path: its name on the Hugging Face hub.
        subset: the hub's configuration; None for the only one.
        input_key: field of the problem; a dot leads into a nested one.
        output_key: field of the answer.
        answer_format: how the answer stands in its field.
        copies: where files for a machine without the hub come from.
    """

    hub_path: str
    subset: str | None
    input_key: str
    output_key: str
    answer_format: AnswerFormat
    copies: str


NAMED = {
    "gsm8k": NamedDataset(
        hub_path="openai/gsm8k",
        subset="main",
        input_key="question",
        output_key="answer",
        answer_format="hash",
        copies="train.jsonl and test.jsonl of github.com/openai/grade-school-math",
    ),
    "math": NamedDataset(
        hub_path="DigitalLearningGmbH/MATH-lighteval",
        subset=None,
        input_key="problem",
        output_key="solution",
        answer_format="boxed",
        copies="files with MATH's fields `problem` and `solution`",
    ),
    "openr1_math": NamedDataset(
        hub_path="Elliott/Openr1-Math-46k-8192",
        subset=None,
        input_key="prompt",
        output_key="reward_model.ground_truth",
        answer_format="plain",
        copies="files with verl's fields `prompt` and `reward_model.ground_truth`",
    ),
}
