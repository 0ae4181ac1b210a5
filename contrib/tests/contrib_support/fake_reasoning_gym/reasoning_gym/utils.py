import re

SYSTEM_PROMPTS = {"default": "Answer within <answer></answer>.\n"}


def extract_answer(completion):
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return found[-1].strip() if found else None
