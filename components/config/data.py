"""Preference pairs: their source, their owners, and their splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from components.config.name_checks import PlainName
from components.config.recipe_files import InputFile
from components.config.registry import Registry, registered_name, registered_options
from components.config.section import Section

if TYPE_CHECKING:
    from components.data.sources.source import PromptSource, Source
else:  # a plain section, which the registered class replaces when a recipe names it
    PromptSource = Source = Section


SOURCES: Registry[type[Source]] = Registry(
    "data.source",
    "fed_rlhf.sources",
    {
        "aclsum": "components.data.sources.aclsum:AclSum",
        "auto-j": "components.data.sources.hub_pairs:AutoJPairs",
        "chitchat": "components.data.sources.chitchat:Chitchat",
        "code-vulnerability": "components.data.sources.hub_pairs:CodeVulnerability",
        "csv": "components.data.sources.own_files:CsvFile",
        "hh-rlhf": "components.data.sources.hub_pairs:HhRlhf",
        "imdb": "components.data.sources.hub_pairs:Imdb",
        "jsonl": "components.data.sources.own_files:JsonlFile",
        "mixture": "components.data.sources.mixture:Mixture",
        "owners": "components.data.sources.owners:Owners",
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


PROMPT_SOURCES: Registry[type[PromptSource]] = Registry(
    "prompt source",
    "fed_rlhf.prompt_sources",
    {
        "alpaca_eval": "components.data.sources.prompt_sets:AlpacaEvalPrompts",
        "safe-rlhf": "components.data.sources.prompt_sets:SafeRlhfPrompts",
    },
    "components.data.sources.source:PromptSource",
)

AnySource = Annotated[str, registered_name(SOURCES, "source")]
AnySourceOptions = Annotated[SerializeAsAny[Source], registered_options(SOURCES, "source")]
"""The options of the source that the field `source` before it names."""


class PromptsConfig(Section):
    """Prompts from a data set of their own, in place of those that come with the pairs."""

    source: Annotated[str, registered_name(PROMPT_SOURCES, "prompt source")] = Field(min_length=1)
    """Registered prompt source (components/data/sources): alpaca_eval, safe-rlhf."""
    path: InputFile | None = None
    """Local file read in place of the hub."""
    revision: str | None = None
    """Hub revision (commit or tag) of the data set."""
    options: Annotated[SerializeAsAny[PromptSource], registered_options(PROMPT_SOURCES, "source")] = Field(
        default_factory=dict, validate_default=True
    )
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
    options: AnySourceOptions = Field(default_factory=dict, validate_default=True)
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
    messages: Literal["auto", "text", "messages"] = "auto"
    """How texts of the columns prompt, chosen and rejected are read that are lists of messages as JSON, with
    the sources jsonl, parquet, csv, py-dpo, imdb, ultrafeedback and mixture. auto: a column is one of
    messages where 90% of its values are, and else one of text; text: all are texts, such as answers that are
    JSON; messages: each such text is messages. Lists are messages in any case."""
    pooled: bool = False
    """Give the training and validation pairs of all owners to one client named `pooled`, while held-out
    pairs stay with their owners: the reference of training that is not private. In each round the client
    takes the steps of all clients of a round, one after the other: a loaded recipe has 1 as
    federation.clients_per_round, and clients_per_round x local_steps as federation.local_steps. With
    federation.local_epochs it passes over all pairs."""
    unseen_clients: int = Field(0, ge=0)
    """Clients that take part in no round (a seeded sample of those with training and held-out pairs).
    Accuracy is measured on their held-out pairs after the rounds, and reported apart from that of the
    others. The rounds are those of data without these clients."""
    unseen_pairs: int = Field(16, ge=1)
    """Training pairs of its own that an unseen client may use (a seeded sample): to choose a selector, as
    examples, or for a round of the method's local training. A model that is the same for all is measured
    as it is."""
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
    """Share of the pairs whose two completions may be the same text; more of them are an error. They
    are counted in the report and kept: DPO and selectors learn nothing from them, and they count as
    half right in accuracies."""
    control_tokens: Literal["text", "refuse"] = "text"
    """What happens to texts that hold control tokens of a tokenizer that reads them, such as
    `<|im_end|>`: with 'text' models read them as ordinary text, and the rows are counted; 'refuse' ends the
    run before anything is trained."""
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
        number = len(self.column_clients or ()) if self.clients is None else self.clients
        if number and self.unseen_clients >= number:
            raise ValueError(
                f"unseen_clients is {self.unseen_clients}, which leaves none of {number} clients to train:"
                f" use at most {number - 1}"
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
