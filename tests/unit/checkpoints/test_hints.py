"""What a folder that is not the expected one may be, and what to name in its place."""

import pytest

from qarl_nemo.checkpoints import open_checkpoint, open_megatron
from qarl_nemo.files import FileError
from qarl_nemo.measure.eval.models import find_model
from qarl_nemo.train.export import read_run
from qarl_nemo.train.model import checkpoint_config

READERS = [open_checkpoint, lambda path: open_megatron(path, path), find_model, read_run, checkpoint_config]


@pytest.mark.parametrize("read", READERS)
def test_nothing_and_a_file_are_told_from_a_folder_of_another_kind(tmp_path, read):
    with pytest.raises(FileError, match=rf"{tmp_path / 'gone'} does not exist$"):
        read(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    said = rf"config\.json is a file, not a folder; name the folder that it is in: {tmp_path}$"
    with pytest.raises(FileError, match=said):
        read(tmp_path / "config.json")


def test_a_model_that_says_what_is_converted_may_not_be_there_either(tmp_path):
    (tmp_path / ".metadata").touch()
    with pytest.raises(
        FileError, match=rf"no config\.json says what model this is: {tmp_path / 'gone'} does not exist$"
    ):
        open_megatron(tmp_path, tmp_path / "gone")


@pytest.mark.parametrize("read", [open_checkpoint, find_model])
def test_megatrons_checkpoints_lead_to_convert(tmp_path, read):
    for step in (9, 10):
        place = tmp_path / f"step_{step}" / "policy" / "weights" / "iter_0000000"
        place.mkdir(parents=True)
        for name in (".metadata", "common.pt"):
            (place / name).touch()
    command = f"qarl convert {place} DESTINATION --hf-model MODEL$"
    with pytest.raises(FileError, match=f"; it is a torch_dist checkpoint of Megatron: {command}"):
        read(place)
    with pytest.raises(FileError, match=f"; it holds torch_dist checkpoints of Megatron: {command}"):
        read(tmp_path)
