"""Puts this directory on the import path, for the harnesses that several test modules share."""
