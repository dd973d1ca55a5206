"""Tiny text models with random weights, as folders: an encoder and a reward model."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = ["who", "painted", "it", "?", "when", "was", "he", "born", "where", "user", "assistant", "no", "yes"]


def write_bert(folder: Path, *, labels: int = 0, template: str | None = None) -> str:
    """Write a tiny BERT whose vocabulary is a few words; with `labels` a sequence classifier."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    made.chat_template = template
    made.save_pretrained(folder)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(vocabulary), initializer_range=1.0, **small)
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    config.num_labels = labels or 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    return str(folder)
