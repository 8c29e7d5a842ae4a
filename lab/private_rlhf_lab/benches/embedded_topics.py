"""The embedded task's prompts: topics times request forms. Training and evaluation share the forms and no topic
(three head nouns recur: bus, meeting and ticket, as in "a parking ticket" and "a museum ticket").

A third of the topics of each split are pleasant, a third neutral and a third mildly annoying, so that the reference
policy's sentiment is middling and there is something left to align.
"""

from __future__ import annotations

from private_rlhf.embedded.task import Split

REQUEST_FORMS = (
    "Write one short sentence about {}.",
    "Describe {} in one or two short sentences.",
    "What do you think of {}? Answer in one sentence.",
    "Tell me about {} in one short sentence.",
    "Give a brief comment on {}.",
)

TRAIN_TOPICS = (
    # pleasant
    "a birthday party", "a walk on the beach", "fresh bread", "a sleeping kitten", "a summer concert",
    "a cup of hot chocolate", "an old friend", "a flower garden", "a family picnic", "a good book",
    "a wedding dance", "a mountain view", "a weekend trip", "a kind teacher", "a new bicycle",
    "strawberry ice cream", "a starry night", "a puppy",
    # neutral
    "a city bus", "a kitchen table", "a library card", "the local market", "a pair of shoes", "a morning meeting",
    "an apartment building", "a grocery list", "the weather in autumn", "a wooden bridge", "a hotel room",
    "a bowl of soup", "a train station", "a history lesson", "an old radio", "a haircut", "a river",
    "a telephone call",
    # mildly annoying
    "a delayed train", "a rainy Monday", "a broken printer", "a flat tire", "a parking ticket", "a lost umbrella",
    "a cold shower", "a noisy neighbor", "a long queue", "a burnt dinner", "a dead phone battery",
    "a visit to the dentist", "a slow computer", "a missed flight", "a leaking roof", "a headache",
    "an unpaid bill", "a boring lecture",
)

EVAL_TOPICS = (
    # pleasant
    "a day at the zoo", "a fruit salad", "a surprise gift", "a warm blanket", "a sunny morning", "a school play",
    "a singing bird", "a chocolate cake", "a sailing boat", "a beloved grandmother", "a snowman", "a favorite song",
    "a football victory", "a campfire", "a smiling baby", "a painting", "a swimming pool",
    # neutral
    "a wooden chair", "a post office", "a taxi ride", "a pencil", "an elevator", "the evening news", "a bus driver",
    "a glass of water", "a street lamp", "a museum ticket", "a farm", "a newspaper", "a job interview",
    "a kitchen knife", "a road map", "a winter coat", "a clock",
    # mildly annoying
    "a traffic jam", "a cancelled meeting", "a spilled coffee", "a lost key", "a sore throat", "a broken window",
    "a power cut", "a mosquito bite", "a late delivery", "a dirty kitchen", "a wrong number", "a muddy road",
    "a stale sandwich", "a tax form", "a crowded bus", "a torn shirt", "a failed exam",
)


def prompts(split: Split) -> list[str]:
    """Every prompt of a split, topic by topic: 270 for training, 255 for evaluation."""
    topics = TRAIN_TOPICS if split == "train" else EVAL_TOPICS
    return [form.format(topic) for topic in topics for form in REQUEST_FORMS]


def topic_of(prompt: str) -> str:
    """The topic a prompt of this task asks about. Raises ValueError for a prompt that is none of them."""
    for form in REQUEST_FORMS:
        head, tail = form.split("{}")
        if prompt.startswith(head) and prompt.endswith(tail):
            return prompt[len(head) : len(prompt) - len(tail)]
    raise ValueError(f"not a prompt of the embedded task: {prompt!r}")
