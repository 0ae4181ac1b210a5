"""Evaluates calls on a shelf for each agent, as the package does: by `eval`, of the words that it is given."""

import json

_shelves = {}


class Shelf:
    def __init__(self, things):
        self.things = list(things)

    def put(self, thing, times=1):
        if times < 1:
            raise ValueError("nothing to put")
        self.things += [thing] * times
        return {"things": len(self.things)}

    def look(self):
        return {"things": self.things}


def execute_multi_turn_func_call(
    func_call_list, initial_config, involved_classes, model_name, test_entry_id, long_context=False, is_evaL_run=False
):
    name = (model_name, is_evaL_run)
    shelf = _shelves.setdefault(name, Shelf(initial_config["Shelf"]["things"]))
    results = []
    for call in func_call_list:
        try:
            results.append(json.dumps(eval(call, {"put": shelf.put, "look": shelf.look})))
        except Exception as error:
            results.append(f"Error during execution: {error}")
    return results, {"Shelf": shelf}
