"""Episodes that are played elsewhere: what worlds under another interpreter and environments behind a service share."""
