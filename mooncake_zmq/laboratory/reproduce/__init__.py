"""The paper's figures, ours beside theirs: one table of what is run, what is assumed, and which conclusions hold."""
