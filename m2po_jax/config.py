"""Everything a run needs, as frozen dataclasses: checked when made, saved with the run, run again from the file.

`None` means "not set" and booleans are booleans; no field uses a sentinel number. Times are counted in model
updates unless a field says otherwise.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from m2po_jax import __version__
from m2po_jax.config_json import differences as differences
from m2po_jax.config_json import flatten, structured
from m2po_jax.config_staleness import SourceConfig as SourceConfig
from m2po_jax.config_staleness import StalenessConfig
from m2po_jax.errors import ConfigError
from m2po_jax.errors import UserError as UserError
from m2po_jax.errors import require as _require


@dataclass(frozen=True)
class TaskConfig:
    """Prompts and what a right answer is: procedural addition, or the questions of a file."""

    name: Literal["arithmetic", "questions"] = "arithmetic"
    """`arithmetic`: `7+5+9+3=` is answered with its running sums, `12,21,24`; `questions`: those of task.questions."""
    min_operands: int = 4
    """Arithmetic: fewest one-digit numbers in a prompt."""
    max_operands: int = 4
    """Arithmetic: most one-digit numbers in a prompt; the chain has one step fewer."""
    questions: str | None = None
    """A JSON Lines file with `question` and `answer` in every line, such as GSM8K's; the last number is the answer."""
    questions_sha256: str | None = None
    """Digest of that file; filled in when a run is made, so that it is not resumed with other questions."""
    tokenizer_sha256: str | None = None
    """Digest of the model's tokenizer and chat template, filled in likewise."""
    held_out_fraction: float = 0.25
    """Share of all prompts, chosen by hash, that training never draws."""
    template: str = "{question}"
    """What a model with a tokenizer of its own (model.source) is asked; `{question}` stands for the prompt."""
    chat: bool = True
    """Ask it in its chat template, as the user's message; False: plain text that the model goes on with."""
    max_prompt_tokens: int = 256
    """Longest prompt for such a model, chat template included; longer questions are left out, and counted."""

    def __post_init__(self):
        _require(self.min_operands >= 2, f"task.min_operands is {self.min_operands}: use 2 or more")
        _require(
            self.max_operands >= self.min_operands,
            f"task.max_operands {self.max_operands} is below task.min_operands {self.min_operands}",
        )
        _require(
            0.0 < self.held_out_fraction < 1.0,
            f"task.held_out_fraction is {self.held_out_fraction}: use a share between 0 and 1",
        )
        _require("{question}" in self.template, f"task.template {self.template!r} has no {{question}} in it")
        _require(self.max_prompt_tokens >= 1, f"task.max_prompt_tokens is {self.max_prompt_tokens}: use 1 or more")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama, Qwen2 or Qwen3 shape; `models.huggingface` reads the published ones' numbers.

    The defaults are a tiny Qwen3. Llama: neither `qk_norm` nor `qkv_bias`; Qwen2 and Qwen2.5: `qkv_bias` alone.
    """

    source: str | None = None
    """Hugging Face directory of the base policy and its tokenizer, in place of a warm start; it sets all sizes."""
    width: int = 64
    """Model width D."""
    layers: int = 2
    """Decoder blocks N."""
    query_heads: int = 4
    """Query heads H."""
    kv_heads: int = 2
    """Key/value heads K; must divide query_heads."""
    head_dim: int = 16
    """Width of one head; even, for rotary embedding."""
    mlp_width: int = 128
    """Feed-forward width F of the SwiGLU block."""
    vocab_size: int | None = None
    """Rows V of the embedding, often more than the tokenizer has ids; None: as many as the tokenizer has."""
    max_positions: int | None = None
    """Longest sequence in tokens, prompt and response together; None: unlimited."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_factor: float | None = None
    """Llama 3's scaling divides low rotary frequencies by this; None: no scaling, and the next three do nothing."""
    rope_low_factor: float = 1.0
    """Frequencies of fewer turns than this over rope_original_positions are divided by the whole rope_factor."""
    rope_high_factor: float = 4.0
    """Frequencies of more turns than this over rope_original_positions are kept; those between are blended."""
    rope_original_positions: int = 8192
    """Context, in tokens, that the model was first trained on."""
    qk_norm: bool = True
    """RMSNorm on each query and key head, as in Qwen3."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections, as in Qwen2."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output projection too."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the matrix multiplications; softmax, norms and logits are float32 always."""
    remat: Literal["none", "dots", "full"] = "none"
    """What a block computes again in the backward pass: scores and elementwise values; all attention; all."""

    def __post_init__(self):
        for name in ("width", "layers", "query_heads", "kv_heads", "head_dim", "mlp_width", "rope_original_positions"):
            _require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}: use 1 or more")
        for name in ("vocab_size", "max_positions"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"model.{name} is {value}: use 1 or more, or None")
        _require(
            self.query_heads % self.kv_heads == 0,
            f"model.kv_heads {self.kv_heads} does not divide model.query_heads {self.query_heads}",
        )
        _require(self.head_dim % 2 == 0, f"model.head_dim is {self.head_dim}: rotary embedding needs an even number")
        for name in ("rope_theta", "norm_eps", "rope_low_factor"):
            _require(getattr(self, name) > 0.0, f"model.{name} is {getattr(self, name)}: use a positive number")
        _require(
            self.rope_factor is None or self.rope_factor >= 1.0,
            f"model.rope_factor is {self.rope_factor}: use 1 or more, or None",
        )
        _require(
            self.rope_high_factor > self.rope_low_factor,
            f"model.rope_high_factor {self.rope_high_factor} is not above model.rope_low_factor {self.rope_low_factor}",
        )


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps that make the base policy, version 0."""

    target_accuracy: float = 0.3
    """Stop at the first check at which sampled held-out accuracy reaches this."""
    slip_rate: float = 0.3
    """Share of the running sums in the demonstrations that are wrong: an imitator knows more than it samples."""
    max_steps: int = 4000
    """Give up, with an error, after this many supervised steps."""
    check_every: int = 20
    """Supervised steps between accuracy checks."""
    batch_size: int = 256
    """Demonstrations a step."""
    learning_rate: float = 3e-3
    """Adam learning rate of the supervised steps."""

    def __post_init__(self):
        _require(
            0.0 <= self.target_accuracy < 1.0,
            f"warm_start.target_accuracy is {self.target_accuracy}: use a share in [0, 1)",
        )
        _require(0.0 <= self.slip_rate < 1.0, f"warm_start.slip_rate is {self.slip_rate}: use a share in [0, 1)")
        for name in ("max_steps", "check_every", "batch_size"):
            _require(getattr(self, name) >= 1, f"warm_start.{name} is {getattr(self, name)}: use 1 or more")
        _require(self.learning_rate > 0, f"warm_start.learning_rate is {self.learning_rate}: use a positive number")


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn. Log-probs are those of the softmax at `temperature`, before truncation, in float32."""

    temperature: float = 1.0
    """Divides the logits, in the sampler and in the learner alike."""
    top_p: float = 1.0
    """Draw from the likeliest tokens only, as few as together have this probability; 1.0: from all."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens only; None: from all. Not for training: shards cannot state it."""
    train_on_truncated: bool = False
    """Allow training with top_p below 1, though ratios are of the whole softmax and tokens were drawn from a part."""
    max_new_tokens: int = 10
    """Longest response in tokens, end token included."""
    slots: int | None = None
    """Responses decoded side by side; one that ends makes room for the next. None: as many as suit a work unit."""

    def __post_init__(self):
        _require(0.0 < self.top_p <= 1.0, f"sampling.top_p is {self.top_p}: use a share above 0, at most 1")
        for name in ("top_k", "slots"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"sampling.{name} is {value}: use 1 or more, or None")
        _require(self.temperature > 0.0, f"sampling.temperature is {self.temperature}: use a positive number")
        _require(self.max_new_tokens >= 1, f"sampling.max_new_tokens is {self.max_new_tokens}: use 1 or more")


@dataclass(frozen=True)
class RolloutConfig:
    """The shape of one batch of rollouts and how it is cut into work units."""

    prompts_per_batch: int = 64
    """Prompts (groups) in one batch."""
    group_size: int = 8
    """Responses G to each prompt."""
    units_per_batch: int = 2
    """Work units, hence shards, in one batch; each holds whole groups."""
    rescore: bool = False
    """Score every response again by the learner's forward pass; both log-probs are stored, their mismatch reported."""
    keep_weights_every: int | None = None
    """Keep the weights of every version divisible by this after they were served; None keeps only version 0."""

    def __post_init__(self):
        for name in ("prompts_per_batch", "group_size", "units_per_batch"):
            _require(getattr(self, name) >= 1, f"rollouts.{name} is {getattr(self, name)}: use 1 or more")
        _require(
            self.prompts_per_batch % self.units_per_batch == 0,
            f"rollouts.units_per_batch {self.units_per_batch} does not divide"
            f" rollouts.prompts_per_batch {self.prompts_per_batch}",
        )
        _require(
            self.keep_weights_every is None or self.keep_weights_every >= 1,
            f"rollouts.keep_weights_every is {self.keep_weights_every}: use 1 or more, or None",
        )

    @property
    def prompts_per_unit(self) -> int:
        """Prompts in one work unit."""
        return self.prompts_per_batch // self.units_per_batch


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss by name, with its own hyperparameters (see `m2po_jax.objectives.names()`)."""

    name: str = "m2po"
    """Row of the objectives table; README.md lists them."""
    hyperparameters: Annotated[dict[str, float | bool | str], tyro.conf.Suppress] = field(default_factory=dict)
    """Overrides of the objective's own defaults; on the command line e.g. --objective.threshold 0.02."""
    normalize_advantages: Literal["std", "none"] | None = None
    """Divide group advantages by the sample standard deviation or by nothing; None leaves it to the objective."""
    length_constant: float | None = None
    """Stands for the response length in the aggregation constant_sum; None takes sampling.max_new_tokens."""
    overlong_cache: int = 0
    """Tokens before sampling.max_new_tokens over which a response loses reward, down to -1 (DAPO); 0 for none."""

    def __post_init__(self):
        _require(
            self.length_constant is None or self.length_constant > 0.0,
            f"objective.length_constant is {self.length_constant}: use a positive number, or None",
        )
        _require(
            "length_constant" not in self.hyperparameters,
            "objective.length_constant is a field of ObjectiveConfig, not one of its hyperparameters",
        )
        _require(self.overlong_cache >= 0, f"objective.overlong_cache is {self.overlong_cache}: use 0 or more")


@dataclass(frozen=True)
class LearnerConfig:
    """The optimiser and the loop around it."""

    total_updates: int = 1280
    """Model updates in the run."""
    updates_per_batch: int = 4
    """Mini-batches, hence model updates, that one batch of rollouts is cut into."""
    micro_batches: int = 1
    """Parts that a mini-batch is cut into to save memory; changes only rounding, unless masks are by micro-batch.

    With packing they are the most parts: short responses fill fewer of them, and masks by micro-batch change with that.
    """
    packing: bool = True
    """Put several short responses, with their prompts, in a row of the model's input; changes only rounding."""
    publish_every: int | None = None
    """Updates between published versions; None means updates_per_batch."""
    learning_rate: float = 6e-4
    """Peak AdamW learning rate."""
    warmup_updates: int = 10
    """Updates of linear warm-up, the first at learning_rate / warmup_updates."""
    decay_after: int = 0
    """Updates at the peak rate before the decay begins."""
    decay_updates: int | None = 1280
    """Updates of linear decay; None keeps the rate constant."""
    final_learning_rate_share: float = 0.05
    """The decay ends at this share of learning_rate, which is kept to the end."""
    adam_b1: float = 0.9
    """AdamW decay of the first moment."""
    adam_b2: float = 0.999
    """AdamW decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.0
    """AdamW decoupled weight decay."""
    clip_norm: float = 1.0
    """Global gradient norm is clipped to this."""
    checkpoint_every: int = 128
    """Updates between checkpoints of the full train state; a multiple of updates_per_batch."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_checkpoint_every: int | None = None
    """Checkpoints of every version divisible by this are kept too; None keeps the newest only."""
    diagnostics_every: int | None = 16
    """Batches between token-level diagnostics samples; None writes none."""

    def __post_init__(self):
        for name in ("total_updates", "updates_per_batch", "micro_batches", "checkpoint_every", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, f"learner.{name} is {getattr(self, name)}: use 1 or more")
        for name in ("publish_every", "diagnostics_every", "decay_updates", "keep_checkpoint_every"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"learner.{name} is {value}: use 1 or more, or None")
        _require(self.learning_rate > 0, f"learner.learning_rate is {self.learning_rate}: use a positive number")
        _require(
            0.0 <= self.final_learning_rate_share <= 1.0,
            f"learner.final_learning_rate_share is {self.final_learning_rate_share}: use a share in [0, 1]",
        )
        _require(self.clip_norm > 0, f"learner.clip_norm is {self.clip_norm}: use a positive number")
        for name in ("warmup_updates", "decay_after", "weight_decay"):
            _require(getattr(self, name) >= 0, f"learner.{name} is {getattr(self, name)}: use 0 or more")
        for name in ("adam_b1", "adam_b2"):
            value = getattr(self, name)
            _require(0.0 <= value < 1.0, f"learner.{name} is {value}: use a number in [0, 1)")
        _require(self.adam_eps > 0, f"learner.adam_eps is {self.adam_eps}: use a positive number")
        for name, of in (
            ("checkpoint_every", "updates_per_batch"),
            ("total_updates", "updates_per_batch"),
            ("publish_every", "updates_per_batch"),
            ("keep_checkpoint_every", "checkpoint_every"),
        ):
            value = getattr(self, name)
            _require(
                value is None or value % getattr(self, of) == 0,
                f"learner.{name} {value} is not a multiple of learner.{of} {getattr(self, of)}",
            )

    @property
    def publish_interval(self) -> int:
        """Updates between published versions, with the default filled in."""
        return self.publish_every or self.updates_per_batch


@dataclass(frozen=True)
class EvaluationConfig:
    """Accuracy on held-out prompts during training, sampled as in training."""

    every: int = 64
    """Updates between evaluations; also at version 0 and at the end."""
    prompts: int = 2048
    """Held-out prompts in one evaluation, one response each."""

    def __post_init__(self):
        for name in ("every", "prompts"):
            _require(getattr(self, name) >= 1, f"evaluation.{name} is {getattr(self, name)}: use 1 or more")


@dataclass(frozen=True)
class MeshConfig:
    """How the devices of the learner, and of the generator, share the work."""

    data: int | None = None
    """Copies of the model, each with its own rows of a batch; None: as many as the devices hold."""
    fsdp: int = 1
    """Parts that parameters and optimiser state of a copy are cut into, gathered when used; rows are cut too."""
    tensor: int = 1
    """Parts that every matrix product is cut into; must divide the heads, the feed-forward width and the vocabulary."""

    def __post_init__(self):
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"mesh.{name} is {value}: use 1 or more parts")


@dataclass(frozen=True)
class Config:
    """One run."""

    name: str = "run"
    """Arm name in reports; letters, digits, dash and underscore."""
    seed: int = 0
    """Seed of everything random in the run."""
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        learner, rollouts = self.learner, self.rollouts
        for key, value in flatten(self).items():
            _require(not isinstance(value, float) or math.isfinite(value), f"{key} is {value}: use a finite number")
        _require(
            bool(self.name) and all(c.isalnum() or c in "-_" for c in self.name),
            f"name is {self.name!r}: use letters, digits, - and _",
        )
        _require(0 <= self.seed < 2**31, f"seed is {self.seed}: use 0 to 2^31 - 1")
        _require(
            rollouts.prompts_per_batch % learner.updates_per_batch == 0,
            f"learner.updates_per_batch {learner.updates_per_batch} does not divide"
            f" rollouts.prompts_per_batch {rollouts.prompts_per_batch}: a mini-batch holds whole groups",
        )
        self.staleness.require_satisfiable(learner.updates_per_batch, learner.publish_interval)
        _require(
            self.evaluation.every % learner.updates_per_batch == 0,
            f"evaluation.every {self.evaluation.every} is not a multiple of learner.updates_per_batch"
            f" {learner.updates_per_batch}",
        )
        _require(
            self.sampling.top_k is None,
            f"sampling.top_k is {self.sampling.top_k}: a shard cannot state it, so that a run cannot train on it; use"
            " top_k None",
        )
        _require(
            self.sampling.top_p == 1.0 or self.sampling.train_on_truncated,
            f"sampling.top_p is {self.sampling.top_p}: ratios would be of the whole softmax on tokens drawn from a part"
            " of it; use top_p 1.0, or say --sampling.train-on-truncated",
        )
        _require(
            self.objective.overlong_cache < self.sampling.max_new_tokens,
            f"objective.overlong_cache {self.objective.overlong_cache} is not below sampling.max_new_tokens"
            f" {self.sampling.max_new_tokens}",
        )
        _require(
            self.task.name != "questions" or (self.task.questions is not None and self.model.source is not None),
            "the task questions needs a file, --task.questions FILE.jsonl, and a model, --model.source DIRECTORY",
        )
        needed = sum(len(str(9 * terms)) + 1 for terms in range(2, self.task.max_operands + 1))
        _require(
            self.model.source is not None or self.sampling.max_new_tokens >= needed,
            f"sampling.max_new_tokens {self.sampling.max_new_tokens} is too short for"
            f" task.max_operands {self.task.max_operands}: use {needed} or more",
        )

    @property
    def mini_batch_rows(self) -> int:
        """Responses of one model update, all hosts together."""
        return self.rollouts.prompts_per_batch * self.rollouts.group_size // self.learner.updates_per_batch


def to_json(config: Config, run_id: str) -> str:
    """The resolved configuration with run id and package version, as the text of `config.json`."""
    document = {"run_id": run_id, "package_version": __version__, "config": dataclasses.asdict(config)}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def run_id_of(text: str, source: str = "config.json") -> str:
    """The run id in `to_json`'s text; raises ConfigError naming `source` if there is none."""
    try:
        return str(json.loads(text)["run_id"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} is not a saved configuration: {error!r}") from error


def from_json(text: str, source: str = "config.json") -> Config:
    """Read `to_json`'s text; unknown keys and wrong types raise ConfigError naming the key and `source`."""
    try:
        data = json.loads(text)["config"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} is not a saved configuration: {error!r}") from error
    try:
        return structured(data, Config, ConfigError)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
