"""Anthropic's Messages API over the chat that the OpenAI API has: its bodies are translated, its answers written anew."""
