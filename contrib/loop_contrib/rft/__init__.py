"""Rejection-sampling fine-tuning (LOOP, appendix C.2): samples until every task is solved."""
