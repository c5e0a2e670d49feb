"""What travels between gateway, prefill and decode. All frozen, all msgspec; importing this costs no torch.

    gateway --Submit--> prefill --KvTransfer--> decode
    gateway <--TokenDelta, Finish-- prefill and decode

Every admitted request ends with exactly one `Finish`, sent by the worker that held it last. A worker that has drained
says `Farewell` to the gateways it has answered, and goes when they say `Goodbye` (see `encoder.parting`).
"""

from enum import StrEnum

import msgspec

from encoder.types import EmbeddingRef, Farewell, Goodbye, HistogramCounts
from preprocess.types import MediaKey


class Role(StrEnum):
    """What a worker does: compute prompts and hand the KV over, continue from KV it was handed, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens `[start, stop)` are placeholders of one medium and take its embedding rows from `row_start` on.

    `media` indexes `GenerateRequest.embeddings`. A placeholder's identity is (key, row), never its pad id.
    """

    start: int
    stop: int
    key: MediaKey
    row_start: int
    media: int


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature` 0 is greedy. `top_logprobs` None means no log-probabilities, 0 only the chosen token's.

    No token that would end the answer is drawn as one of its first `min_tokens`.

    `max_tokens` counts the whole answer, earlier attempts included: a retry passes the same parameters again.

    What changes the odds of a token, in this order: `logit_bias` (token ids and what is added to their logits),
    `repetition_penalty` (of tokens of prompt and answer), `frequency_penalty` and `presence_penalty` (of the answer's),
    and `grammar` (llguidance's text), which allows only what goes on with it; then temperature, `min_p`, `top_k` and
    `top_p`. At the end of a grammar the answer ends, whatever `ignore_eos` says: with a grammar `stop_token_ids` hold
    every token that ends an answer. All of it is a function of the answer's tokens alone.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    min_tokens: int = 0
    grammar: str | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were there already have other odds."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def looks_back(self) -> bool:
        """Whether the odds of a token depend on the tokens before it, beyond what the model makes of them."""
        return self.grammar is not None or self.has_penalties

    @property
    def changes_odds(self) -> bool:
        """Whether what is drawn from is not the model's own, whatever the temperature."""
        return self.looks_back or bool(self.logit_bias) or self.min_tokens > 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue.

    `request_id` is unique per attempt: a retry after a lost worker is a new id, so late messages of the old attempt
    cannot reach it. `num_emitted` counts output tokens of earlier attempts that are already part of `token_ids`; it
    offsets `TokenDelta.index` and the sampling position, so that a retried seed draws what the first attempt would have
    drawn. Prompts of one `session` probably begin alike; its KV is kept together. Empty where nobody said.
    `traceparent` (W3C) is the span this is a part of, and `tracestate` what comes with it; empty where nobody traces.
    """

    request_id: str
    token_ids: tuple[int, ...]
    spans: tuple[MediaSpan, ...] = ()
    embeddings: tuple[EmbeddingRef, ...] = ()
    sampling: SamplingParams
    arrival_unix_s: float
    deadline_unix_s: float
    num_emitted: int = 0
    use_cache: bool = True
    session: str = ""
    traceparent: str = ""
    tracestate: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one attempt. `cached_tokens` needed no computing, `healed_tokens` were re-run to restore windows; both
    at the request's first admission, whatever happened to it later. Of the cached ones `host_tokens` came from the
    host's memory and `store_tokens` from the store; the others were on the device."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    healed_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Gateway to prefill. `decode_address` names where the KV goes; None for a worker that decodes, too.

    `kv_fingerprint` is how that worker holds KV: a prompt is not computed for one that could not use it.
    """

    request: GenerateRequest
    decode_address: str | None = None
    decode_incarnation: str | None = None
    kv_fingerprint: str | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop working on a request, wherever it is. Unknown ids are ignored.

    Sent by a gateway to both workers of a request: the one that holds it answers with a cancelled `Finish`, a decode
    worker that still waits for the KV forgets it silently. A prefill worker sends it to decode when no KV will come.
    """

    request_id: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A gateway's greeting and heartbeat. A worker ends the requests of a gateway that falls silent."""

    sequence: int


class ExpectKv(msgspec.Struct, frozen=True, kw_only=True, tag="expect"):
    """Gateway to decode: KV for this request will come from a prefill worker; deltas go to the sender of this."""

    request: GenerateRequest


class KvTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    """Prefill to decode: KV of `num_tokens` prompt tokens and the first generated token.

    Tensors, in this order: for each full-attention layer K `[full pages, P, heads, 192]` and V `[.., 128]` of the pages
    from `first_full_page` on; then for each window layer (MTP heads last) K and V of the live window's pages only, from
    `first_window_page` on. `incarnation` is the decode process the prefill side was told to send to; any other refuses.
    `timings` are the prefill worker's, for the decode worker's `Finish`.

    With draft heads two tensors `[R, width]` follow, of the prompt's last R tokens: their embeddings and the model's
    hidden states; `draft_token_ids` are guesses of what comes after `first_token`.
    """

    request_id: str
    incarnation: str
    num_tokens: int
    first_token: int
    page_size: int
    num_full_layers: int
    num_window_layers: int
    first_full_page: int
    num_full_pages: int
    first_window_page: int
    num_window_pages: int
    cached_tokens: int
    healed_tokens: int
    layout_fingerprint: str
    timings: dict[str, float] = {}
    draft_token_ids: tuple[int, ...] = ()
    host_tokens: int = 0
    store_tokens: int = 0
    first_token_unix_s: float = 0.0
    """When the prompt was computed; 0 where nobody said."""


class KvRefused(msgspec.Struct, frozen=True, kw_only=True, tag="kv_refused"):
    request_id: str
    message: str


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """Output tokens `[index, index + len(token_ids))` of the whole answer, earlier attempts included.

    The token that stops an answer (end of sequence or one of `stop_token_ids`) is counted in the usage, never sent.

    The first of a worker for a request says what admission found and how long it has taken so far: a gateway that ends
    an answer itself, at a stop string, never hears the `Finish`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    timings: dict[str, float] = {}


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The end of an attempt. `retryable` marks a failure of the machinery, not of the request. `stop_token_id` is the
    token that stopped the answer, if one did."""

    request_id: str
    reason: FinishReason
    usage: Usage
    status: int = 200
    code: str = ""
    message: str = ""
    retryable: bool = False
    timings: dict[str, float] = {}
    stop_token_id: int | None = None


class LabelledCounter(msgspec.Struct, frozen=True, kw_only=True):
    """One of several counters of the same name, parted by `labels`, such as a tier or a node of the store."""

    name: str
    labels: dict[str, str]
    value: float


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """A worker's answer to `Hello`. `incarnation` changes with every start of the process.

    Of the pages that are free, those `cached` hold KV that nobody uses now and are evicted when room is short. Workers
    whose `kv_fingerprint` is equal can go on from each other's KV.
    """

    sequence: int
    worker: str
    incarnation: str
    role: Role
    address: str
    model: str
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    num_waiting: int
    num_running: int
    full_pages_free: int
    full_pages_total: int
    window_pages_free: int
    window_pages_total: int
    ready: bool
    full_pages_cached: int = 0
    window_pages_cached: int = 0
    kv_fingerprint: str = ""
    counters: dict[str, float] = {}
    labelled: tuple[LabelledCounter, ...] = ()
    histograms: tuple[HistogramCounts, ...] = ()


ToWorker = Submit | Abort | Hello | ExpectKv | KvTransfer | Goodbye
FromWorker = TokenDelta | Finish | WorkerInfo | KvRefused | Farewell
