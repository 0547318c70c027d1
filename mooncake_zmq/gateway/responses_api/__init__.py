"""OpenAI's Responses API over its chats: bodies are translated, answers written anew. It keeps no conversation."""
