"""The reference that is not ours: transformers on a GGUF file.

    python -m tests.oracles.transformers_greedy GGUF OUT THREADS

OUT gets JSON: for each conversation its text, prompt ids, NUM_TOKENS greedy ids (end marks ignored), and for each of
them how far its logit was above the runner-up's.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tests.oracles.smollm2_prompts import CONVERSATIONS, NUM_TOKENS


@torch.inference_mode()
def main(gguf: Path, out: Path, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in CONVERSATIONS
    ]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # No token ends an answer here: all are compared over the same length.
    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    made = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = made.sequences[:, longest:].tolist()
    best_SB2 = torch.stack([logits.topk(2).values for logits in made.logits])
    margins = (best_SB2[..., 0] - best_SB2[..., 1]).T.tolist()
    cases = [
        {"text": text, "prompt": ids, "answer": answer, "margins": margin}
        for text, ids, answer, margin in zip(texts, prompts, answers, margins, strict=True)
    ]
    out.write_text(json.dumps(cases))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
