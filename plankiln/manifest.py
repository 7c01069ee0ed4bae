"""What manifest.json says: the identity, needs and files of one bundle."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

SCHEMA_VERSION = 1
CHUNK_BYTES = 4 << 20
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
REPORT = "report.json"
_PATH = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Count = Annotated[int, Field(ge=1, lt=1 << 62)]
Natural = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Source(_Part):
    """Where the model came from; `digest` identifies its content."""

    uri: Text
    digest: Sha256


class TargetNeeds(_Part):
    """The processor the plan was compiled for, and what it needs of the machine that opens it.

    `machine` as in `uname -m`, `flags` as in /proc/cpuinfo, `glibc` the oldest version that will do ("2.31").
    """

    name: Text
    kind: Literal["cpu"]
    isa: Text
    machine: Text
    flags: tuple[Text, ...]
    glibc: Annotated[str, Field(pattern=r"^\d{1,4}(\.\d{1,4}){1,2}$")]


class ModelShape(_Part):
    """Sizes a server needs before it opens the plan."""

    architecture: Text
    vocab_size: Count
    layers: Count
    hidden: Count
    kv_heads: Count
    head_dim: Count
    max_context: Count


class Formats(_Part):
    """Number formats of the three kinds of values; weights and activations are two words on purpose."""

    weights: Text
    activations: Text
    kv_cache: Text


class PlanLimits(_Part):
    """Limits the plan was compiled with, in tokens, sequences and rows; `kv_memory` in bytes per rank."""

    max_sequences: Count
    max_tokens_per_step: Count
    max_context: Count
    block_size: Count
    max_logit_rows: Count
    kv_memory: Count


class FileEntry(_Part):
    """Digest and size of one file; `chunks` are the digests of each 4 MiB of a weights file."""

    sha256: Sha256
    bytes: Natural
    chunks: tuple[Sha256, ...] | None = None


class GateRecord(_Part):
    """What the plan loses against the unquantized model on held-out text.

    measured_on: the engine that runs the plan, or a CPU's prediction of it. skipped: nothing was measured, by
    `--no-gate`. reference: what `reference_perplexity`, `kl_mean` and `kl_p99` (nats) and `top1_agreement` (0 to 1)
    compare with; all None where the plan itself is unquantized or was compared with nothing. tokens: predictions
    measured. text: digest of the held-out texts.
    """

    measured_on: Literal["engine", "cpu-reference"]
    passed: bool
    skipped: bool
    reference: Literal["fp32", "dequantized source"] | None = None
    tokens: Natural = 0
    text: Sha256 | None = None
    perplexity: Annotated[float, Field(ge=1)] | None = None
    reference_perplexity: Annotated[float, Field(ge=1)] | None = None
    kl_mean: Annotated[float, Field(ge=0)] | None = None
    kl_p99: Annotated[float, Field(ge=0)] | None = None
    top1_agreement: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def provisional(self) -> bool:
        """Whether the engine that runs the plan has yet to be measured."""
        return self.measured_on == "cpu-reference"


class QuantizationRecord(_Part):
    """What calibration, or the choice of formats, decided; nothing in it differs between two runs on the same inputs.

    algorithm: the recipe's `quantize.weights`. text: digest of the calibration texts, of which `samples` with `tokens`
    in all were used. outlier_layers: modules kept weight-only, with the largest of their inputs over the mean.
    prescale_multiplies: modules whose pre-scale no earlier weight could take up, so that the plan multiplies.
    """

    algorithm: Text
    text: Sha256 | None = None
    samples: Natural = 0
    tokens: Natural = 0
    outlier_layers: dict[Text, float] = {}
    prescale_multiplies: tuple[Text, ...] = ()


class Description(_Part):
    """What a build knows of its bundle before the files are there; Manifest adds the rest."""

    name: Text
    recipe: dict[str, JsonValue]
    source: Source
    target: TargetNeeds
    model: ModelShape
    formats: Formats
    bytes_per_format: dict[str, Natural]
    kv_bytes_per_token: Count
    limits: PlanLimits
    eos_token_ids: tuple[Natural, ...]
    special_tokens: dict[str, JsonValue]
    add_bos: bool
    chat_template: Text | None
    tools: dict[str, str]
    gate: GateRecord | None = None
    quantization: QuantizationRecord | None = None


class Manifest(Description):
    """The content of manifest.json, schema version 1."""

    schema_version: Literal[1]
    digest: Sha256
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    plankiln: Text
    world_size: Literal[1]
    files: dict[str, FileEntry]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, entry in self.files.items():
            if not _PATH.fullmatch(name) or {".", ".."} & set(name.split("/")) or name == MANIFEST:
                raise ValueError(f"files: `{name}` is not a plain path inside the bundle")
            chunked = name.endswith("/weights.bin")
            if chunked != (entry.chunks is not None):
                raise ValueError(f"files: `{name}` {'lacks' if chunked else 'must not have'} chunk digests")
            if entry.chunks is not None and not entry.bytes:
                raise ValueError(f"files: `{name}` is empty")
            if entry.chunks is not None and len(entry.chunks) != -(-entry.bytes // CHUNK_BYTES):
                raise ValueError(f"files: `{name}` of {entry.bytes} bytes has {len(entry.chunks)} chunk digests")
        needed = [TOKENIZER, REPORT, *([self.chat_template] if self.chat_template else [])]
        for rank in range(self.world_size):
            needed += [plan_file(rank), weights_file(rank)]
        if missing := [name for name in needed if name not in self.files]:
            raise ValueError(f"files: `{missing[0]}` is not listed")
        if self.limits.max_context > self.model.max_context:
            raise ValueError("limits.max_context is more than the model's own")
        if any(token >= self.model.vocab_size for token in self.eos_token_ids):
            raise ValueError("eos_token_ids: a token is not in the vocabulary")
        return self

    def content_digest(self) -> str:
        """SHA-256 of what the bundle is: all of the manifest but the digest itself, the date, the build's report, where
        the source was found, which its own digest identifies, and what the gate measured, though not whether."""
        measured = set(GateRecord.model_fields) - {"skipped"}
        excluded: dict[str, Any] = {"digest": True, "created": True, "files": {REPORT}, "source": {"uri"}}
        content = self.model_dump(mode="json", exclude={**excluded, "recipe": {"model"}, "gate": measured})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> bytes:
        """The bytes of manifest.json."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def plan_file(rank: int) -> str:
    """Path of a rank's code inside a bundle."""
    return f"rank{rank}/plan.so"


def weights_file(rank: int) -> str:
    """Path of a rank's weights inside a bundle."""
    return f"rank{rank}/weights.bin"
