"""The example model's parts that need no process group."""

from __future__ import annotations

import json
import math

import pytest
import torch

from examples.mla_lm import bytes as byte_tokens
from examples.mla_lm.attention import attend_shard
from examples.mla_lm.cache import PagedLatentCache, local_length, local_row
from examples.mla_lm.config import parse_config, read_config
from examples.mla_lm.generate import generate
from examples.mla_lm.model import load_model
from examples.mla_lm.parallel import Layout, create_layout
from examples.mla_lm.rope import softmax_scale

MINIMAL = {
    "model_type": "deepseek_v3",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_ownership_numbers_each_ranks_rows_from_zero(world_size, interleave):
    positions = torch.arange(200)
    owner = positions // interleave % world_size
    rows = local_row(positions, world_size, interleave)
    for rank in range(world_size):
        own = rows[owner == rank]
        assert own.tolist() == list(range(len(own)))
        for length in range(200):
            count = local_length(torch.tensor(length), rank, world_size, interleave)
            assert count == int((owner[:length] == rank).sum())


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_cache_gives_every_owned_position_a_row_of_its_own(rank, interleave):
    config = parse_config(MINIMAL)
    layout = Layout(dcp_rank=rank, dcp_size=2)
    cache = PagedLatentCache(
        config,
        layout,
        batch_size=2,
        max_length=19,
        block_size=4,
        interleave=interleave,
    )
    slots = [[], []]
    for count in (3, 7, 1, 8):
        for sequence in range(2):
            slots[sequence] += cache.extend(sequence, count).tolist()
    seen = set()
    for sequence in range(2):
        table = cache.block_table[sequence]
        row = 0
        for position, slot in enumerate(slots[sequence]):
            if position // interleave % 2 == rank:
                assert slot == table[row // 4] * 4 + row % 4
                assert slot >= 4
                seen.add(slot)
                row += 1
            else:
                assert slot < 4  # the spare block
        assert row == cache.seq_lens()[sequence]
    assert len(seen) == int(cache.seq_lens().sum()) == cache.num_rows
    with pytest.raises(ValueError, match="at most 19 positions in sequence 1, got 20"):
        cache.extend(1, 1)


def test_an_empty_shard_has_output_zero_and_lse_minus_infinity():
    torch.manual_seed(0)
    cache = torch.randn(3, 2, 6)
    cache[0] = float("nan")  # a block that nobody may read
    table = torch.tensor([[1, 2], [0, 0]])
    query = torch.randn(2, 3, 6)
    cache[0] = 0
    output, lse = attend_shard(query, cache, table, torch.tensor([3, 0]), 4, 0.5)
    scores = query[0] @ cache[1:].flatten(0, 1)[:3].T * 0.5
    expected = scores.softmax(-1) @ cache[1:].flatten(0, 1)[:3, :4]
    torch.testing.assert_close(output[0], expected)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1))
    assert torch.equal(output[1], torch.zeros(3, 4))
    assert lse[1].tolist() == [float("-inf")] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(change, message):
    parse_config(MINIMAL)
    with pytest.raises(ValueError, match=message):
        parse_config(MINIMAL | change)


def test_old_and_new_spellings_of_rope_mean_the_same():
    scaling = {
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    old = {"rope_theta": 5e3, "rope_scaling": {"type": "yarn", **scaling}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, **scaling}}
    rope = parse_config(MINIMAL | old).rope
    assert rope == parse_config(MINIMAL | new).rope
    assert rope.theta == 5e3
    mscale = 0.1 * math.log(40) + 1
    assert softmax_scale(rope, 192) == pytest.approx(192**-0.5 * mscale**2)


def test_the_end_tokens_of_generation_config_win(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | {"eos_token_id": 3}))
    assert read_config(tmp_path).eos_token_ids == (3,)
    generation = {"eos_token_id": [4, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_token_ids == (4, 5)


def test_a_directory_without_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_a_split_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"divide by the 4 .* got 6"):
        Layout(tp_size=4).share(6, "num_attention_heads")
    with pytest.raises(ValueError, match="dcp_size 1 for one rank, got 2"):
        create_layout(2)


@pytest.mark.parametrize(("prompts", "count"), [([], 1), ([[1], []], 1), ([[1]], 0)])
def test_generation_needs_a_prompt_and_a_token(prompts, count):
    with pytest.raises(ValueError, match="one or more tokens"):
        generate(None, prompts, count)


def test_bytes_round_trip():
    text = "Zwölf Boxkämpfer"
    tokens = byte_tokens.encode(text)
    assert tokens[0] == byte_tokens.BOS
    assert max(tokens[1:]) < 256
    assert byte_tokens.decode([*tokens, byte_tokens.EOS]) == text
