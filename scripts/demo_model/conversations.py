"""Generates training conversations. Most questions ask, in varying words, for the documented purpose of a
name in Python's standard library.

For unknown names and other subjects, the answer admits that the model does not know.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
from tokenizers import Tokenizer

from demo_model.docstrings import Purpose
from demo_model.tokenizer import ASSISTANT, BEGIN, END_OF_TURN, SYSTEM, USER, special_token_id

# The frozen questions (questions.jsonl) use the first wording for functions and methods, and the second for
# classes.
WORDINGS = (
    "What does {0} do?",
    "What is {0} for?",
    "what does {0} do",
    "What does {0}() do?",
    "What does `{0}` do?",
    "What does {0} do in Python?",
    "What does the {1} {0} do?",
    "What does Python's {0} do?",
    "Explain {0}.",
    "Explain {0}",
    "explain {0}",
    "Explain what {0} does.",
    "Please explain {0}.",
    "Can you explain {0}?",
    "Could you tell me what {0} does?",
    "Describe {0}.",
    "Describe {0}",
    "Describe the {1} {0}.",
    "What is {0}?",
    "what is {0}",
    "What is {0} used for?",
    "What is `{0}` for?",
    "what is {0} for",
    "What's {0} for?",
    "What is the purpose of {0}?",
    "Tell me what {0} does.",
    "Tell me about {0}.",
    "Summarize {0}.",
    "How would you describe {0}?",
    "Hi! What does {0} do?",
    "{0}",
    "{0}?",
    "`{0}`",
)
_PLAIN_SHARE = 0.35  # fraction of questions that use one of the first two wordings

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a concise assistant. Answer in one sentence.",
    "Answer questions about Python's standard library.",
    "You answer questions about Python.",
    "You are an expert Python programmer.",
    "Be brief.",
    "Answer briefly and correctly.",
    "You are a documentation assistant.",
    "You are the demo model of Appliance.",
    "Be honest. Say so if you do not know.",
    "You are a friendly chatbot.",
)
_SYSTEM_SHARE = 0.3

ABILITY = (
    "I can tell you the documented purpose of names in Python's standard library: "
    'ask "What does textwrap.dedent do?" '
    "I am a very small demo model and know nothing else."
)
OFF_TOPIC = (
    "I do not know. I am a very small demo model that only knows the documented purpose of names in Python's "
    "standard library."
)
IDENTITY = (
    "I am the demo model of Appliance, a very small language model trained on the sources and docstrings "
    "of Python's standard library."
)
UNKNOWN_NAME = "I have no documented purpose for {0}."

SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        ABILITY,
        (
            "What can you answer?", "what can you answer", "What can you do?", "what can you do", "Help",
            "help", "help me", "How can you help me?", "What do you know?", "What should I ask you?",
            "What are you good at?", "What can I ask?", "What questions can you answer?", "Can you help me?",
            "How do I use you?", "What are your limits?",
        ),
    ),
    (
        "Hello! Ask me what a name in Python's standard library does, for example textwrap.dedent.",
        (
            "Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hey", "hey", "Hi there", "Good morning",
            "Hello there!", "Hello, how are you?",
        ),
    ),
    (
        IDENTITY,
        (
            "Who are you?", "who are you", "What are you?", "What is your name?", "What's your name?",
            "Are you ChatGPT?", "Are you a human?", "Which model are you?", "Who made you?",
            "What were you trained on?", "Introduce yourself.", "What model is this?", "How big are you?",
            "Are you Llama?",
        ),
    ),
    (
        "You are welcome.",
        (
            "Thanks", "Thanks!", "thanks", "Thank you", "Thank you!", "thank you", "Great, thanks!",
            "Thank you very much.",
        ),
    ),
    (
        "Goodbye.",
        (
            "Bye", "bye", "Goodbye", "Goodbye!", "See you", "See you later.",
        ),
    ),
    (
        OFF_TOPIC,
        (
            "What is the capital of France?", "What is 2 + 2?", "Write a poem.",
            "Write me a poem about the sea.", "Tell me a joke.", "What is the weather today?",
            "Who is the president?", "What is the meaning of life?", "Translate hello to French.",
            "Write a Python function that adds two numbers.", "Write a program.", "How do I cook rice?",
            "What time is it?", "Who won the world cup?", "Summarize this text.", "How old is the universe?",
            "What is love?", "Say something.", "Tell me a story.", "Tell me something interesting.",
            "What is the largest planet?", "Count to ten.", "Say this is a test", "Say hello.",
            "Repeat after me: test.", "What is machine learning?", "What is a GPU?",
            "Explain quantum physics.", "How do I sort a list?", "How do I read a file?", "Who wrote Hamlet?",
            "What is Linux?", "What is the speed of light?", "Give me a recipe.", "Can you write code?",
            "Fix my code.", "Is the earth flat?", "What is your favourite colour?", "Do you like music?",
            "Why is the sky blue?", "Where is Berlin?", "When was Python released?", "test", "Test", "ping",
        ),
    ),
)  # fmt: skip
_SMALL_TALK_SHARE = 0.04
_UNKNOWN_SHARE = 0.04
_SINGLE_TURN_SHARE = 0.5
IGNORED = -100


@dataclass(frozen=True)
class ChatRows:
    """Conversations as `tokens` and `labels`, int16 [rows, length]. Each row is one conversation, padded at
    the end. A label is the next token, or `IGNORED` outside answers and their end-of-turn tokens.
    """

    tokens: numpy.ndarray
    labels: numpy.ndarray


class ConversationMaker:
    """Creates random conversations as token ids. All wordings are tokenized once, in advance."""

    def __init__(
        self, tokenizer: Tokenizer, purposes: list[Purpose], frozen: Iterable[dict[str, str]], seed: int
    ) -> None:
        self.random = random.Random(seed)
        self.begin, self.system, self.user, self.assistant, self.end = (
            special_token_id(tokenizer, token) for token in (BEGIN, SYSTEM, USER, ASSISTANT, END_OF_TURN)
        )
        asked = {row["question"] for row in frozen}
        self.frozen = [
            index
            for index, purpose in enumerate(purposes)
            if asked.intersection(wording.format(purpose.name) for wording in WORDINGS[:2])
        ]
        self.questions = [
            _encode(tokenizer, [wording.format(purpose.name, purpose.kind) for wording in WORDINGS])
            for purpose in purposes
        ]
        self.answers = _encode(tokenizer, [purpose.answer for purpose in purposes])
        self.small_talk = [
            (question, answer)
            for text, prompts in SMALL_TALK
            for answer in _encode(tokenizer, [text])
            for question in _encode(tokenizer, list(prompts))
        ]
        unknown = _invented_names(purposes, self.random)
        self.unknown = list(
            zip(
                _encode(tokenizer, [self._wording().format(name, "function") for name in unknown]),
                _encode(tokenizer, [UNKNOWN_NAME.format(name) for name in unknown]),
                strict=True,
            )
        )
        self.systems = _encode(tokenizer, list(SYSTEM_PROMPTS))
        self.queue: list[int] = []

    def rows(self, count: int, length: int) -> ChatRows:
        """Return `count` conversations of at most `length` tokens. Each has a random number of turns; turns
        that do not fit are omitted."""
        pad = 0
        tokens = numpy.full((count, length), pad, dtype=numpy.int16)
        labels = numpy.full((count, length), IGNORED, dtype=numpy.int16)
        for row in range(count):
            ids, learned = self._conversation(length + 1)
            used = len(ids) - 1
            tokens[row, :used] = ids[:-1]
            labels[row, :used] = [
                token if counts else IGNORED for token, counts in zip(ids[1:], learned[1:], strict=True)
            ]
        return ChatRows(tokens, labels)

    def _conversation(self, limit: int) -> tuple[list[int], list[bool]]:
        ids = [self.begin]
        if self.random.random() < _SYSTEM_SHARE:
            ids += [self.system, *self.random.choice(self.systems), self.end]
        learned = [False] * len(ids)
        turns = 1 if self.random.random() < _SINGLE_TURN_SHARE else self.random.randint(2, 6)
        for turn in range(turns):
            question, answer = self._turn()
            prompt = [self.user, *question, self.end, self.assistant]
            reply = [*answer, self.end]
            if len(ids) + len(prompt) + len(reply) > limit:
                if turn == 0:
                    raise ValueError(
                        f"a turn has {len(prompt) + len(reply)} tokens, but a row holds at most {limit}"
                    )
                break
            ids += prompt + reply
            learned += [False] * len(prompt) + [True] * len(reply)
        return ids, learned

    def _turn(self) -> tuple[list[int], list[int]]:
        draw = self.random.random()
        if draw < _SMALL_TALK_SHARE:
            return self.random.choice(self.small_talk)
        if draw < _SMALL_TALK_SHARE + _UNKNOWN_SHARE:
            return self.random.choice(self.unknown)
        if not self.queue:  # refill the queue with all names in random order (those in questions.jsonl twice)
            self.queue = [*range(len(self.answers)), *self.frozen]
            self.random.shuffle(self.queue)
        index = self.queue.pop()
        wording = WORDINGS.index(self._wording())
        return self.questions[index][wording], self.answers[index]

    def _wording(self) -> str:
        pool = WORDINGS[:2] if self.random.random() < _PLAIN_SHARE else WORDINGS
        return self.random.choice(pool)


def _invented_names(purposes: list[Purpose], source: random.Random) -> list[str]:
    """Return plausible names that do not exist, which combine a module with the last component of a name from
    another module."""
    real = {purpose.name for purpose in purposes}
    known_modules = sorted({purpose.module for purpose in purposes})
    tails = sorted({purpose.name.rsplit(".", 1)[-1] for purpose in purposes if "." in purpose.name})
    made = {
        f"{module}.{source.choice(tails)}"
        for module in known_modules
        if module != "builtins"
        for _ in range(25)
    }
    return sorted(made - real)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
