"""Evaluation: which policies on which tasks, scores with intervals, comparisons and reports."""
