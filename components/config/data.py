"""Preference pairs: their source, their owners, and their splits."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from components.config.name_checks import PlainName
from components.config.recipe_files import InputFile
from components.config.registry import Registry, registered_name, registered_options
from components.config.section import Section


class SourceOptions(Section):
    """Options of a source of pairs; components.data.sources.source.Source adds `load`."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the user's own files, which data.columns may rename; empty for sources whose
    columns are given. data.column may name any other column of such files."""
    is_local: ClassVar[bool] = False  # its rows come from a file or a package, in no case from the hub


SOURCES: Registry[type[SourceOptions]] = Registry(
    "data.source",
    "fed_rlhf.sources",
    {
        "aclsum": "components.data.sources.aclsum:AclSum",
        "auto-j": "components.data.sources.auto_j:AutoJPairs",
        "chitchat": "components.data.sources.chitchat:Chitchat",
        "code-vulnerability": "components.data.sources.hub_pairs:CodeVulnerability",
        "csv": "components.data.sources.own_files:CsvFile",
        "hh-rlhf": "components.data.sources.hub_pairs:HhRlhf",
        "imdb": "components.data.sources.hub_pairs:Imdb",
        "jsonl": "components.data.sources.own_files:JsonlFile",
        "mixture": "components.data.sources.mixture:Mixture",
        "parquet": "components.data.sources.own_files:ParquetFile",
        "py-dpo": "components.data.sources.hub_pairs:PyDpo",
        "shp": "components.data.sources.shp:Shp",
        "thoughts": "components.data.sources.thought_pairs:ThoughtPairs",
        "tldr": "components.data.sources.tldr:Tldr",
        "ultrafeedback": "components.data.sources.hub_pairs:UltraFeedback",
        "webgpt": "components.data.sources.hub_pairs:WebGpt",
    },
    "components.data.sources.source:Source",
)


class PromptSourceOptions(Section):
    """Options of a source of server prompts; components.data.sources.source.PromptSource adds `load`."""


PROMPT_SOURCES: Registry[type[PromptSourceOptions]] = Registry(
    "prompt source",
    "fed_rlhf.prompt_sources",
    {
        "alpaca_eval": "components.data.sources.alpaca_eval:AlpacaEvalPrompts",
        "safe-rlhf": "components.data.sources.safe_rlhf:SafeRlhfPrompts",
    },
    "components.data.sources.source:PromptSource",
)

AnySource = Annotated[str, registered_name(SOURCES, "source")]
AnySourceOptions = Annotated[
    SerializeAsAny[SourceOptions], registered_options(SOURCES, SourceOptions, "source")
]
"""The options of the source that the field `source` before it names."""


class PromptsConfig(Section):
    """Prompts from a data set of their own, in place of those that come with the pairs."""

    source: Annotated[str, registered_name(PROMPT_SOURCES, "prompt source")] = Field(min_length=1)
    """Registered prompt source (components/data/sources): alpaca_eval, safe-rlhf."""
    path: InputFile | None = None
    """Local file read in place of the hub."""
    revision: str | None = None
    """Hub revision (commit or tag) of the data set."""
    options: Annotated[
        SerializeAsAny[PromptSourceOptions],
        registered_options(PROMPT_SOURCES, PromptSourceOptions, "source"),
    ] = Field(default_factory=PromptSourceOptions, validate_default=True)
    """Options of the prompt source."""
    max_prompts: int | None = Field(None, ge=1)
    """Maximum number of prompts (a seeded sample); null keeps all."""


class DataConfig(Section):
    """The preference pairs, the clients that own them, and the rows that may be trained on."""

    source: AnySource = "aclsum"
    """Registered source of pairs (components/data/sources)."""
    path: InputFile | None = None
    """Local file or folder read in place of the hub, for any source that loads files."""
    revision: str | None = None
    """Hub revision (commit or tag) of the data set."""
    trees: InputFile | None = None
    """File or folder of trees of thoughts. Their pairs are assigned to the clients round-robin,
    beside the pairs of the source. The section thoughts grows such trees."""
    min_margin: float = Field(0.0, ge=0, lt=9)
    """Two thoughts whose scores differ by no more than this are tied and give no pair. With
    thoughts.evaluator.read 'expected', scores are means, of which few are equal."""
    options: AnySourceOptions = Field(default_factory=SourceOptions, validate_default=True)
    """Options of the source."""
    partition: Literal["natural", "dirichlet", "iid", "margin", "column"] = "natural"
    """How pairs are assigned to clients. natural: by the owners that the source has; dirichlet: by
    domain, with all pairs of a question at one client; iid; margin: from the largest margins to the
    smallest, with all pairs of a question at one client (FedPDPO D.1.2, IMDB); column: by the
    values of a column (FedPDPO D.1.2, code by language)."""
    clients: int | None = Field(None, ge=1)
    """Number of clients. null keeps every owner, with the partitions natural and column. FedBiscuit
    table 5: 53 (TL;DR)."""
    column: str | None = Field(None, min_length=1)
    """Column whose values name the owner of a pair, with partition 'column': a text column of the
    record, such as domain or source, or any column of the file with the sources jsonl, parquet and
    csv."""
    columns: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """With the sources jsonl, parquet and csv, names of columns in the file, by their names here:
    {prompt: question, chosen: better}."""
    column_clients: (
        dict[Annotated[PlainName, Field(min_length=1)], Annotated[list[PlainName], Field(min_length=1)]]
        | None
    ) = Field(None, min_length=1)
    """By client, the values of data.column whose pairs it owns. Pairs with other values are left
    out. null: each value is a client of that name."""
    alpha: float = Field(0.3, gt=0)
    """Concentration of the Dirichlet partition; FedBiscuit section 6: 0.3."""
    validation: float = Field(0.1, ge=0, lt=1)
    """Share of the prompts held out for validation, where the source has no split of its own."""
    test: float = Field(0.2, gt=0, lt=1)
    """Share of the prompts held out for the reported figures."""
    max_pairs: int | None = Field(None, ge=1)
    """Maximum number of pairs (a seeded sample of whole prompts); null keeps all."""
    max_characters: int = Field(20_000, ge=1)
    """Maximum characters of a prompt or completion; rows with a longer one are dropped."""
    max_dropped: float = Field(0.05, ge=0, le=1)
    """Share of the rows that may be dropped because of max_characters; more of them are an
    error."""
    drop_invalid: float = Field(0.0, ge=0, le=1)
    """With the sources jsonl, parquet and csv, the share of a file's rows that may be dropped
    because a column is missing, empty or of the wrong type. They are counted; more of them are an
    error."""
    max_equal: float = Field(0.05, ge=0, le=1)
    """Share of the pairs whose completions may be equal to a model that trains on them: in their
    text, or after the cut to policy.max_new_tokens or to max_length of a selector, judge or reward.
    More of them are an error. They are counted in the report and kept: DPO and selectors learn
    nothing from them, and they count as half right in accuracies."""
    control_tokens: Literal["refuse", "escape", "keep"] = "refuse"
    """What happens to texts that hold control tokens of a tokenizer that reads them, such as
    `<|im_end|>`: 'refuse' ends the run before anything is trained; 'escape' writes them as ordinary
    text, with a space after their first character; 'keep' lets them be read as tokens, so that a prompt
    can open a turn of the system. With the last two they are counted."""
    align_prompts: PromptsConfig | None = None
    """Server prompts to align on, in place of those of the source. FedBiscuit table 5: safe-rlhf
    for QA."""
    test_prompts: PromptsConfig | None = None
    """Held-out prompts to evaluate policies on, in place of those of the source. FedBiscuit section
    7.1: alpaca_eval for QA."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.partition == "column" and self.column is None:
            raise ValueError(
                "column is needed with partition 'column': name the column whose values are the owners,"
                " such as domain"
            )
        for key in ("column", "column_clients"):
            if self.partition != "column" and getattr(self, key) is not None:
                raise ValueError(
                    f"{key} is not used with partition '{self.partition}': set partition to 'column', or"
                    f" leave {key} out"
                )
        owners: dict[str, str] = {}
        for client, values in (self.column_clients or {}).items():
            for value in values:
                if value in owners:
                    raise ValueError(
                        f"column_clients names the value '{value}' twice ({owners[value]}, {client}):"
                        " a value belongs to one client"
                    )
                owners[value] = client
        return self
