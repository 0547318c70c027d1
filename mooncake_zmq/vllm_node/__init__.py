"""A node beside a vLLM server, which computes prompts and answers for it."""
