"""Twenty conversations of many kinds for comparing greedy answers."""

from tests.oracles.effort import scaled

NUM_TOKENS = scaled(64)
_QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who is afraid of the dark.",
    "List five uses of a paper clip.",
    "What is 17 + 25? Explain step by step.",
    "Translate 'good morning, my friend' into Spanish and German.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise in one sentence: The quick brown fox jumps over the lazy dog, but the dog does not wake up.",
    "Who wrote 'Pride and Prejudice', and in which year was it published?",
    "Explain photosynthesis to a six-year-old.",
    "Give me a recipe for pancakes with 2 eggs and 300 g of flour.",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "def add(a, b):\n    return a - b\n\nWhat is wrong with this code?",
    "Naïve café, übergröße, 東京, Ελλάδα, 🙂: which languages are these?",
    "  Leading   spaces\tand tabs\n\n\nand empty lines. Repeat them.",
    "Name the planets of the solar system in order of their distance from the sun, in 8 words. " * 4,
    "Is 3.14159 larger than 22/7? The year was 1984; call 555-0199.",
)
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    *([{"role": "user", "content": question}] for question in _QUESTIONS),
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "How do I bake bread?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada! How can I help?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "system", "content": ""}, {"role": "user", "content": "Tell me a joke."}],
)
