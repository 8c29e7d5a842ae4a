"""The program on a reward model's card: scores with plain transformers, equal to this package's."""

from __future__ import annotations

from typing import Any

from private_rlhf.lm.model_card import FILES, FOLDER, CardText
from private_rlhf.reward_models.bound import check_reward_bound
from private_rlhf.reward_models.model import score_layer
from transformers import AutoModelForSequenceClassification

METADATA = "noise of the labels, loss, bound and size of the fit; private-rlhf reads no reward model without it"
BONUS = "statistics of the uncertainty, which private-rlhf subtracts from the reward; the scores above are without it"
ONE_OUTPUT = "raw = model(**texts).logits[:, 0]"
TOKEN_SUM = """outputs = model.score(model.base_model(**texts).last_hidden_state)  # of every token
    mask = texts["attention_mask"]
    last = outputs[range(len(mask)), mask.sum(dim=1) - 1, 0]
    raw = last + (outputs[..., 1] * mask).sum(dim=1)"""
NO_CLASSIFIER = (
    "transformers has no sequence classifier for `{}`, so only private-rlhf reads this reward model:"
    " `private-rlhf evaluate --judge rm:FOLDER`."
)


def reward_text(trained_on: str, results: str, model: Any, reward_bound: float | None) -> CardText:
    """The text of a reward model's card. model: a sequence classifier with a head of one output or two."""
    readable = type(model.config) in AutoModelForSequenceClassification._model_mapping
    token_sum = score_layer(model).out_features == 2
    start = program(token_sum, reward_bound) if readable else NO_CLASSIFIER.format(model.config.model_type)
    files = FILES | {"reward_metadata.json": METADATA, "bonus.safetensors": BONUS}
    return CardText(trained_on, "text-classification", start, results, files)


def program(token_sum: bool, reward_bound: float | None) -> str:
    """A program that prints the rewards of two answers. token_sum: the head has two outputs."""
    bound, bounded = check_reward_bound(reward_bound), "reward = raw"
    if bound is not None:
        half = f"{bound / 2:g}"
        bounded = f"reward = {half} * torch.tanh(raw / {half})  # as in training: rewards lie within ±{half}"
    return f"""import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

{FOLDER}
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
question = {{"role": "user", "content": "Name a river."}}
answers = ["The Rhine is a lovely river.", "No."]
conversations = [[question, {{"role": "assistant", "content": answer}}] for answer in answers]
texts = tokenizer.apply_chat_template(conversations, padding=True, return_dict=True, return_tensors="pt")
with torch.inference_mode():
    {TOKEN_SUM if token_sum else ONE_OUTPUT}
{bounded}
print(reward.tolist())"""
