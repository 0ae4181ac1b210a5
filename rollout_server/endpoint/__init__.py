"""The recording endpoint: an agent that speaks OpenAI's chat API plays an episode, and its token ids are kept."""
