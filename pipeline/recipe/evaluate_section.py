"""Section `evaluate` of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from private_rlhf.recipe.load import IF_SET, NO_EFFECT, STRICT
from pydantic import Field
from pydantic.dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JudgeSettings:
    """The judge of the policy's answers and those of π_ref: a chat model behind a URL, a reward model, a language
    model in a folder, or sentence embeddings."""

    url: str | None = None
    """Base address of an OpenAI-compatible endpoint, e.g. https://host/v1. Prompts and answers are sent there. Its key
    is read from the environment variable OPENAI_API_KEY, never saved, and sent to api.openai.com, loopback and the
    hosts in PRIVATE_RLHF_JUDGE_HOSTS (comma-separated) only."""
    model: str | None = None
    """`url`: the model to ask for."""
    path: Path | None = None
    """Checkpoint folder of a sequence-classification model with one output; its tokenizer may be another."""
    lm: Annotated[Path | None, IF_SET] = None
    """Checkpoint folder of a chat model: its log-odds of naming the one answer or the other, over both orders."""
    embedding: Annotated[bool | None, IF_SET] = None
    """true: what people prefer as read into sentence embeddings (`hh_truth`; brought by `private-rlhf-lab`)."""
    public: bool = False
    """Declares that the judge learned only from public labels; otherwise its verdicts may reveal protected ones. Needed
    with `url` and `lm`, and where the folder has no reward_metadata.json."""
    allow_http: bool = False
    """`url`: also without encryption, to hosts other than this machine."""
    request: dict[str, Any] = Field(default_factory=dict)
    """`url`: further fields of each request. temperature is 0 and max_tokens 1024 unless they are given here; null
    leaves one out. A reply that was cut counts as unclear."""
    concurrency: Annotated[int, NO_EFFECT] = Field(default=8, gt=0)
    """`url`: requests under way at the same time, over all processes."""
    retries: Annotated[int, NO_EFFECT] = Field(default=5, ge=0)
    """`url`: of a request after a broken connection, no answer in time, or status 408, 409, 425, 429, 500, 502, 503 or
    504; waits of 2, 4, 8, … seconds between them, or what the endpoint asks for, at most 60."""
    timeout: Annotated[float, NO_EFFECT] = Field(default=120.0, gt=0)
    """`url`: seconds without a word from the endpoint that count as no answer."""

    def __post_init__(self) -> None:
        kinds = [name for name in ("url", "path", "lm", "embedding") if getattr(self, name)]
        if len(kinds) != 1:
            raise ValueError(
                "judge must have one of url (chat endpoint), path (reward model), lm (language model) and embedding:"
                " give one"
            )
        if self.lm is not None and not self.public:
            raise ValueError(
                "public must be true with lm, whose labels are not known: set it if they are public"
            )
        if (self.model is None) != (self.url is None):
            raise ValueError("model must be given with url, and only with url: it names the model of a chat endpoint")
        if self.url is not None:
            _check_url(self.url, self.allow_http)
            if not self.public:
                raise ValueError(
                    "public must be true with url, whose labels are not known: set it if they are public"
                )
        if reserved := {"model", "messages", "stream", "n"} & set(self.request):
            raise ValueError(f"request holds {min(reserved)}, which the judge sets itself: remove it")


def _check_url(url: str, allow_http: bool) -> None:
    """Says nothing of the address: it may hold a password."""
    try:
        parts = urlsplit(url)
        valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.scheme not in ("https", "http"):
        raise ValueError("url must be the address of an endpoint: give one like https://host/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("url must not hold a user, password or query, as it is saved: put the key into OPENAI_API_KEY")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK and not allow_http:
        raise ValueError("url must be https for another machine: take https, or set allow_http (--judge-http)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateConfig:
    """Win rates, KL, true reward and J against π_ref, with 95 % intervals."""

    num_prompts: int = Field(default=240, gt=0)
    samples_per_prompt: int = Field(default=1, gt=0)
    gibbs_candidates: int = Field(default=32, ge=0)
    """N draws of π_ref per prompt for the Gibbs yardstick; 0 switches it off."""
    batch_size: int = Field(default=128, gt=0)
    max_pairs: int | None = Field(default=None, gt=0)
    """Cap on evaluation pairs for the likelihood win rate."""
    shown_samples: int = Field(default=8, ge=0)
    """Prompts whose completions the report shows, evenly spread; unless 0, the one where the estimated reward falls
    most below that of π_ref is added."""
    truth: Annotated[str | None, IF_SET] = None
    """The known reward r* where the prompts are not the embedded task's, by which J is measured: a name that an
    installed package adds, as `private-rlhf-lab` does `hh_truth` (people's preferences as sentence embeddings)."""
    judge: JudgeSettings | None = None
    """An outside judge beside the known truth and the reward model that the policy was trained against."""
