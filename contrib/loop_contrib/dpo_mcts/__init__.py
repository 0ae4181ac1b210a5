"""DPO-MCTS (LOOP, table 1): trees over turns, searched for pairs to learn from."""
