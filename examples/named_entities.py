"""Named entities with a plan in Transformers' `Trainer`: a small BERT learns names of people and places.

python examples/named_entities.py
"""

import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import brimful as bf
import brimful.integrations.transformers as bft

PEOPLE = ("ada lovelace", "alan turing", "grace hopper", "katherine johnson")
PLACES = ("london", "new york", "manchester", "white sulphur springs")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
IGNORED = -100  # label of every token but the first of a word


def sentence(person: str, place: str) -> tuple[list[str], list[str]]:
    """Words, and the tag of each."""
    words, tags = [], []
    for part, kind in ((person, "PER"), ("once lived in", None), (place, "LOC")):
        for number, word in enumerate(part.split()):
            words.append(word)
            tags.append("O" if kind is None else f"{'I' if number else 'B'}-{kind}")
    return words, tags


def make_tokenizer() -> PreTrainedTokenizerFast:
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    pieces.train_from_iterator([*PEOPLE, *PLACES, "once lived in"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]")


def encode(tokenizer: PreTrainedTokenizerFast, words: list[str], tags: list[str]) -> dict[str, list[int]]:
    tokens = tokenizer(words, is_split_into_words=True)
    pairs = zip([None, *tokens.word_ids()], tokens.word_ids(), strict=False)
    labels = [IGNORED if word in (None, before) else TAGS.index(tags[word]) for before, word in pairs]
    return {**tokens, "labels": labels}


torch.manual_seed(0)
tokenizer = make_tokenizer()
sentences = [sentence(person, place) for person in PEOPLE for place in PLACES]
words, tags = sentences.pop(5)  # its person and its place are in other sentences
model = BertForTokenClassification(
    BertConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
               intermediate_size=256, num_labels=len(TAGS))
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=32, learning_rate=3e-3, num_train_epochs=3,
    report_to="none", disable_tqdm=True, save_strategy="no",
)  # fmt: skip
data = [encode(tokenizer, *one) for one in sentences * 20]
collate = DataCollatorForTokenClassification(tokenizer)
trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)

plan = bft.plan(trainer, budget="60%")  # on a GPU: budget="11GiB", or nothing for all that is free
print(bf.measure(bft.job(trainer), plan))
bft.apply(plan, trainer)
trainer.train()

encoded = encode(tokenizer, words, tags)
is_first = torch.tensor(encoded.pop("labels")) != IGNORED
inputs = {name: torch.tensor([entry], device=model.device) for name, entry in encoded.items()}
predicted = model.eval()(**inputs).logits[0].argmax(1).cpu()
for word, tag in zip(words, predicted[is_first].tolist(), strict=True):
    print(f"{word:10} {TAGS[tag]}")
