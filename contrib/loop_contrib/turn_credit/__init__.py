"""Credit for turns: their values by Monte Carlo, and advantages spread over them."""
