"""The private loss in a `RewardTrainer` of TRL: train on randomised labels, and check on randomised labels too.

python docs/examples/private_reward.py    (seconds on a CPU; no download, no recipe)
"""

import random
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from private_rlhf import LabelNoise, private_likelihood_loss, privatize
from private_rlhf.lm.base_models import tiny_config, tiny_tokenizer
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer


class MyRewardTrainer(RewardTrainer):
    noise = LabelNoise.of(2.0)  # ε = 2: each label is kept with probability α = .88

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, use_cache=False)
        margin = margins(outputs)
        loss = private_likelihood_loss(margin, torch.ones_like(margin), self.noise).mean()  # `chosen` is what z prefers
        return (loss, outputs) if return_outputs else loss


def margins(outputs):  # r(chosen) - r(rejected), (B,): TRL puts the chosen texts first
    chosen, rejected = outputs.logits.squeeze(-1).float().chunk(2)
    return chosen - rejected


rng, question = random.Random(0), {"role": "user", "content": "Name a river."}
rivers, openings = ["Rhine.", "Nile.", "Danube.", "Amazon.", "Volga."], ["Gladly: the", "Sure, the", "It is the"]
politeness = [rng.choice([+1, -1]) for _ in range(1200)]  # +1: the first answer is the polite one
truth = [side if rng.random() < 0.9 else -side for side in politeness]  # the secret labels, 9 of 10 for politeness
private = privatize(truth, epsilon=2.0)  # from here on nothing reads `truth`

tokenizer, rows = tiny_tokenizer([" ".join(rivers + openings)]), []
for side, z in zip(politeness, private, strict=True):
    answers = [f"{rng.choice(openings)} {rng.choice(rivers)}", f"No. {rng.choice(rivers)}"][:: side * z]
    chosen, rejected = ([question, {"role": "assistant", "content": text}] for text in answers)
    rows.append({"chosen": chosen, "rejected": rejected})

torch.manual_seed(0)
config = tiny_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
config.num_labels = 1
model = AutoModelForSequenceClassification.from_config(config)  # or from_pretrained(…, num_labels=1)
with TemporaryDirectory() as folder:
    arguments = RewardConfig(folder, max_steps=40, learning_rate=3e-3, use_cpu=True, bf16=False, report_to="none")
    training, test = Dataset.from_list(rows[:700]), Dataset.from_list(rows[700:])
    trainer = MyRewardTrainer(model, arguments, train_dataset=training, eval_dataset=test, processing_class=tokenizer)
    trainer.train()
    with torch.no_grad():
        margin = torch.cat([margins(model.eval()(**batch)) for batch in trainer.get_eval_dataloader()])

share = float((margin > 0).float().mean())  # of held-out private labels that the reward agrees with
error = (share * (1 - share) / len(margin)) ** 0.5 / trainer.noise.factor
print(f"held-out debiased accuracy {trainer.noise.debias_share(share):.3f} ± {error:.3f}: the estimated share of true")
print(f"labels that the reward predicts, from {len(margin)} private ones; a coin has .5, and here .9 is the best")
