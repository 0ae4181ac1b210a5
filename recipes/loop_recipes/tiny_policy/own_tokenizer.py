"""The tokenizer of this folder is the one in tokenizer.json, and no other of the same kind of model."""

from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    """Encodes as tokenizer.json says."""
