"""OpenAI's API: bodies read into requests, and answers written as responses."""
