"""Pictures of what agents wrote: ``loop plot --rollouts``."""
