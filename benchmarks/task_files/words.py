def normal(text):
    return text.strip().casefold()


TASKS = [{"id": f"word_{n}", "question": f"Say word{n}.", "target": f"WORD{n}"} for n in range(20)]
