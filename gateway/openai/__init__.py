"""OpenAI's chat completions: its JSON to and from the messages of `chiasm.v1`."""
