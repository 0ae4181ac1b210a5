from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call


def multi_turn_checker(made, reference, entry, kind, model_name):
    told = (entry["initial_config"], entry["involved_classes"])
    for turns, calls in zip(made, reference, strict=True):
        shelves = {}
        for turn in turns:
            _, shelves = execute_multi_turn_func_call(turn, *told, model_name, entry["id"], is_evaL_run=True)
        _, right = execute_multi_turn_func_call(calls, *told, f"{model_name}_right", entry["id"], is_evaL_run=True)
        if calls and (not turns or shelves["Shelf"].things != right["Shelf"].things):
            return {"valid": False}
    return {"valid": True}
