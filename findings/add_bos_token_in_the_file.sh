#!/usr/bin/env bash
# One would guess: "add_bos_token": false in tokenizer_config.json leaves the BOS away, as the same argument does.
# So it is: in the file it is not heeded, false or true; add_bos_token reads False beside ids that begin with the BOS.
# transformers 5.23.0 and tokenizers 0.23.3, a PreTrainedTokenizerFast; 27 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone transformers==5.23.0 tokenizers==0.23.3 << 'END'
import json, pathlib, tempfile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.add_special_tokens(["<s>"])
bos = tokenizer.token_to_id("<s>")
tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
folder = tempfile.mkdtemp()
tokenizer.save(folder + "/tokenizer.json")
def begins(in_file, **arguments):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    config |= {} if in_file is None else {"add_bos_token": in_file}
    pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
    opened = AutoTokenizer.from_pretrained(folder, **arguments)
    return [opened.add_bos_token, opened("ab").input_ids[0] == bos]
seen = {
    "nothing said": begins(None),
    "false in the file": begins(False),
    "true in the file": begins(True),
    "false as an argument": begins(None, add_bos_token=False),
}
expected = {
    "nothing said": [False, True],
    "false in the file": [False, True],
    "true in the file": [False, True],
    "false as an argument": [False, False],
}
END
