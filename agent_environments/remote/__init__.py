"""Episodes that are played elsewhere: the code shared by worlds under another interpreter and environment services."""
