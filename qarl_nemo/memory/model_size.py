"""The sizes of a model that memory and time depend on, read from its config.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qarl_nemo.architecture import MEGATRON_FAMILIES, Architecture, read_architecture
from qarl_nemo.files import FileError
from qarl_nemo.memory.units import BF16


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that memory depends on; a model without experts is dense."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    inner: int
    num_experts: int = 0
    top_k: int = 0
    tied_head: bool = False

    @classmethod
    def read(cls, path: Path, families: Sequence[str] = MEGATRON_FAMILIES) -> "ModelSize":
        """Read a Hugging Face folder, or its config.json.

        Args:
            path: folder or file.
            families: model types that are legal.

        Returns:
            The model's sizes.

        Raises:
            FileError: no readable config.json of a supported model, or its layers are not alike.
        """
        return cls.of(read_architecture(path, families), str(path))

    @classmethod
    def of(cls, model: Architecture, place: str) -> "ModelSize":
        """Take the sizes of a model that was read already.

        Returns:
            The model's sizes.

        Raises:
            FileError: its layers are not alike.
        """
        dense = model.num_hidden_layers - len(model.sparse_layers)
        if model.num_experts and dense:
            raise FileError(
                f"{place}: {dense} of {model.num_hidden_layers} layers have no experts (mlp_only_layers, "
                "decoder_sparse_step); memory is computed for layers that are alike"
            )
        return cls(
            num_layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            inner=model.moe_intermediate_size or model.intermediate_size,
            num_experts=model.num_experts,
            top_k=model.num_experts_per_tok,
            tied_head=model.tie_word_embeddings,
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of one layer's experts."""
        return self.num_experts * 3 * self.inner * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's four projections."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a dense layer's MLP."""
        return 0 if self.num_experts else 3 * self.inner * self.hidden

    @property
    def linears(self) -> dict[str, int]:
        """Parameters of one layer by the target that they are."""
        return {
            "experts": self.expert_parameters,
            "attention": self.attention_parameters,
            "mlp": self.mlp_parameters,
        }

    @property
    def small_parameters(self) -> int:
        """Parameters of one layer that no rank splits: norms and router."""
        return 2 * self.hidden + 2 * self.head_dim + self.num_experts * self.hidden

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in an engine's cache, BF16."""
        return 2 * BF16 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        layer = sum(self.linears.values()) + self.small_parameters
        return self.num_layers * layer + (1 if self.tied_head else 2) * self.vocab_size * self.hidden + self.hidden
