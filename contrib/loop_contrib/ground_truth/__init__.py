"""SFT on reference solutions (LOOP, table 1: SFT-GT)."""
