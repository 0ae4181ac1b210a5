"""ColBench's backend programming: a human knows what a function must do, and the agent asks before it writes it.

The world of SWEET-RL (arXiv 2503.15478, section 3): ten rounds, hidden particulars, tests of the final answer.
"""
