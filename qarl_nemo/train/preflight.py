"""Checks before anything is written or trained: device, engine, logger, format, targets, data, disk, run's folder."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.checkpoints.content import require_whole
from qarl_nemo.config.problems import catch
from qarl_nemo.files import readable_bytes, require_space
from qarl_nemo.layers.install import InstallRow, install
from qarl_nemo.metrics.events import missing_wandb
from qarl_nemo.names import TARGETS, tensor_kind
from qarl_nemo.train.aligned_model import align_model, has_frozen_base
from qarl_nemo.train.checkpoint import checkpoint_steps
from qarl_nemo.train.config import LocalConfig, MuonConfig, PolicyConfig
from qarl_nemo.train.engine_attention import require_attention
from qarl_nemo.train.megatron.checks import require_machine, require_model
from qarl_nemo.train.model import is_packed, read_config, read_tokenizer
from qarl_nemo.train.packed_base import require_packed_base
from qarl_nemo.train.prompts import PromptEncoder, limit_prompts, longest_prompt, require_room_for_answers
from qarl_nemo.train.rollout_config import VllmRolloutConfig
from qarl_nemo.train.run_dir import inspect_run_dir
from qarl_nemo.train.setup import BASE_FOLDER, learner_device, require_engine
from qarl_nemo.train.tasks import TaskSource
from qarl_nemo.train.template_options import require_options
from qarl_nemo.train.trained import trained_parameters
from qarl_nemo.train.vllm.limits import room_problems


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run works with, checked.

    Attributes:
        device: the learner's device.
        format: the format of the rollout engine's weights.
        source: the tasks.
        encode: makes prompts of them.
        skipped: how many tasks were left out for the length of their prompts, by the key of the data block.
        rows: what is quantized in the rollout engine, one line for each module with weights.
        num_parameters: the model's parameter count.
        num_trained: how many parameters are trained, those of adapters included.
        checkpoint_bytes: size of one checkpoint.
        kv_bytes: size of one token's keys and values in the rollout engine.
    """

    device: torch.device
    format: QuantFormat
    source: TaskSource
    encode: PromptEncoder
    skipped: dict[str, int]
    rows: list[InstallRow]
    num_parameters: int
    num_trained: int
    checkpoint_bytes: int
    kv_bytes: int


def prepare(config: LocalConfig) -> Prepared:
    """Check everything that can be checked without reading the model's weights, and build what a run works with.

    Raises:
        ValueError: no such device, an engine or a logger that does not run here, a format, targets or shapes that do
            not fit the model, weights that are not all there, data that cannot be used, or too little free disk space
            for the checkpoints; of several problems, and then of the run's folder, too, every one is listed.
    """
    prepared, errors = _examine(config)
    if prepared is not None:
        # The folder is checked when it is opened: reading every byte of a checkpoint once is enough.
        return prepared
    catch(errors, inspect_run_dir, config)
    if len(errors) == 1:
        raise errors[0]
    raise ValueError("\n  ".join([f"{len(errors)} problem(s), nothing was started:", *map(str, errors)]))


def check(config: LocalConfig) -> tuple[Prepared | None, list[str]]:
    """Find all that keeps a run from starting here, its folder excepted: device, engine, model, data, disk.

    Args:
        config: the resolved config.

    Returns:
        What `prepare` returns, None where it raises, and every problem.
    """
    prepared, errors = _examine(config)
    return prepared, [str(error) for error in errors]


def _examine(config: LocalConfig) -> tuple[Prepared | None, list[ValueError]]:
    """Check each part, whatever is wrong with the others."""
    errors: list[ValueError] = []
    device = catch(errors, _device, config)
    catch(errors, require_attention, config.policy.attention)
    catch(errors, _require_logger, config)
    hf = catch(errors, read_config, config.policy)
    if hf is None:
        # Sizes and tokenizer lie in the same folder, data elsewhere.
        catch(errors, TaskSource, config.data, config.seed)
        return None, errors
    catch(errors, require_model, config.policy, hf)
    catch(errors, _require_weights, config)
    made = catch(errors, _empty_model, config)
    if device is not None and made is not None:
        catch(errors, _require_room, config, made[0], device)
    tasks = _tasks(config, hf, errors)
    size = None if made is None else catch(errors, _checkpoint_size, config, made[0], made[2])
    if errors or device is None or made is None or tasks is None or size is None:
        return None, errors
    model, rows, num_parameters = made
    num_trained = sum(parameter.numel() for _, parameter in trained_parameters(model))
    fmt, kv_bytes = config.qarl.served_format, _kv_bytes(model)
    return Prepared(device, fmt, *tasks, rows, num_parameters, num_trained, size, kv_bytes), errors


def _device(config: LocalConfig) -> torch.device:
    device = learner_device(config)
    require_machine(config.policy, device)
    require_engine(config, device)
    return device


def _require_room(config: LocalConfig, model: PreTrainedModel, device: torch.device) -> None:
    if not isinstance(config.rollout, VllmRolloutConfig):
        return
    if problems := room_problems(config.rollout, model.config, _kv_bytes(model), device.type):
        raise ValueError(f"rollout.engine=vllm does not run here: {'; '.join(problems)}")


def _require_logger(config: LocalConfig) -> None:
    # It is imported when the first step's record is near, after the model was loaded and warmed up.
    if config.logger.wandb is not None and find_spec("wandb") is None:
        raise ValueError(f"logger.wandb.project={config.logger.wandb.project}: {missing_wandb()}")


def _require_weights(config: LocalConfig) -> None:
    # A quantized base is looked at with the config's format.
    path = config.policy.model_path
    if path is not None and not is_packed(path):
        require_whole(open_checkpoint(path))


def _empty_model(config: LocalConfig) -> tuple[PreTrainedModel, list[InstallRow], int]:
    dtype = getattr(torch, config.policy.precision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(config.policy), dtype=dtype)
    require_packed_base(config)
    # Adapters come on top.
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if has_frozen_base(config.policy):
        rows = align_model(config, model).rows
        _require_matrices(config.policy, model)
        return model, rows, num_parameters
    return model, install(model, config.qarl.targets, config.qarl.served_format).rows, num_parameters


def _require_matrices(policy: PolicyConfig, model: PreTrainedModel) -> None:
    trained = trained_parameters(model)
    if isinstance(policy.optimizer, MuonConfig) and not any(_by_muon(policy, *one) for one in trained):
        raise ValueError(
            "policy.optimizer.name=muon steps hidden matrices, and all of this model's are frozen; set "
            "policy.optimizer.name=adamw"
        )


def _by_muon(policy: PolicyConfig, name: str, parameter: nn.Parameter) -> bool:
    return isinstance(policy.optimizer, MuonConfig) and parameter.ndim >= 2 and tensor_kind(name) in TARGETS


def _tasks(
    config: LocalConfig, hf: PreTrainedConfig, errors: list[ValueError]
) -> tuple[TaskSource, PromptEncoder, dict[str, int]] | None:
    longest = catch(errors, longest_prompt, config, hf.max_position_embeddings)
    source = catch(errors, TaskSource, config.data, config.seed)
    tokenizer = catch(errors, read_tokenizer, config.policy)
    encode = None if tokenizer is None else catch(errors, PromptEncoder, tokenizer, config.policy.tokenizer)
    if encode is not None:
        catch(errors, require_options, [encode])
    if longest is None or source is None or encode is None:
        return None
    skip = getattr(config.data, "overlong_prompts", None) == "skip"
    skipped = catch(errors, limit_prompts, source, encode, longest, skip=skip)
    catch(errors, require_room_for_answers, source, encode, config.rollout.max_new_tokens)
    return None if skipped is None else (source, encode, skipped)


def _checkpoint_size(config: LocalConfig, model: PreTrainedModel, num_parameters: int) -> int:
    size = checkpoint_bytes(model, config.policy)
    # A random model that adapters are trained on is written once, with or without checkpoints.
    makes_base = has_frozen_base(config.policy) and config.policy.model_path is None
    has_base = not makes_base or (config.run_dir / BASE_FOLDER).is_dir()
    _require_space(config, size, 0 if has_base else num_parameters * model.dtype.itemsize)
    return size


def checkpoint_bytes(model: PreTrainedModel, policy: PolicyConfig) -> int:
    """Compute the size of a checkpoint: trained parameters, their moments and, for BF16 ones, FP32 masters.

    Args:
        model: any model, also one on the meta device.
        policy: precision and optimizer.

    Returns:
        Bytes; the tokenizer and the files' headers come on top.
    """
    total = 0
    for name, parameter in trained_parameters(model):
        moments = 4 if _by_muon(policy, name, parameter) else 8
        masters = 0 if parameter.dtype == torch.float32 else 4
        total += parameter.numel() * (parameter.element_size() + moments + masters)
    return total


def _kv_bytes(model: PreTrainedModel) -> int:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize


def _require_space(config: LocalConfig, size: int, base_bytes: int) -> None:
    parts, needed = list[str](), base_bytes
    if config.checkpointing.enabled:
        # One more than are kept, because the new one is complete before the oldest is deleted.
        num_new = max(1, config.checkpointing.keep_last + 1 - len(checkpoint_steps(config.run_dir)))
        kept = "checkpointing.keep_last and the one being written"
        parts.append(f"{num_new} checkpoints of {readable_bytes(size)} ({kept})")
        needed += num_new * size
    if base_bytes:
        parts.append(f"the adapters' base of {readable_bytes(base_bytes)}")
    if parts:
        require_space(config.run_dir, needed, f"room for {' and '.join(parts)}")
