"""Sentence pairs with a plan in sentence-transformers' trainer: a small BERT embeds questions by answers.

python examples/sentence_pairs.py
"""

import tempfile

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import brimful as bf
import brimful.integrations.transformers as bft

CAPITALS = {
    "chile": "santiago", "cuba": "havana", "egypt": "cairo", "france": "paris", "ghana": "accra",
    "india": "delhi", "italy": "rome", "japan": "tokyo", "kenya": "nairobi", "latvia": "riga",
    "malta": "valletta", "nepal": "kathmandu", "norway": "oslo", "peru": "lima", "qatar": "doha",
    "spain": "madrid",
}  # fmt: skip
QUESTIONS = [f"what is the capital of {country}" for country in CAPITALS]
ANSWERS = [f"the seat of government there is {city}" for city in CAPITALS.values()]


def save_model(folder: str) -> None:
    """A BERT with random weights and its tokenizer, as `from_pretrained` reads them."""
    names = ["[PAD]", "[UNK]", *sorted({word for text in QUESTIONS + ANSWERS for word in text.split()})]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder)
    BertModel(
        BertConfig(vocab_size=len(names), hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                   intermediate_size=256, max_position_embeddings=32)
    ).save_pretrained(folder)  # fmt: skip


torch.manual_seed(0)
folder = tempfile.mkdtemp()
save_model(folder)
model = SentenceTransformer(modules=[Transformer(folder), Pooling(64)])
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir=folder, per_device_train_batch_size=16, learning_rate=1e-3, num_train_epochs=40,
        report_to="none", disable_tqdm=True, save_strategy="no",
    ),
    train_dataset=Dataset.from_dict({"question": QUESTIONS, "answer": ANSWERS}),
    loss=MultipleNegativesRankingLoss(model),  # each question against all answers of its batch
)  # fmt: skip

# A plan keeps the batch, which has the answers to compare with, and recomputes.
plan = bft.plan(trainer, budget="80%")  # on a GPU: budget="11GiB", or nothing for all that is free
print(bf.measure(bft.job(trainer), plan))
bft.apply(plan, trainer)
trainer.train()

similarities = model.similarity(model.encode(QUESTIONS), model.encode(ANSWERS))
found = (similarities.argmax(1) == torch.arange(len(QUESTIONS))).sum()
print(f"nearest to their own answer: {found} of {len(QUESTIONS)} questions")
