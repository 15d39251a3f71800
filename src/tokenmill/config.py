"""Frozen configuration, and the pure function that resolves it.

Flags are made from these fields (see ``cli``): a field's docstring is its help text. `resolve` leaves no "auto".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.errors import ConfigError, ModelUnreadable
from tokenmill.spec import DTypeName, HardwareInfo, ModelSpec

Eviction = Literal["lru", "lfu", "priority"]
LogLevel = Literal["debug", "info", "warning", "error"]
DEFAULT_MODEL = "smollm2-135m"
ELEMENT_SIZE: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_POOL_TOKENS = 65536
MIN_QUEUE_TOKENS = 1 << 20
MAX_THREADS = 1024
PAGE_TABLE_ENTRY_SIZE = 8
SPARE_WINDOW_PAGES = 3  # beside a window: one that is begun at its start, and some for the tokens of a step


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What is chosen on a device where the user leaves it open."""

    max_running: int
    prefill_budget: int
    memory_fraction: float
    attention: str


DEFAULTS = {
    "cpu": DeviceDefaults(max_running=64, prefill_budget=512, memory_fraction=0.25, attention="reference"),
    "cuda": DeviceDefaults(max_running=256, prefill_budget=8192, memory_fraction=0.9, attention="triton"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and in which form."""

    model: str = DEFAULT_MODEL
    """Alias, local folder, local .gguf file, or hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto is the faster of the two on this processor."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """How the CPU keeps weights: auto as quantised files have them (unless --dtype is given), none expanded to --dtype;
    int8 and int4 also pack plain numbers."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; auto is what the model and the K/V pool allow."""
    random_weights: bool = False
    """Take config.json alone and fill the model with seeded random numbers, to measure speed."""
    chat_template: str | None = None
    """File with a jinja2 chat template, in place of the model's own."""


@dataclass(frozen=True)
class EngineConfig:
    """Device memory and compute."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto is a CUDA device if there is a usable one."""
    attention: str = "auto"
    """Attention backend: reference, triton or flashinfer, or two as PREFILL,DECODE; auto is the fastest that the device
    has."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of K/V; auto is that of the weights, which alone the fast attention backends take."""
    page_size: int = 16
    """Tokens a K/V page."""
    num_pages: int | None = None
    """K/V pages of the layers that attend to everything, or of all where all have a window; auto sizes the pools from
    free memory."""
    num_window_pages: int | None = None
    """K/V pages of the layers with a window, in models that have both kinds; auto is half as many as --num-pages."""
    memory_fraction: float | None = None
    """Share of free memory that the K/V pool may take when --num-pages is auto; auto is 0.25, on CUDA 0.9."""
    threads: int | None = None
    """Compute threads; auto is the cores that this process may use."""
    graph_max_batch: int = 256
    """Largest step of decode rows that is replayed as a CUDA graph; 0 turns graphs off."""
    capture_first: bool = False
    """Capture CUDA graphs of plain draws (no top_k, top_p, min_p or bias) before the server is ready, not later."""
    debug_checks: bool = False
    """Check page ownership after every step, and sampled ids for range. Slow."""
    debug_ranks: bool = False
    """Let a second scheduler follow the first, or with --tp compare all ranks' plans; end if they ever differ."""
    tp: int = 1
    """Tensor parallelism: devices (on a CPU, processes) that share the model, each with a part of every layer."""
    nnodes: int = 1
    """Hosts over which --tp is spread evenly."""
    node_rank: int = 0
    """This host's number among --nnodes; number 0 answers HTTP."""
    rendezvous: str | None = None
    """HOST:PORT where host number 0 meets the others; the network between them must be private."""
    peer_memory: bool = True
    """Sum small tensors in memory that the GPUs of a host map from one another, not by NCCL."""
    rank_timeout: float = 8.0
    """Seconds without a sign of life from a process of --tp after which the server ends."""
    collective_timeout: float = 120.0
    """Seconds that processes of --tp may wait for one another within a step."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Batching and the prefix cache."""

    loop: Literal["overlap", "serial"] = "overlap"
    """overlap plans the next step while the device computes this one; serial does not."""
    policy: str = "fcfs"
    """Order of the queue: fcfs, longest-prefix, priority, deadline, shortest, fair (between the values of `user`), or
    your own as path.py:function."""
    batch_policy: Literal["mixed", "prefill-first"] = "mixed"
    """mixed puts decode rows and prompt chunks into one step; prefill-first alternates."""
    max_running: int | None = None
    """Most requests that run at once; auto is 64, on CUDA 256."""
    prefill_budget: int | None = None
    """Most prompt tokens a step; longer prompts are cut into chunks. auto is 512, on CUDA 8192."""
    prefix_cache: bool = True
    """Keep K/V of finished requests for prompts that start alike."""
    eviction: Eviction = "lru"
    """Prefixes forgotten first: those used least recently, by fewest requests, or by requests of lowest priority."""
    reserve_ratio: float = 0.3
    """Share of their max_tokens that requests are expected to draw (0 to 1), at first: it is learned from those that
    end. 1 is kept, and pages held back for all of it."""
    max_waiting: int | None = None
    """Most requests in the queue; more are refused. auto is one for 16 tokens of the K/V pool, at least 4 for each that
    may run."""
    max_waiting_tokens: int | None = None
    """Most prompt tokens in the queue; more are refused, but never a request alone. auto is 16 times the K/V pool, at
    least a million."""


@dataclass(frozen=True)
class ServerConfig:
    """HTTP and processes."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    tokenizers: int = 1
    """Tokenizer processes."""
    api_workers: int = 1
    """Processes that answer HTTP."""
    pooling: Literal["auto", "last", "mean"] = "auto"
    """What /v1/embeddings makes of a text: the final state of its last token, or the mean over its tokens; auto is what
    the model's files say, else last."""
    served_model_name: str | None = None
    """Name in /v1/models and in answers; default is the name that was given."""
    start_timeout: float = 120.0
    """Seconds that a process may take to become ready."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body; larger ones are refused with 413."""
    shutdown_grace: float = 3.0
    """Seconds that running requests get to end after SIGTERM."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys, one of which requests must then show. Others on this machine can see them: prefer --api-key-file."""
    api_key_file: str | None = None
    """File with one key a line; lines that begin with # are comments."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call this server from a browser, such as https://app.example.com; * is all."""
    tls_cert: str | None = None
    """PEM file with the certificate and its chain, to serve HTTPS."""
    tls_key: str | None = None
    """PEM file with the certificate's private key; default is in --tls-cert."""
    max_header_bytes: int = 32 * 1024
    """Largest head of a request: its line and all headers; larger ones are refused with 431."""
    max_headers: int = 100
    """Most headers of a request; more are refused with 431."""
    head_timeout: float = 10.0
    """Seconds that the head of a request may take to arrive."""
    body_timeout: float = 30.0
    """Seconds that the body of a request may take to arrive, and one more for each 16 KiB of it."""
    send_timeout: float = 300.0
    """Seconds after which a client that takes nothing of its answer is disconnected."""
    keep_alive: float = 60.0
    """Seconds that a connection without a request stays open."""
    sse_keep_alive: float = 15.0
    """Seconds without an event after which a stream gets a comment, so that proxies keep it open; 0 is never."""
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral", "json"] = "auto"
    """How the model writes tool calls; auto is what its chat template shows."""
    reasoning_parser: Literal["auto", "think", "mistral", "none"] = "auto"
    """What stands around the model's thoughts: <think>, [THINK], or nothing; auto is what its chat template shows."""
    timings: bool = False
    """Tell in every answer where its time went, as the field `timings` of a request does."""
    log_level: LogLevel = "info"
    """Least severe message that is logged."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that the engine processes need, as the user gave it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """RunConfig without any "auto" or None. Lengths are in tokens."""

    device: Literal["cpu", "cuda"]
    dtype: DTypeName
    kv_dtype: DTypeName
    attention: str
    threads: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    prefill_budget: int
    policy: str
    batch_policy: Literal["mixed", "prefill-first"]
    loop: Literal["overlap", "serial"]
    prefix_cache: bool
    eviction: Eviction
    reserve_ratio: float
    graph_max_batch: int
    capture_first: bool
    debug_checks: bool
    window: int = 0  # of the layers that have one, if any
    num_window_pages: int = 0
    has_full_kind: bool = True  # whether there are others; if not, `num_pages` only bounds the requests and the tree

    @property
    def has_priorities(self) -> bool:
        """Whether a request's priority may change anything; a policy of the user's own may look at it."""
        return "priority" in (self.policy, self.eviction) or ":" in self.policy

    @property
    def pool_tokens(self) -> int:
        """Tokens that the K/V pool holds."""
        return self.num_pages * self.page_size

    @property
    def kind_pages(self) -> tuple[int, ...]:
        """Pages of each kind of K/V, in the order of `ModelSpec.kv_kinds`."""
        windows = (self.num_window_pages,) if self.window else ()
        return (self.num_pages, *windows) if self.has_full_kind else windows

    @property
    def longest_row(self) -> int:
        """Tokens of one request that a step may compute: in windows, all their pages must be there at once."""
        if not self.window or self.num_window_pages >= self.pages_per_request:
            return self.max_model_len
        return (self.num_window_pages - 1) * self.page_size - self.window + 1

    @property
    def pages_per_request(self) -> int:
        """Pages of the longest possible request: the width of a page-table row."""
        return -(-self.max_model_len // self.page_size)


def resolve(raw: RunConfig, hardware: HardwareInfo, spec: ModelSpec) -> ResolvedConfig:
    """Choose every value that was left to tokenmill. Pure: same arguments, same answer.

    Raises ConfigError: values that cannot work, with what would.
    """
    engine, scheduler, defaults = raw.engine, raw.scheduler, DEFAULTS[hardware.device]
    max_running = defaults.max_running if scheduler.max_running is None else scheduler.max_running
    prefill_budget = defaults.prefill_budget if scheduler.prefill_budget is None else scheduler.prefill_budget
    share_of_memory = defaults.memory_fraction if engine.memory_fraction is None else engine.memory_fraction
    check_range("--page-size", engine.page_size, 1)
    check_range("--max-running", max_running, 1)
    check_range("--prefill-budget", prefill_budget, 1)
    check_range("--graph-max-batch", engine.graph_max_batch, 0, 4096)
    check_range("--max-waiting", 1 if scheduler.max_waiting is None else scheduler.max_waiting, 1)
    check_range("--max-waiting-tokens", 1 if scheduler.max_waiting_tokens is None else scheduler.max_waiting_tokens, 1)
    check_range("--threads", hardware.num_threads if engine.threads is None else engine.threads, 1, MAX_THREADS)
    check_range("--memory-fraction", share_of_memory, 0, 1)
    check_range("--reserve-ratio", scheduler.reserve_ratio, 0, 1)
    dtype: DTypeName = hardware.fastest_dtype if raw.model.dtype == "auto" else raw.model.dtype
    max_position, spec = spec.max_position, spec.within(raw.model.max_model_len)
    kv_dtype: DTypeName = dtype if engine.kv_dtype == "auto" else engine.kv_dtype
    pools = _pools(engine, share_of_memory, hardware, spec, kv_dtype)
    pool_tokens = pools[0] * engine.page_size  # of requests of any length, where there are layers that hold these
    has_full_kind = not spec.kv_kinds[0].window
    most = pool_tokens if has_full_kind else max_position
    max_model_len = _max_model_len(raw.model.max_model_len, most, max_position)
    per_request = -(-max_model_len // engine.page_size)
    config = ResolvedConfig(
        device=hardware.device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=engine.attention.replace("auto", defaults.attention),
        threads=engine.threads or hardware.num_threads,
        page_size=engine.page_size,
        num_pages=pools[0] if has_full_kind else max_running * per_request + pools[0],
        max_model_len=max_model_len,
        max_running=max_running,
        max_waiting=scheduler.max_waiting or max(4 * max_running, pool_tokens // 16),
        max_waiting_tokens=scheduler.max_waiting_tokens or max(MIN_QUEUE_TOKENS, 16 * pool_tokens),
        prefill_budget=prefill_budget,
        policy=scheduler.policy,
        batch_policy=scheduler.batch_policy,
        loop=scheduler.loop,
        prefix_cache=scheduler.prefix_cache,
        eviction=scheduler.eviction,
        reserve_ratio=scheduler.reserve_ratio,
        graph_max_batch=min(engine.graph_max_batch, max_running) if hardware.device == "cuda" else 0,
        capture_first=engine.capture_first and hardware.device == "cuda",
        debug_checks=engine.debug_checks,
        window=spec.kv_kinds[-1].window,
        num_window_pages=pools[-1] if spec.kv_kinds[-1].window else 0,
        has_full_kind=has_full_kind,
    )
    if config.kv_dtype != config.dtype and config.attention != "reference":
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} cannot be used: {config.attention} attention takes K/V of the weights' "
            f"type, {config.dtype}. Leave it at auto, or use --attention reference"
        )
    _check_pools(config, hardware, spec)
    return config


def _pools(engine: EngineConfig, share: float, hardware: HardwareInfo, spec: ModelSpec, dtype: DTypeName) -> list[int]:
    """The pages of each kind that were asked for, or that fit the memory; on a CPU not more than are of use."""
    kinds, num_pages = spec.kv_kinds, engine.num_pages
    # Where there are both kinds, those with a window need few pages of long requests, and as many of short ones.
    shares = [2 if kind.window and len(kinds) > 1 else 1 for kind in kinds]
    if num_pages is None:
        sizes = [spec.kv_bytes_per_token(ELEMENT_SIZE[dtype], kind) for kind in kinds]
        a_token = sum(size / part for size, part in zip(sizes, shares, strict=True))
        tokens = int(hardware.memory_bytes * share / a_token)
        if hardware.device == "cpu":
            tokens = min(tokens, max(DEFAULT_POOL_TOKENS, spec.max_position))
        num_pages = tokens // engine.page_size
        if num_pages < 1:
            limit = f"{share:.0%} of {hardware.memory_bytes >> 20} MiB"
            raise ConfigError(
                f"no K/V page of {engine.page_size} tokens fits {limit}: "
                "free some memory, raise --memory-fraction, lower --page-size, or set --num-pages"
            )
    check_range("--num-pages", num_pages, 1)
    if num_pages * engine.page_size < 2:
        raise ConfigError("--num-pages 1 with --page-size 1 holds one token; prompt and output need at least two")
    if engine.num_window_pages is None:
        least = min(-(-spec.window // engine.page_size) + SPARE_WINDOW_PAGES, num_pages)
        return [max(num_pages // part, least) if part > 1 else num_pages for part in shares]
    if len(kinds) == 1:
        raise ConfigError("--num-window-pages is for models with layers of both kinds, with and without a window")
    check_range("--num-window-pages", engine.num_window_pages, 1)
    return [num_pages, engine.num_window_pages]


def kv_bytes(config: ResolvedConfig, spec: ModelSpec) -> int:
    """Bytes of all K/V pages."""
    size, kinds = ELEMENT_SIZE[config.kv_dtype], zip(config.kind_pages, spec.kv_kinds, strict=True)
    return config.page_size * sum(pages * spec.kv_bytes_per_token(size, kind) for pages, kind in kinds)


def _check_pools(config: ResolvedConfig, hardware: HardwareInfo, spec: ModelSpec) -> None:
    """Raises ConfigError: the pools do not fit the memory, or a window does not fit its pool."""
    tables = len(config.kind_pages) * config.max_running * config.pages_per_request * PAGE_TABLE_ENTRY_SIZE
    needed = tables + kv_bytes(config, spec)
    if needed > hardware.memory_bytes:
        raise ConfigError(
            f"K/V pool and page table take {needed >> 20} MiB, but {hardware.memory_bytes >> 20} MiB are free: "
            "lower --num-pages, --page-size or --max-running"
        )
    least = min(-(-config.window // config.page_size) + SPARE_WINDOW_PAGES, config.pages_per_request)
    if config.window and config.num_window_pages < least:
        flag = "--num-window-pages" if config.has_full_kind else "--num-pages"
        raise ConfigError(
            f"{config.num_window_pages} K/V pages of {config.page_size} tokens do not hold this model's window of "
            f"{config.window}: raise {flag} to {least} or more"
        )


def _max_model_len(wanted: int | None, pool_tokens: int, max_position: int) -> int:
    """What was asked for, or the most that context and K/V pool hold."""
    if wanted is None:
        return min(max_position, pool_tokens)
    check_range("--max-model-len", wanted, 2)
    if wanted > max_position:
        raise ConfigError(f"--max-model-len {wanted} is over the model's context of {max_position} tokens")
    if wanted > pool_tokens:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit the K/V pool of {pool_tokens} tokens: "
            "raise --num-pages or --memory-fraction"
        )
    return wanted


def check_vocabulary(num_tokens: int, vocab_size: int) -> None:
    """Raises ModelUnreadable when a model has fewer token vectors than its tokenizer has tokens of its own."""
    if num_tokens > vocab_size:
        raise ModelUnreadable(
            f"the tokenizer has {num_tokens} tokens, but the model vectors for only {vocab_size}: "
            "they do not belong together. Fetch tokenizer and weights of the same model"
        )


def check_range(flag: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises ConfigError when `value` is not from `least` to `most`."""
    if not least <= value <= most:
        span = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ConfigError(f"{flag} must be {span}, not {value}")
