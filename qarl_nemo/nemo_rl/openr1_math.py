"""OpenR1-Math-46K as a NeMo-RL dataset: the paper's training data, or any other with the same fields."""

from typing import Any

from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.datasets.utils import load_dataset_from_path


class OpenR1Math46K(RawDataset):
    """Problems with `prompt` (chat messages) and `reward_model.ground_truth`; the last user message is the problem.

    Args:
        data_path: hub name, or a local file or folder.
        split: the split to read.
        split_validation_size: share or number of problems set aside for validation.
        seed: seeds their choice.
        unread: NeMo-RL's other keys of a dataset.

    Raises:
        ValueError: a record has no user message.

    Source: Elliott/Openr1-Math-46k-8192 on the Hugging Face hub.
    """

    def __init__(
        self,
        data_path: str = "Elliott/Openr1-Math-46k-8192",
        split: str = "train",
        split_validation_size: float = 0,
        seed: int = 42,
        **unread: Any,  # noqa: ARG002
    ) -> None:
        self.task_name = "OpenR1-Math-46K"
        records = load_dataset_from_path(data_path, None, split)
        self.dataset = records.map(self.format_data, remove_columns=records.column_names)
        self.val_dataset = None
        self.split_train_validation(split_validation_size, seed)

    def format_data(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return one record as problem and answer."""
        problems = [message["content"] for message in data["prompt"] if message["role"] == "user"]
        if not problems:
            raise ValueError(f"a record of {self.task_name} has no user message: {str(data['prompt'])[:200]}")
        return {
            "messages": [
                {"role": "user", "content": problems[-1]},
                {"role": "assistant", "content": str(data["reward_model"]["ground_truth"])},
            ],
            "task_name": self.task_name,
        }
