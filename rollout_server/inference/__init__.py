"""vLLM: its command line, its processes, and the router that spreads episodes over them."""
