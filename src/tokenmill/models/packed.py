"""A decoder whose weights stay packed, and whose steps are one call of the C kernels each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.attention.base import KVCache
from tokenmill.attention.cpu import CpuAttention
from tokenmill.layers.batch import ForwardBatch
from tokenmill.layers.rope import attention_factor, rope_frequencies
from tokenmill.models.base import WeightSource
from tokenmill.models.families import FAMILIES, LLAMA
from tokenmill.ops.api import Hidden
from tokenmill.ops.cpu.kernels import CpuKernels, Layer, Model, Step
from tokenmill.ops.cpu.packed import BLOCK, FLOATS, KINDS, LANES, PackedMatrix
from tokenmill.spec import ModelSpec

WIDE_BITS = 8  # of token vectors, of the output matrix, and of quantised types that are made anew
NUMBERS_AT_ONCE = 2**19  # of a matrix held expanded, by each reader
MAX_LAYERS = 1024  # whose phases the pool has counters for
READERS = 2


def why_not_packed(checkpoint: WeightSource, bits: int | None) -> str | None:
    """Why a checkpoint cannot be served packed; None: it can. Without `bits`, plain numbers cannot."""
    spec = checkpoint.spec
    if FAMILIES.get(spec.family) is not LLAMA or spec.experts or spec.unrotated_layers or spec.window_layers:
        return f"models of the family {spec.family} have layers that the CPU kernels do not know"
    if spec.attention_cap or spec.logits_cap or spec.norm_offset or spec.activation != "silu":
        return "its activation, norms or caps are not those that the CPU kernels know"
    if spec.num_layers > MAX_LAYERS:
        return f"it has over {MAX_LAYERS} layers"
    if spec.head_dim % LANES or spec.head_dim > 256 or spec.num_heads // spec.num_kv_heads > LANES:
        return f"its heads of {spec.head_dim} dimensions are not a multiple of {LANES} up to 256"
    if not spec.has_output:
        return "it has no output matrix"
    if any(size % BLOCK for size in (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)):
        return f"its sizes are no multiples of {BLOCK}"
    if bits is None and any(len(shape) > 1 and not checkpoint.kind(name) for name, shape in checkpoint.shapes.items()):
        return "its files hold plain numbers"
    return None


class PackedDecoder:
    """A `CausalLM` of the Llama family on one CPU rank; see `why_not_packed`. Logits are float32."""

    def __init__(self, checkpoint: WeightSource, kernels: CpuKernels, bits: int | None) -> None:
        """Read and pack the weights, where they are plain numbers with `bits` of 8 or 4.

        Tensors' names and shapes are known to be right. Raises ModelUnreadable: they cannot be read.
        """
        self._spec, self._kernels, self._bits = checkpoint.spec, kernels, bits or WIDE_BITS
        self._checkpoint = checkpoint  # which holds no file open
        self._kept: list[Tensor | PackedMatrix] = []  # what the structs point into
        self._tasks: list[Callable[[], None]] = []
        spec, names = self._spec, LLAMA
        self._layers = (Layer * spec.num_layers)()
        for number, layer in enumerate(self._layers):
            self._read_layer(layer, f"{names.layer}.{number}.")
        embedding = self._matrix(names.embedding, spec.vocab_size, spec.hidden_size, WIDE_BITS)
        output = embedding
        if not spec.tie_embeddings:
            output = self._matrix(names.output, spec.vocab_size, spec.hidden_size, WIDE_BITS)
        rotary_dim = spec.rope.rotary_dim or spec.head_dim
        frequencies = self._keep(rope_frequencies(spec.rope, rotary_dim, spec.max_position).contiguous())
        self._final_norm = self._vector(names.final_norm + ".weight", spec.hidden_size)
        self._model = Model(
            spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary_dim,
            spec.num_layers, 0, spec.norm_eps, attention_factor(spec.rope), embedding.struct, output.struct,
            self._final_norm.data_ptr(), frequencies.data_ptr(), self._layers,
        )  # fmt: skip
        with ThreadPoolExecutor(READERS, "weights") as pool:
            try:
                for done in [pool.submit(task) for task in self._tasks]:
                    done.result()
            except BaseException:  # what fails first ends the rest
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._tasks.clear()

    @property
    def spec(self) -> ModelSpec:
        """The whole model's shape."""
        return self._spec

    @property
    def num_kv_heads(self) -> int:
        """See `CausalLM.num_kv_heads`."""
        return self._spec.num_kv_heads

    def attention(self) -> CpuAttention:
        """The backend that plans this model's steps."""
        spec, its = self._spec, self._spec.attention_scale
        shape = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        return CpuAttention(self._kernels, scale=spec.head_dim**-0.5 if its is None else its, **shape)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Tensor:
        """See `CausalLM.forward`."""
        return self._run(batch, kv, wants_logits=True)[1]

    def hidden(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Hidden:
        """See `CausalLM.hidden`."""
        return Hidden(self._run(batch, kv, wants_logits=False)[0])

    def final_states(self, hidden: Hidden) -> Tensor:
        """See `CausalLM.final_states`."""
        return F.rms_norm(hidden.value, self._final_norm.shape, self._final_norm, self._spec.norm_eps)

    def logits(self, hidden: Hidden) -> Tensor:
        """See `CausalLM.logits`."""
        states = hidden.value.contiguous()
        logits = states.new_empty(len(states), self._spec.vocab_size)
        if len(states):
            step = Step(sampled=len(states), states=states.data_ptr(), logits=logits.data_ptr())
            self._kernels.step(self._model, step)
        return logits

    def _run(self, batch: ForwardBatch, kv: Sequence[KVCache], *, wants_logits: bool) -> tuple[Tensor, Tensor]:
        """The states [sampled, hidden] of the tokens that draw, and their logits if these are wanted, else none."""
        (cache,), spec, tokens = kv, self._spec, len(batch.input_ids)
        drawing = torch.arange(tokens) if batch.logits_indices is None else batch.logits_indices
        ids, kv_slots = batch.input_ids.long().contiguous(), batch.kv_slots[0].long().contiguous()
        positions, drawing = batch.positions.int().contiguous(), drawing.int().contiguous()
        states = torch.empty(len(drawing), spec.hidden_size)
        logits = torch.empty(len(drawing) if wants_logits else 0, spec.vocab_size)
        self._point_at(cache)
        inputs = [its.data_ptr() for its in (ids, kv_slots, positions, drawing, states)]
        logits_place = logits.data_ptr() if wants_logits else None
        attention = batch.attention[0].over(cache)
        self._kernels.step(self._model, Step(attention, tokens, len(drawing), *inputs, logits_place))
        return states, logits

    def _point_at(self, cache: KVCache) -> None:
        if self._layers[0].keys == cache.keys.data_ptr() and self._layers[0].values == cache.values.data_ptr():
            return
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def _read_layer(self, layer: Layer, prefix: str) -> None:
        spec, names, dim, bits = self._spec, LLAMA, self._spec.head_dim, self._bits
        hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * dim
        attention, mlp = names.attention, names.mlp

        def matrix(name: str, lines: int, inputs: int, has_bias: bool) -> PackedMatrix:
            return self._matrix(prefix + name, lines, inputs, bits, has_bias=has_bias)

        kv_width = spec.num_kv_heads * dim
        widths = (attention.query, heads), (attention.key, kv_width), (attention.value, kv_width)
        for place, (name, lines) in enumerate(widths):
            layer.qkv[place] = matrix(name, lines, hidden, spec.attention_bias).struct
        layer.output = matrix(attention.output, hidden, heads, spec.attention_output_bias).struct
        for place, name in enumerate((mlp.gate, mlp.up)):
            layer.gate_up[place] = matrix(name, inner, hidden, spec.mlp_bias).struct
        layer.down = matrix(mlp.down, hidden, inner, spec.mlp_bias).struct
        vectors = {"attention_norm": (names.attention_norm, hidden), "mlp_norm": (names.mlp_norm, hidden)}
        if spec.qk_norm:
            vectors |= {"query_norm": (attention.query_norm, dim), "key_norm": (attention.key_norm, dim)}
        for field, (name, size) in vectors.items():
            setattr(layer, field, self._vector(f"{prefix}{name}.weight", size).data_ptr())

    def _matrix(self, name: str, lines: int, inputs: int, bits: int, *, has_bias: bool = False) -> PackedMatrix:
        """A matrix that a task will fill."""
        checkpoint, weight = self._checkpoint, name + ".weight"
        kind, bits = KINDS.get(checkpoint.kind(weight), (FLOATS, WIDE_BITS if checkpoint.kind(weight) else bits))
        matrix = PackedMatrix(lines, inputs, bits, self._vector(name + ".bias", lines) if has_bias else None)
        self._kept.append(matrix)

        def fill() -> None:
            step = max(LANES, NUMBERS_AT_ONCE // inputs // LANES * LANES)
            for start in range(0, lines, step):
                stop = min(start + step, lines)
                rows = checkpoint.read_packed(weight, start, stop) if kind else checkpoint.read(weight, start, stop)
                matrix.fill(self._kernels, rows, start, kind)

        self._tasks.append(fill)
        return matrix

    def _vector(self, name: str, size: int) -> Tensor:
        return self._keep(self._checkpoint.read(name, 0, size).float().contiguous())

    def _keep(self, vector: Tensor) -> Tensor:
        self._kept.append(vector)
        return vector
