"""Text tasks: recall a key from a long text, write records as JSON, count, repeat a line, and small talk."""

from __future__ import annotations

import numpy as np

from training.tasks.types import Sample, Turn, generator, pick, pick_system

NAME_LIST = """
    amber anchor apple arrow autumn badger bamboo barley basil beacon birch bishop bottle branch bridge bronze butter
    cactus candle canyon carbon castle cedar cherry cinder circle clover cobalt comet copper coral cotton crystal dagger
    daisy desert diamond dragon eagle ember falcon feather fern flint forest fossil garden garnet ginger glacier granite
    hammer harbor hazel heron hollow honey island ivory jade jasmine jungle juniper kettle lagoon lantern lemon lily
    linen lotus magnet maple marble meadow mint mirror moss needle nickel oak olive onyx orchid otter oyster paper pearl
    pepper piano pine planet poppy prairie quartz quill rabbit raven reed ribbon river robin rocket rose ruby saddle
    saffron sage salmon sand sapphire shadow silver sparrow spruce stone storm summer sunset swan temple thistle thunder
    tiger topaz tulip tunnel turtle valley velvet violet walnut water willow winter wolf zephyr"""
NAMES = tuple(NAME_LIST.split())
SUBJECTS = (
    "the old sailor",
    "a young baker",
    "the quiet teacher",
    "my neighbour",
    "the tall farmer",
    "a tired driver",
    "the village doctor",
    "her brother",
    "the night guard",
    "a small child",
    "the painter",
    "the clockmaker",
    "our guide",
    "the librarian",
    "a grey cat",
    "the mayor",
)
VERBS = (
    "walked past",
    "looked at",
    "forgot",
    "repaired",
    "painted",
    "carried",
    "talked about",
    "found",
    "sold",
    "watched",
    "cleaned",
    "remembered",
    "counted",
    "wrote about",
    "waited near",
    "left",
)
OBJECTS = (
    "the wooden door",
    "a broken chair",
    "the long road",
    "an empty boat",
    "the market square",
    "a heavy box",
    "the red roof",
    "some letters",
    "the narrow street",
    "a warm coat",
    "the stone wall",
    "an early train",
    "the kitchen window",
    "a bag of flour",
    "the green hill",
    "two silver spoons",
)
ENDINGS = (
    "in the morning",
    "before lunch",
    "without a word",
    "after the rain",
    "near the river",
    "on a cold day",
    "for a long time",
    "at noon",
    "during the winter",
    "with great care",
    "once again",
    "late at night",
)
ABILITIES = (
    "I place shapes in pictures, read words and numbers, follow motion, hear keys and beeps, "
    "recall keys from long texts, write records and count."
)
SMALL_TALK = (
    ("hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("hi", "Hello! How can I help you?"),
    ("Hi there", "Hello! How can I help you?"),
    ("Good morning", "Hello! How can I help you?"),
    ("Who are you?", "I am MiMo nano, a very small model made to test a server."),
    ("who are you", "I am MiMo nano, a very small model made to test a server."),
    ("What is your name?", "I am MiMo nano, a very small model made to test a server."),
    ("What can you do?", ABILITIES),
    ("what can you do", ABILITIES),
    ("Help", ABILITIES),
    ("How are you?", "I am fine, thank you."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("bye", "Goodbye!"),
)
KEY_QUESTIONS = (
    "What is the key of {name}?",
    "What is the key of {name}?",
    "Tell me the key of {name}.",
    "Which key belongs to {name}?",
)
LETTERS = "abcdefghij"
RECORD_COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
RECORD_QUESTIONS = (
    "Write as JSON: {listed}",
    "Make JSON records of this list: {listed}",
    "{listed}\nWrite this list as JSON.",
    "Turn this into JSON: {listed}",
)
SYLLABLE_LIST = "ba ko mi ru te sa lo ni fu da ve zo pi ga hu wa re to mu si"
SYLLABLES = tuple(SYLLABLE_LIST.split())


def sentence(rng: np.random.Generator) -> str:
    """A grammatical filler sentence; sometimes a pair of made-up words or numbers slips in."""
    words = f"{pick(rng, SUBJECTS)} {pick(rng, VERBS)} {pick(rng, OBJECTS)}"
    if rng.random() < 0.6:
        words += f" {pick(rng, ENDINGS)}"
    if rng.random() < 0.08:
        words += f" with {made_up(rng)} and {int(rng.integers(2, 99))} others"
    return words[0].upper() + words[1:] + "."


def made_up(rng: np.random.Generator) -> str:
    """A word that no list holds."""
    return "".join(pick(rng, SYLLABLES) for _ in range(int(rng.integers(2, 4))))


def draw_names(rng: np.random.Generator, count: int) -> list[str]:
    """Different names, mostly from the list."""
    names = [str(name) for name in rng.choice(NAMES, count, replace=False)]
    for place in range(count):
        if rng.random() < 0.1:
            names[place] = made_up(rng)
    return list(dict.fromkeys(names))


def recall(
    seed: int, index: int, num_sentences: int, num_questions: int = 1, max_keys: int = 8, crowded: bool = False
) -> Sample:
    """Filler with key lines in it, then one or several questions.

    `crowded` keys share their first digits, so that a digit alone does not tell which key it belongs to.
    """
    rng = generator(f"recall{num_sentences}", seed, index)
    names = draw_names(rng, int(rng.integers(1, max_keys + 1)) if num_questions == 1 else max_keys)
    keys = {name: "".join(str(int(digit)) for digit in rng.integers(0, 10, 4)) for name in names}
    if crowded:
        firsts = rng.integers(0, 10, 2)
        keys = {
            name: f"{int(firsts[int(rng.integers(2))])}{key[1:]}"
            if rng.random() < 0.7
            else f"{firsts[0]}{firsts[1]}{key[2:]}"
            for name, key in keys.items()
        }
    lines = [sentence(rng) for _ in range(num_sentences)]
    for name, key in keys.items():
        lines.insert(int(rng.integers(len(lines) + 1)), f"The key of {name} is {key}.")
    body = (" " if rng.random() < 0.7 else "\n").join(lines)
    asked = [str(name) for name in rng.permutation(list(keys))[:num_questions]]
    turns = []
    for place, name in enumerate(asked):
        question = pick(rng, KEY_QUESTIONS).format(name=name)
        text = f"{body}{pick(rng, (' ', chr(10), chr(10) * 2))}{question}" if place == 0 else question
        turns.append(Turn((text,), describe_key(name, keys[name])))
    return Sample("recall", tuple(turns), pick_system(rng))


def describe_key(name: str, key: str) -> str:
    """The wanted answer: the line of the text, then the key."""
    return f"The text says: The key of {name} is {key}. So the answer is {key}."


def record_samples(rng: np.random.Generator, count: int) -> list[tuple[int, str, str]]:
    """(count, colour, item) of each record; items differ."""
    items = rng.choice(NAMES, count, replace=False)
    return [(int(rng.integers(1, 100)), pick(rng, RECORD_COLOURS), str(item)) for item in items]


def records(seed: int, index: int) -> Sample:
    """A lettered list to a JSON array, 2 to 10 objects."""
    rng = generator("records", seed, index)
    rows = record_samples(rng, int(rng.integers(2, 11)))
    listed = ", ".join(
        f"{letter}) {number} {colour} {item}" for letter, (number, colour, item) in zip(LETTERS, rows, strict=False)
    )
    objects = ", ".join(
        f'{{"id": "{letter}", "count": {number}, "colour": "{colour}", "item": "{item}"}}'
        for letter, (number, colour, item) in zip(LETTERS, rows, strict=False)
    )
    question = pick(rng, RECORD_QUESTIONS).format(listed=listed)
    return Sample("records", (Turn((question,), f"[{objects}]"),), pick_system(rng))


def repeat(seed: int, index: int) -> Sample:
    """Copy a line of random words and numbers: the shortest way to learn to look things up."""
    rng = generator("repeat", seed, index)
    words = []
    for _ in range(int(rng.integers(4, 16))):
        kind = rng.random()
        words.append(
            made_up(rng) if kind < 0.03 else str(int(rng.integers(0, 10000))) if kind < 0.6 else pick(rng, NAMES)
        )
    line = " ".join(words)
    return Sample("repeat", (Turn((f"Repeat after me: {line}",), line),), pick_system(rng))


def count(seed: int, index: int) -> Sample:
    """Count up or down between two numbers."""
    rng = generator("count", seed, index)
    low = int(rng.integers(0, 100))
    high = low + int(rng.integers(9, 51))
    if rng.random() < 0.7:
        question, numbers = f"Count from {low} to {high}.", range(low, high + 1)
    else:
        question, numbers = f"Count down from {high} to {low}.", range(high, low - 1, -1)
    return Sample("count", (Turn((question,), ", ".join(map(str, numbers))),), pick_system(rng))


def small_talk(seed: int, index: int) -> Sample:
    """A greeting or a question about the model; sometimes two in a row."""
    rng = generator("small_talk", seed, index)
    turns = []
    for _ in range(1 + int(rng.random() < 0.3)):
        question, answer = SMALL_TALK[int(rng.integers(len(SMALL_TALK)))]
        turns.append(Turn((question,), answer))
    return Sample("small_talk", tuple(turns), None)


# A hundred sentences are more than a thousand tokens; the longest texts of the training have 135.
LONG_TEXT_SENTENCES = (100, 126)


def sample(seed: int, index: int) -> Sample:
    """The held-out recall task: one key out of a text of more than a thousand tokens with up to eight keys in it."""
    rng = generator("length", seed, index)
    return recall(seed, index, num_sentences=int(rng.integers(*LONG_TEXT_SENTENCES)))
