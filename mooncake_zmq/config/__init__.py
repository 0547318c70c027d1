"""Settings of a deployment: their records, how a file is read, and what is checked and warned of."""
