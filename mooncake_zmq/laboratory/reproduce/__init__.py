"""The paper's figures, ours beside theirs: one table of the runs, their assumptions, and the conclusions that hold."""
