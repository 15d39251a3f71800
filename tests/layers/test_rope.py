import math

import pytest
import torch

from tokenmill.layers.rope import RotaryEmbedding, attention_factor, rope_frequencies
from tokenmill.ops.reference import ReferenceOps
from tokenmill.spec import ModelSpec, RopeSpec


def test_linear_is_default_at_a_fraction_of_the_position() -> None:
    default = rope_frequencies(RopeSpec(), 16, 100)
    torch.testing.assert_close(rope_frequencies(RopeSpec(kind="linear", factor=4.0), 16, 100), default / 4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = RopeSpec(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
    default, scaled = rope_frequencies(RopeSpec(), 32, 512), rope_frequencies(rope, 32, 512)
    waves = 2 * math.pi / default
    torch.testing.assert_close(scaled[waves < 16], default[waves < 16])
    torch.testing.assert_close(scaled[waves > 64], default[waves > 64] / 8)
    between = (waves > 16) & (waves < 64)
    assert between.any()
    assert ((scaled < default) & (scaled > default / 8))[between].all()


def test_frequency_factors_divide() -> None:
    rope = RopeSpec(frequency_factors=(1.0, 2.0, 4.0, 8.0))
    torch.testing.assert_close(
        rope_frequencies(rope, 8, 100), rope_frequencies(RopeSpec(), 8, 100) / torch.tensor([1.0, 2.0, 4.0, 8.0])
    )


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeSpec(), 1.0),
        (RopeSpec(kind="linear", factor=4.0), 1.0),
        (RopeSpec(kind="yarn", factor=4.0), 0.1 * math.log(4) + 1),
        (RopeSpec(kind="yarn", factor=1.0), 1.0),
        (RopeSpec(kind="yarn", factor=4.0, attention_factor=1.5), 1.5),
        (RopeSpec(kind="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (RopeSpec(kind="longrope", factor=32.0, original_max_position=4096), math.sqrt(1 + 5 / 12)),
        (RopeSpec(kind="longrope", factor=32.0, original_max_position=4096, attention_factor=1.2), 1.2),
    ],
)
def test_attention_factor(rope: RopeSpec, expected: float) -> None:
    assert attention_factor(rope) == pytest.approx(expected)


def test_angles_are_those_of_the_positions() -> None:
    spec = ModelSpec("llama", 8, 16, 8, 1, 2, 2, 8, 100, rope=RopeSpec(kind="yarn", factor=2.0, attention_factor=3.0))
    rotation = RotaryEmbedding(spec.rope, spec, ReferenceOps(), torch.device("cpu")).rotation(
        torch.tensor([0, 5, 131071])
    )
    cos, sin = rotation.cos, rotation.sin
    expected = torch.tensor([[0.0], [5.0], [131071.0]]) * rope_frequencies(spec.rope, 8, 100)
    assert cos.shape == sin.shape == (3, 1, 8)
    torch.testing.assert_close(cos[:, 0], torch.cat((expected.cos(), expected.cos()), -1) * 3)
    torch.testing.assert_close(sin[:, 0], torch.cat((-expected.sin(), expected.sin()), -1) * 3)


def test_without_rope_nothing_turns() -> None:
    spec = ModelSpec("llama", 8, 16, 8, 1, 2, 2, 8, 100)
    rotation = RotaryEmbedding(None, spec, ReferenceOps(), torch.device("cpu")).rotation(torch.tensor([0, 5, 131071]))
    assert (rotation.cos == 1).all()
    assert not rotation.sin.any()


def test_longrope_takes_its_long_factors_where_the_context_is_over_the_original() -> None:
    rope = RopeSpec(
        kind="longrope", original_max_position=64, frequency_factors=(1.0, 2.0), long_factors=(4.0, 8.0), factor=2.0
    )
    default = rope_frequencies(RopeSpec(), 4, 128)
    torch.testing.assert_close(rope_frequencies(rope, 4, 64), default / torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(rope_frequencies(rope, 4, 128), default / torch.tensor([4.0, 8.0]))
