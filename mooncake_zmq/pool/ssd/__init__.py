"""The SSD tier of a pool: blocks in slots of one file, values in a log, and the indexes that find both."""
