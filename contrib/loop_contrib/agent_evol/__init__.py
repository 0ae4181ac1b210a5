"""AgentEvol (AgentGym, arXiv 2406.04151): rounds of collecting and training."""
