"""What is HTTP and not OpenAI's: bodies within a limit, event streams, one line a request."""
