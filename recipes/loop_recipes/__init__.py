"""torchtune recipes that train and evaluate agents with LOOP, and the pieces they are made of."""
