"""A random tiny model whose next token mostly follows from the last one, so that its draft heads are often right."""

import torch

from epd.model.hybrid import HybridModel
from tests.fakes.tiny_checkpoint import CHANGES
from tests.fakes.tiny_text import tiny_model


def guessing_model(strength: float = 0.5) -> HybridModel:
    """Three draft heads. With `strength` 0.3 hardly a guess is right, with 0.5 every second, with 0.7 four of five.

    Embeddings outweigh what layers add to them by so much; each token's follower is another token's embedding, and the
    heads hand on the embedding they are given.
    """
    model = tiny_model(3, **CHANGES)
    generator = torch.Generator().manual_seed(1)
    width, num_ids = model.config.hidden_size, model.config.vocab_size
    with torch.no_grad():
        model.embed_tokens.copy_(strength * torch.randn(num_ids, width, generator=generator))
        model.lm_head.copy_(model.embed_tokens[torch.randperm(num_ids, generator=generator)] / strength)
        for head in model.mtp:
            joined = head.eh_proj
            assert isinstance(joined, torch.nn.Parameter)
            joined.mul_(0.3)
            joined[:, :width] += strength * torch.eye(width)
    return model
