#!/usr/bin/env bash
# One would guess: DecodeStream(ids=prompt) gives the text that follows the prompt, and never any of the prompt.
# So it is: where the prompt ends inside a character, all its text stands in front of the first piece; vLLM decodes so.
# See rollout_server/collecting/policy_sampler.py. tokenizers 0.23.3; 27 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone tokenizers==0.23.3 << 'END'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
ids = tokenizer.encode("Stop \U0001f980!").ids
def pieces(prompt):
    stream = DecodeStream(ids=ids[:prompt])
    return [piece for piece in (stream.step(tokenizer, token) for token in ids[prompt:]) if piece]
seen = {"before the character": pieces(5), "inside the character": pieces(7), "after the character": pieces(9)}
expected = {
    "before the character": ["\U0001f980", "!"],
    "inside the character": ["Stop \U0001f980", "!"],
    "after the character": ["!"],
}
END
