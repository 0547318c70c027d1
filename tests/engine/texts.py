"""Texts that are hard to cut into tokens and to put together again."""

TEXTS = [
    "plain text, 12345 and more",
    "naïve café, Zürich, 東京, русский, 🙂👩\u200d🚀",
    "\n\n  indented\tcode()\n",
    "a replacement \ufffd inside, and one last \ufffd",
    "",
]
