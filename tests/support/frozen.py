"""Has the garbage collector leave alone all that was imported before this: a fork whose collector looks through it
copies it, page by page."""

import gc

gc.freeze()
