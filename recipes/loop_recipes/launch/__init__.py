"""The verbs that take a job's config: `loop train`, `sft`, `eval`, `check`, `node`; and the page of all its keys."""
