"""Settings of a deployment: their records, how a file is read, checks and warnings."""
