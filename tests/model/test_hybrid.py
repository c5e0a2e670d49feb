"""The whole model: sizes, locality, caches against recomputation, healing, draft heads, training."""

import pytest
import torch
from torch import Tensor

from epd.kernels.reference import BatchedDenseAttention, DenseAttention
from epd.model.hybrid import HybridModel
from epd.model.moe import RouterStats
from tests.fakes.pages import PagedCache
from tests.fakes.tiny_text import tiny_config, tiny_model

WINDOW_LEFT = 15
NUM_WINDOW_LAYERS = 5


def random_ids(num_tokens: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, 1000, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def dense_hidden(model: HybridModel, ids: Tensor) -> Tensor:
    hidden: Tensor = model(model.embed(ids), torch.arange(len(ids)), DenseAttention([len(ids)]))
    return hidden


def test_parameter_counts() -> None:
    trunk = sum(x.numel() for x in tiny_model().state_dict().values())
    with_heads = sum(x.numel() for x in tiny_model(3).state_dict().values())
    assert trunk == 5_107_488
    assert with_heads - trunk == 3 * 480_200


def test_one_window_layer_reaches_window_left_and_no_further() -> None:
    changes = {"num_hidden_layers": 1, "hybrid_layer_pattern": [1], "moe_layer_freq": [0]}
    model = tiny_model(**changes)
    embedded = model.embed(random_ids(40)).detach()
    i = 30

    def output(x: Tensor) -> Tensor:
        hidden: Tensor = model(x, torch.arange(40), DenseAttention([40]))
        return hidden[i]

    for position, is_seen in ((i - WINDOW_LEFT - 1, False), (i - WINDOW_LEFT, True), (i + 1, False)):
        changed = embedded.clone()
        changed[position] += 1.0
        assert bool((output(changed) != output(embedded)).any()) == is_seen


@pytest.mark.parametrize("prompt_len", [3, 15, 16, 17, 50])
@torch.no_grad()
def test_incremental_decoding_equals_recomputation(prompt_len: int) -> None:
    """Prompts shorter than, equal to and longer than the window, then more than a window of single tokens."""
    model = tiny_model()
    ids = random_ids(prompt_len + 40)
    cache = PagedCache(list(model.config.layers), page_size=4, num_pages=40)
    cache.admit("a")
    hidden = []
    for start, stop in [(0, prompt_len), *((i, i + 1) for i in range(prompt_len, len(ids)))]:
        attention = cache.attention(cache.extend("a", stop - start))
        hidden.append(model(model.embed(ids[start:stop]), torch.arange(start, stop), attention))
    torch.testing.assert_close(torch.cat(hidden), dense_hidden(model, ids), atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_batch_mates_do_not_matter() -> None:
    """A prefill chunk, a decode step and a verify step in one forward give what each gives alone."""
    model = tiny_model()
    contexts, counts = {"a": 0, "b": 33, "c": 18}, {"a": 21, "b": 1, "c": 4}
    ids = {name: random_ids(contexts[name] + counts[name], seed=i) for i, name in enumerate(contexts)}
    cache = PagedCache(list(model.config.layers), page_size=4, num_pages=60)
    for name, context in contexts.items():
        cache.admit(name)
        if context:
            model(model.embed(ids[name][:context]), torch.arange(context), cache.attention(cache.extend(name, context)))
    attention = cache.attention(*(cache.extend(name, counts[name]) for name in contexts))
    new = torch.cat([ids[name][contexts[name] :] for name in contexts])
    positions = torch.cat([torch.arange(contexts[name], len(ids[name])) for name in contexts])
    together = torch.split(model(model.embed(new), positions, attention), list(counts.values()))
    for name, rows in zip(contexts, together, strict=True):
        alone = dense_hidden(model, ids[name])[contexts[name] :]
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("chunk", [200, 30])
@torch.no_grad()
def test_lost_windows_are_healed_exactly(chunk: int) -> None:
    """Re-running the last window_left tokens per window layer over kept full pages restores every window."""
    model = tiny_model()
    page_size, num_tokens = 4, 160
    ids = random_ids(num_tokens + 6)
    cache = PagedCache(list(model.config.layers), page_size=page_size, num_pages=120)
    cache.admit("a")
    attention = cache.attention(cache.extend("a", num_tokens))
    model(model.embed(ids[:num_tokens]), torch.arange(num_tokens), attention)
    start = (num_tokens - NUM_WINDOW_LAYERS * WINDOW_LEFT) // page_size * page_size
    cache.drop_window("a", fresh_from_page=start // page_size)
    full_before = cache.keys(0).clone()
    for first in range(start, num_tokens, chunk):
        last = min(first + chunk, num_tokens)
        sequence = cache.sequence("a", num_new=last - first, num_context=first, write_full=False)
        model(model.embed(ids[first:last]), torch.arange(first, last), cache.attention(sequence))
    torch.testing.assert_close(cache.keys(0), full_before, atol=0, rtol=0, equal_nan=True)
    attention = cache.attention(cache.extend("a", 6))
    hidden = model(model.embed(ids[num_tokens:]), torch.arange(num_tokens, num_tokens + 6), attention)
    torch.testing.assert_close(hidden, dense_hidden(model, ids)[num_tokens:], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("k", range(3))
@torch.no_grad()
def test_draft_head_in_one_pass_equals_row_by_row(k: int) -> None:
    model = tiny_model(3)
    ids = random_ids(40 + 1 + k)
    token, hidden = model.embed(ids[1 + k :]), dense_hidden(model, ids)[:40]
    whole = model.draft(k, token, hidden, torch.arange(40), DenseAttention([40]))
    cache = PagedCache([model.config.mtp_layer(k)], page_size=4, num_pages=20)
    cache.admit("a")
    for t in range(40):
        attention = cache.attention(cache.extend("a", 1))
        row = model.draft(k, token[t : t + 1], hidden[t : t + 1], torch.tensor([t]), attention)
        torch.testing.assert_close(row[0], whole[t], atol=1e-4, rtol=1e-3)


def test_training_lowers_the_loss_and_reaches_every_parameter() -> None:
    """A batch of repeated runs of tokens is learned through the training attention, draft head included."""
    model = HybridModel(tiny_config(num_hidden_layers=3, hybrid_layer_pattern=[0, 1, 0], moe_layer_freq=[0, 1, 1]), 1)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch, length = 4, 40
    ids = random_ids(batch * (length + 2), seed=5).view(batch, -1) % 50
    positions = torch.arange(length).repeat(batch)
    losses = []
    for _ in range(12):
        stats = RouterStats()
        attention = BatchedDenseAttention(batch, length)
        hidden = model(model.embed(ids[:, :length].flatten()), positions, attention, router_stats=stats)
        drafted = model.draft(0, model.embed(ids[:, 1 : length + 1].flatten()), hidden, positions, attention)
        loss = torch.nn.functional.cross_entropy(model.logits(hidden), ids[:, 1 : length + 1].flatten())
        loss = loss + torch.nn.functional.cross_entropy(model.logits(drafted), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0
    assert set(stats.tokens_per_expert()) == {1, 2}


@torch.no_grad()
def test_bf16_stays_near_fp32() -> None:
    model, ids = tiny_model(1), random_ids(60)
    rounded = HybridModel(model.config, 1, dtype=torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    assert rounded.embed_tokens.dtype == torch.bfloat16
    expected = dense_hidden(model, ids)
    actual = dense_hidden(rounded, ids)
    assert actual.dtype == torch.bfloat16
    assert rounded.logits(actual).dtype == torch.float32
    # A token near a routing boundary may change experts, so the middle of the error counts, not its maximum.
    assert float((actual.float() - expected).abs().median()) < 0.05
